"""The engine's KV in a pool on a device that is much too small for the load: the same tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.core.errors import ConfigError
from kvferry.core.memory import MemoryStore
from kvferry.device.base import Device, DeviceBytes
from kvferry.device.cpu import CpuDevice
from kvferry.engine.local import LocalEngine
from kvferry.engine.model import Model
from kvferry.engine.paged_kv import PagedKV
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.testing.sim_device import SimBytes, SimDevice
from kvferry.wire.messages import SamplingParams

BLOCK = 8
TURNS = 6  # conversations, each of two prompts


class _HostStream:
    """The stream of who computes on the host: work is done when it is queued, and waits are waited for."""

    clock = 0.0

    def push(self, work: Callable[[], None]) -> int:
        work()
        return 0

    def passed(self, number: int) -> bool:
        return number == 0

    def join(self, number: int) -> None:
        assert number == 0

    def wait_event(self, event: Any) -> None:
        event.synchronize()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _HostComputes(SimDevice):
    """A simulated device on whose memory the host computes; only its copies are asynchronous."""

    def current_stream(self) -> Any:
        return _HostStream()


class _SimKV(PagedKV):
    def _as_tensor(self, memory: DeviceBytes) -> torch.Tensor:
        assert isinstance(memory, SimBytes)
        return torch.frombuffer(memory.raw.data, dtype=torch.uint8)


def _tokens(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, length)]


def _talk(engine: LocalEngine) -> list[list[int]]:
    """Conversations with a common beginning, turn by turn; then all of the first prompts again."""
    shared, params = _tokens(99, 20), SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = [[*shared, *_tokens(n, 26 + 3 * n)] for n in range(TURNS)]
    firsts = [engine.generate(prompt, params).run() for prompt in prompts]
    longer = [[*p, *a, *_tokens(n + 50, 11)] for n, (p, a) in enumerate(zip(prompts, firsts, strict=True))]
    answers = [*firsts, *(engine.generate(prompt, params).run() for prompt in longer)]
    again = [engine.generate(prompt, params) for prompt in prompts]
    answers += [generation.run() for generation in again]
    assert all(generation.cached_tokens >= 40 for generation in again)
    return answers


def check_same_tokens(host: Model, model: Model, device: Device, make: type[PagedKV] = PagedKV) -> None:
    """Show that a pool a quarter of what the load needs gives the answers of the host with room for all."""
    with LocalEngine(host, block_tokens=BLOCK) as engine:
        expected = _talk(engine)
    needed = sum(-(-(20 + 26 + 3 * n + 5 + 11) // BLOCK) for n in range(TURNS))
    store = MemoryStore(4 << 20)
    kv = make(model.config, num_blocks=needed // 4, block_tokens=BLOCK, dtype=model.dtype, device=device)
    with LocalEngine(model, kv=kv, store=store) as engine:
        assert _talk(engine) == expected
    stats = kv.pool.stats()
    assert stats.demoted_blocks > 20
    assert stats.promoted_blocks > 20
    assert stats.evicted_blocks > 40
    assert stats.lost_blocks == 0
    assert kv.free_blocks == kv.num_blocks
    kv.close()
    store.close()


def tiny(folder: Path) -> Model:
    """A random model, in float64: backs ends that add in another order agree on every token."""
    return load_model(make_tiny(folder, layers=2, hidden=64, head_dim=16), "float64")


@pytest.fixture(scope="module")
def model(models: Path) -> Model:
    return tiny(models / "device_kv")


@pytest.fixture
def sim() -> Iterator[SimDevice]:
    device = _HostComputes(jitter_s=0.0005)
    yield device
    device.close()


def test_a_pool_on_the_host_four_times_too_small(model: Model) -> None:
    check_same_tokens(model, model, CpuDevice())


def test_a_pool_on_a_simulated_device_four_times_too_small(model: Model, sim: SimDevice) -> None:
    check_same_tokens(model, model, sim, _SimKV)


def test_prompts_are_shared_while_they_are_in_use(model: Model) -> None:
    kv = PagedKV(model.config, num_blocks=32, block_tokens=BLOCK, dtype=model.dtype, keep_prefixes=True)
    params, prompt = SamplingParams(max_tokens=4, ignore_eos=True), _tokens(1, 3 * BLOCK + 2)
    store = MemoryStore(1 << 20)
    with LocalEngine(model, kv=kv, store=store) as engine:
        first = iter(engine.generate(prompt, params))
        seen = [next(first), next(first)]  # its blocks are published now
        before = kv.free_blocks
        other = engine.generate(prompt, params)
        tokens = other.run()
        assert other.cached_tokens == 3 * BLOCK
        assert kv.free_blocks == before
        assert [*seen, *first] == tokens
    assert store.stats().entries == 0  # nothing was evicted: the pool has it
    kv.close()
    store.close()


def test_a_device_that_torch_cannot_compute_on_is_refused(model: Model, sim: SimDevice) -> None:
    with pytest.raises(ConfigError, match="torch cannot compute on sim:0"):
        PagedKV(model.config, num_blocks=2, device=sim)
    assert not [t for t in threading.enumerate() if t.name == "kvferry-copy-sim:0"]
