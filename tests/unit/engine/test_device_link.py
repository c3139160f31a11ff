"""Streams out of a device's pages at the same time, of which one goes to a peer that takes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, KVFerryError
from kvferry.core.keys import BlockKey
from kvferry.core.regions import RegionPlan
from kvferry.engine import device_link
from kvferry.engine.device_link import DeviceLink
from kvferry.engine.paged_kv import PagedKV
from kvferry.streaming import LayerSender, PageSender
from kvferry.testing.blocks import wait_until
from kvferry.testing.devices_pages import host_regions, on_device, pages_spec
from kvferry.testing.sim_device import SimDevice
from kvferry.wire.messages import Handoff, SamplingParams, StreamDone

HANDOFF = Handoff(prompt_tokens=12, cached_tokens=0, first_token=7, sampling=SamplingParams())
DONE = StreamDone(stored_blocks=3, kv_nbytes=1, wire_s=0.1)


class Peer:
    """In place of a LayerSender."""

    def __init__(self, *, stalled: bool = False) -> None:
        self.missing, self.stalled = frozenset[int](), stalled
        self.error: KVFerryError | None = None
        self.kept: list[Callable[[], None]] = []
        self.taken = 0

    def begin(
        self, stream: str, keys: Sequence[bytes], tail_tokens: int, *, deadline: float
    ) -> frozenset[int]:
        self.missing = frozenset(range(len(keys)))
        return self.missing

    def put_layer(self, layer: int, blocks: Sequence[object], *, sent: Callable[[], None]) -> None:
        if self.stalled:
            self.kept.append(sent)
        else:
            self.taken += 1
            sent()

    def finish(self, handoff: Handoff, deadline: float, *, lossy: Collection[int]) -> StreamDone:
        return DONE

    def abort(self, reason: str) -> None:
        while self.kept:
            self.kept.pop()()

    def __exit__(self, *_: object) -> None:
        self.abort("")


@pytest.fixture
def link() -> Iterator[DeviceLink]:
    device = SimDevice()
    spec = pages_spec("stacked_nhd")
    plan = RegionPlan(spec, [on_device(device, region) for region in host_regions(spec, "stacked_nhd")])
    kv = SimpleNamespace(pool=SimpleNamespace(device=device, plan=plan), num_layers=len(plan.layers))
    made = DeviceLink(cast("PagedKV", kv))
    yield made
    made.close()
    device.close()


def begun(stack: ExitStack, link: DeviceLink, peer: Peer) -> PageSender:
    pages = stack.enter_context(link.sender(cast("LayerSender", peer)))
    keys = [BlockKey(bytes([n]) * 32) for n in range(3)]
    pages.begin("s", keys, 0, deadline=deadline_in(20))
    return pages


def put(pages: PageSender, times: int) -> None:
    for _ in range(times):
        pages.put_layer(0, [(0, 5), (1, 0), (2, 3)])


def test_a_peer_that_takes_nothing_holds_up_no_other_stream(link: DeviceLink) -> None:
    with ExitStack() as stack:
        stalled = [Peer(stalled=True) for _ in range(3)]
        for peer in stalled:
            put(begun(stack, link, peer), 20)  # more than there are slots
        wait_until(lambda: [len(peer.kept) for peer in stalled] == [16, 8, 8], 20)
        for _ in range(3):
            peer = Peer()
            with ExitStack() as inner:
                pages = begun(inner, link, peer)
                put(pages, 40)
                assert pages.finish(HANDOFF, deadline_in(20)) == DONE
            assert peer.taken == 40
        assert link.engines == 4, "one is used again"
    assert link.engines == 2
    with ExitStack() as stack:
        put(begun(stack, link, Peer()), 1)
        assert link.engines == 2


def test_without_memory_for_further_slots_streams_share(
    link: DeviceLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> object:
        raise ConfigError("no memory for pinned slots")

    monkeypatch.setattr(device_link, "CopyEngine", none)
    with ExitStack() as stack:
        put(begun(stack, link, Peer()), 1)
        other = Peer()
        pages = begun(stack, link, other)
        put(pages, 20)
        assert pages.finish(HANDOFF, deadline_in(20)) == DONE
    assert link.engines == 1
