"""KV that has lost something reaches no decode worker that takes no loss, whichever way it would go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.keys import BlockKey
from kvferry.engine.local import LocalEngine
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.engine.workers.common import Engine, load_engine
from kvferry.engine.workers.decode_worker import DecodeWorker
from kvferry.engine.workers.prefill_worker import PrefillWorker
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.messages import (
    Finished,
    Generate,
    GenerateReady,
    Prefill,
    PrefillDone,
    SamplingParams,
    TokensOut,
)

OPTIONS = ChannelOptions(role="test", session="test")
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = [(7 * i) % 250 for i in range(70)]  # 4 blocks and a tail
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", layers=2, max_positions=256)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    with closing(LocalEngine(load_model(model))) as engine:
        return engine.generate(PROMPT, SAMPLING).run()


def engine_of(model: Path, allow_lossy: bool) -> Engine:
    flags: dict[str, Any] = {
        "model.path": str(model),
        "model.threads": 1,
        "kv.num_blocks": 16,
        "store.dram_capacity": "4MiB",
        "prefill.listen": "tcp://127.0.0.1:0",
        "decode.listen": "tcp://127.0.0.1:0",
        "stream.allow_lossy": allow_lossy,
    }
    return load_engine(load_config(None, flags=flags).config)


class Split:
    """Both workers in this process, and their stores."""

    def __init__(self, model: Path, *, prefill_lossy: bool, decode_lossy: bool) -> None:
        self._stack = ExitStack()
        self.at_prefill, self.at_decode = engine_of(model, prefill_lossy), engine_of(model, decode_lossy)
        self.decode = self._stack.enter_context(closing(DecodeWorker(self.at_decode)))
        self.prefill = self._stack.enter_context(closing(PrefillWorker(self.at_prefill)))
        self.requests = 0

    def __enter__(self) -> Split:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def complete(self) -> tuple[list[int], PrefillDone]:
        """Be the gateway."""
        self.requests += 1
        name, limit = f"s{self.requests}", deadline_in(LIMIT_S)
        with ExitStack() as stack:
            decode, prefill = (
                stack.enter_context(closing(Channel.connect(worker.address, OPTIONS, limit)))
                for worker in (self.decode, self.prefill)
            )
            ask = Generate(request=name, stream=name, prompt_tokens=len(PROMPT), sampling=SAMPLING)
            kv_address = decode.call(ask, GenerateReady, deadline=limit).kv_address
            message = Prefill(request=name, stream=name, kv_address=kv_address, sampling=SAMPLING)
            tokens = np.asarray(PROMPT, "<u4")
            done = prefill.call(message, PrefillDone, payload=[tokens], deadline=limit)
            found: list[int] = []
            while not isinstance(answer := decode.receive(limit).message, Finished):
                assert isinstance(answer, TokensOut)
                found += answer.token_ids
            return found, done


@pytest.fixture
def split(model: Path, request: pytest.FixtureRequest) -> Iterator[Split]:
    prefill_lossy, decode_lossy = request.param
    with Split(model, prefill_lossy=prefill_lossy, decode_lossy=decode_lossy) as split:
        yield split


def spoil(engine: Engine, blocks: int) -> list[BlockKey]:
    """Blocks of the prompt that have lost everything, marked as a codec's are."""
    namespace = engine.store.namespace(engine.spec)
    keys = namespace.keys(PROMPT)
    with namespace.reserve(keys[:blocks], parent=None, deadline=deadline_in(20)) as lease:
        for index in range(len(lease)):
            lease.view(index)[:] = bytes(len(lease.view(index)))
        lease.mark_lossy(range(len(lease)))
        assert lease.commit() == blocks
    return keys


def stored(engine: Engine, keys: list[BlockKey], *, takes_lossy: bool) -> int:
    return engine.store.namespace(engine.spec, takes_lossy=takes_lossy).lookup(keys).prefix


@pytest.mark.parametrize("split", [(False, False), (True, False), (False, True)], indirect=True)
def test_where_one_end_takes_no_loss_prefill_computes_what_it_holds_with_loss(
    split: Split, expected: list[int]
) -> None:
    keys = spoil(split.at_prefill, 2)
    tokens, done = split.complete()
    assert tokens == expected
    assert (done.cached_tokens, done.computed_tokens) == (0, len(PROMPT))
    for engine in (split.at_prefill, split.at_decode):  # and exact blocks have taken their place
        assert stored(engine, keys, takes_lossy=False) == len(keys)
    assert split.complete()[1].cached_tokens == 64


@pytest.mark.parametrize("split", [(True, True)], indirect=True)
def test_where_both_take_loss_all_that_follows_is_marked(split: Split, expected: list[int]) -> None:
    keys = spoil(split.at_prefill, 2)
    tokens, done = split.complete()
    assert tokens != expected  # of zeros: what is marked has really been used
    assert done.cached_tokens == 32
    for engine in (split.at_prefill, split.at_decode):
        assert stored(engine, keys, takes_lossy=True) == len(keys)
        assert stored(engine, keys, takes_lossy=False) == 0


@pytest.mark.parametrize("split", [(False, False)], indirect=True)
def test_what_decode_holds_with_loss_is_sent_to_it_anew(split: Split, expected: list[int]) -> None:
    keys = spoil(split.at_decode, 4)
    assert split.complete()[0] == expected
    assert stored(split.at_decode, keys, takes_lossy=False) == len(keys)
