"""A worker as a process: load, listen, say so, serve until a signal comes."""

from __future__ import annotations

import os

from kvferry.core.config import Config
from kvferry.engine.process import StopSignal, print_ready
from kvferry.engine.workers.common import Engine, load_engine
from kvferry.engine.workers.decode_worker import DecodeWorker
from kvferry.engine.workers.prefill_worker import PrefillWorker

__all__ = ["run_decode", "run_prefill"]


def run_prefill(config: Config) -> None:
    """Be a prefill worker until SIGTERM or SIGINT.

    Raises:
        ConfigError: If the model cannot be run or the address not be bound.
    """
    stop = StopSignal()
    engine = load_engine(config)
    worker = PrefillWorker(engine)
    _ready("prefill", engine, listen=worker.address)
    stop.wait(worker.tick)
    worker.close(config.prefill.drain)


def run_decode(config: Config) -> None:
    """Be a decode worker until SIGTERM or SIGINT.

    Raises:
        ConfigError: If the model cannot be run or an address not be bound.
    """
    stop = StopSignal()
    engine = load_engine(config)
    worker = DecodeWorker(engine)
    _ready("decode", engine, listen=worker.address, kv=worker.kv_address)
    stop.wait(worker.tick)
    worker.close(config.decode.drain)


def _ready(role: str, engine: Engine, **addresses: str) -> None:
    print_ready(
        role,
        **addresses,
        model=engine.spec.model,
        revision=engine.spec.revision[:12] or "none",
        max_model_len=engine.max_model_len,
        pid=os.getpid(),
    )
