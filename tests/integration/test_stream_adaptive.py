"""``stream.codec=auto`` over a link whose rate changes in the middle of a stream, as a bad link's does."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.core import DType, deadline_in
from kvferry.core.memory import MemoryStore
from kvferry.streaming import LayerSender, LinkCodec, StreamCodec
from kvferry.testing.fault_proxy import FaultProxy, Faults
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.wire import Channel
from kvferry.wire.messages import Handoff, SamplingParams

LAYERS = 64
SPEC = kv_spec(LAYERS, kv_heads=8, head_dim=64, dtype=DType.BFLOAT16)  # 32 KiB a slice
HANDOFF = Handoff(prompt_tokens=1, cached_tokens=0, first_token=0, sampling=SamplingParams())
SLOW = "zstd(level=9)"
"""Some 0.1 GB/s: worth it on a slow link, and only there. It leaves the GIL to the proxy."""
SLOWEST = "zstd(level=19)"
"""Some 0.01 GB/s: a tenth of what any machine sends raw, and ten times what the slow link of a test takes."""


class Traffic:
    """Streams the same prompt over and over in a thread, all layers of each at once."""

    def __init__(self, channel: Channel, link: LinkCodec, end: DecodeEnd, blocks: int) -> None:
        self._channel, self._link, self._end = channel, link, end
        self._kv = PromptKV(SPEC, 16 * blocks, normal=True)
        self._layers = [self._kv.put(layer) for layer in range(LAYERS)]
        self._stop = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="traffic")

    def _run(self) -> None:
        try:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                self._stream(f"s{number}")
        except Exception as error:  # noqa: BLE001 - thread root, looked at by the test
            self.error = error

    def _stream(self, name: str) -> None:
        with LayerSender(self._channel, SPEC, codec=self._link) as sender:
            sender.begin(name, self._kv.keys, 0, deadline=deadline_in(60))
            for number, views in enumerate(self._layers):
                sender.put_layer(number, views)
            sender.finish(HANDOFF, deadline_in(60))
        with self._end.receiver(deadline_in(20)) as receiver:
            receiver.wait(deadline_in(20))
        self._end.namespace.clear()

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert self.error is None


@contextmanager
def traffic(blocks: int, candidate: str) -> Iterator[tuple[FaultProxy, LinkCodec]]:
    store = MemoryStore(2 * blocks * SPEC.block_nbytes, lease_s=60)
    codec = StreamCodec("auto", candidates=[candidate])
    with (
        DecodeEnd("tcp://127.0.0.1:0", store, SPEC, codec=StreamCodec()) as end,
        FaultProxy(end.address) as proxy,
    ):
        link = codec.link(end.address)
        assert link is not None
        channel = end.connect(proxy.address)
        try:
            with Traffic(channel, link, end, blocks):
                yield proxy, link
        finally:
            channel.close()
    store.close()


def seconds_until(link: LinkCodec, chosen: str, limit_s: float) -> float:
    start = time.monotonic()
    while link.status().chosen != chosen:
        assert time.monotonic() < start + limit_s, (chosen, link.status().line())
        time.sleep(0.01)
    return time.monotonic() - start


def test_a_link_that_becomes_slow_and_fast_again_in_a_stream_is_followed() -> None:
    """At a small scale; that it takes 2 s at most is for a machine that does nothing else (soak)."""
    with traffic(1, SLOWEST) as (proxy, link):
        for rate, chosen in ((0.7e6, SLOWEST), (None, "raw"), (0.7e6, SLOWEST)):
            proxy.faults = Faults(rate=rate, only="to_server")
            seconds_until(link, chosen, 30)


@pytest.mark.soak
def test_a_change_of_the_rate_is_followed_within_two_seconds() -> None:
    with traffic(24, SLOW) as (proxy, link):
        for rate in (30e6, None, 20e6, 1e9, 30e6, None, 10e6):
            proxy.faults = Faults(rate=rate, only="to_server")
            chosen = SLOW if rate is not None and rate <= 30e6 else "raw"
            took = seconds_until(link, chosen, 10)
            assert took <= 2.0, (rate, took, link.status().line())
            time.sleep(1.0)  # settled: it stays so
            assert link.status().chosen == chosen, link.status().line()
