"""A store, a decode end on ``inproc``, and a handoff."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.core.memory import MemoryStore
from kvferry.core.spec import KVSpec
from kvferry.testing.prompt_kv import kv_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.wire.messages import Handoff, SamplingParams


@pytest.fixture
def spec() -> KVSpec:
    return kv_spec()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """Empty at the start; at the end nothing may be leased, and no thread of a stream may be left."""
    store = MemoryStore(4 << 20)
    yield store
    limit = time.monotonic() + 20
    while (stats := store.stats()).leases or stats.pinned_nbytes or stats.quarantined_nbytes:
        assert time.monotonic() < limit, f"left behind: {stats}"
        time.sleep(0.01)
    while left := [t.name for t in threading.enumerate() if t.name.startswith("kvferry-stream")]:
        assert time.monotonic() < limit, f"threads left: {left}"
        time.sleep(0.01)
    store.close()


@pytest.fixture
def end(store: MemoryStore, spec: KVSpec) -> Iterator[DecodeEnd]:
    with DecodeEnd("inproc://decode", store, spec) as end:
        yield end


@pytest.fixture
def handoff() -> Callable[[int], Handoff]:
    def make(prompt_tokens: int) -> Handoff:
        return Handoff(
            prompt_tokens=prompt_tokens, cached_tokens=0, first_token=7, sampling=SamplingParams(seed=1)
        )

    return make
