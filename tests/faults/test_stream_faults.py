"""A process is killed, a byte is flipped, a link is cut in mid-stream: nothing partial becomes visible."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvferry import transports
from kvferry.core import deadline_in
from kvferry.core.buffers import Buf, as_bytes_view
from kvferry.core.errors import (
    ConnectionClosedError,
    CorruptBlockError,
    KVFerryError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.core.memory import MemoryStore
from kvferry.streaming import LayerSender
from kvferry.testing.blocks import stop_process
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.transports.base import Connection
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.messages import Handoff, SamplingParams

SPEC = kv_spec(8, kv_heads=4, head_dim=64)
PROMPT = 16 * 8 + 5
HANDOFF = Handoff(prompt_tokens=PROMPT, cached_tokens=0, first_token=1, sampling=SamplingParams())

SENDER = """
import sys
from kvferry.core import deadline_in
from kvferry.streaming import LayerSender
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.wire import Channel, ChannelOptions
spec = kv_spec(8, kv_heads=4, head_dim=64)
kv = PromptKV(spec, 16 * 8 + 5)
channel = Channel.connect(sys.argv[1], ChannelOptions(role="prefill", session="child"), deadline_in(60))
sender = LayerSender(channel, spec)
sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(60))
for layer in range(3):
    sender.put_layer(layer, kv.put(layer))
print("sent", flush=True)
sys.stdin.read()  # until killed
"""

RECEIVER = """
import sys
from kvferry.core import deadline_in
from kvferry.core.memory import MemoryStore
from kvferry.testing.prompt_kv import kv_spec
from kvferry.testing.streams import DecodeEnd
end = DecodeEnd("tcp://127.0.0.1:0", MemoryStore(16 << 20), kv_spec(8, kv_heads=4, head_dim=64))
print(end.address, flush=True)
sys.stdin.read()  # until killed
"""


@contextmanager
def _child(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=60)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore(16 << 20)
    yield store
    store.close()


@pytest.fixture
def end(store: MemoryStore) -> Iterator[DecodeEnd]:
    with DecodeEnd("tcp://127.0.0.1:0", store, SPEC, timeout_s=20.0) as end:
        yield end


def _nothing_left(end: DecodeEnd, store: MemoryStore, kv: PromptKV) -> None:
    assert end.namespace.lookup(kv.keys).prefix == 0
    assert set(end.namespace.lookup(kv.keys).tiers) == {None}
    limit = deadline_in(20)  # who waits may learn of the end before the last was given back
    while (stats := store.stats()).used_nbytes or stats.leases or stats.pinned_nbytes:
        assert time.monotonic() < limit, stats
        time.sleep(0.002)
    assert stats.quarantined_nbytes == 0


def _stream_is_right(end: DecodeEnd, kv: PromptKV) -> None:
    channel = end.connect()
    sender = LayerSender(channel, SPEC)
    missing = sender.begin("next", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    assert missing == frozenset(range(8))
    for layer in range(8):
        sender.put_layer(layer, kv.put(layer))
    sender.finish(HANDOFF, deadline_in(20))
    with end.receiver(deadline_in(60)) as receiver:
        receiver.wait(deadline_in(60))
        for layer in range(8):
            for block in range(kv.blocks):
                assert receiver.view(layer, block).tobytes() == kv.layer_bytes(layer, block)
    channel.close()


def test_the_sender_is_killed(end: DecodeEnd, store: MemoryStore) -> None:
    kv = PromptKV(SPEC, PROMPT)
    with _child(SENDER, end.address) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "sent\n"
        receiver = end.receiver(deadline_in(60))
        receiver.wait_layer(2, deadline_in(60))
        assert store.stats().pinned_nbytes > 0
        os.kill(child.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(TransportError):
            receiver.wait_layer(3, deadline_in(60))
        assert time.monotonic() - killed < 40
    _nothing_left(end, store, kv)
    _stream_is_right(end, kv)


def test_the_sender_is_stopped(store: MemoryStore) -> None:
    """A process that stands still closes nothing: the deadline ends the stream."""
    kv = PromptKV(SPEC, PROMPT)
    with DecodeEnd("tcp://127.0.0.1:0", store, SPEC, timeout_s=2.5) as end:
        with _child(SENDER, end.address) as child:
            assert child.stdout is not None
            child.stdout.readline()
            receiver = end.receiver(deadline_in(60))
            receiver.wait_layer(2, deadline_in(60))
            stop_process(child.pid)
            with pytest.raises(TransferTimeoutError, match="3 of 8 layers complete"):
                receiver.wait(deadline_in(15))
        _nothing_left(end, store, kv)
        _stream_is_right(end, kv)


@pytest.mark.parametrize("stream", ["idle", "sending"])
def test_the_receiver_is_killed(stream: str) -> None:
    kv = PromptKV(SPEC, PROMPT)
    with _child(RECEIVER) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        rate = "?rate=200kB/s" if stream == "sending" else ""
        options = ChannelOptions(role="prefill", session="p")
        channel = Channel.connect(address + rate, options, deadline_in(60))
        sender = LayerSender(channel, SPEC)
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(60))
        sender.put_layer(0, kv.put(0))
        os.kill(child.pid, signal.SIGKILL)
        limit = deadline_in(60)
        while sender.error is None:
            assert time.monotonic() < limit, "the sender does not see the end of its peer"
            time.sleep(0.01)
        sender.put_layer(1, kv.put(1))
        with pytest.raises(TransportError):
            sender.finish(HANDOFF, deadline_in(60))


def test_the_receiver_is_stopped() -> None:
    """The ring fills, nothing is acknowledged: the deadline of the stream ends the sender."""
    kv = PromptKV(SPEC, PROMPT)
    with _child(RECEIVER) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        channel = Channel.connect(address, ChannelOptions(role="prefill", session="p"), deadline_in(60))
        sender = LayerSender(channel, SPEC)
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(1.0))
        stop_process(child.pid)
        for layer in range(8):
            sender.put_layer(layer, kv.put(layer))
        with pytest.raises(TransferTimeoutError):
            sender.finish(HANDOFF, deadline_in(20))


class FaultyConnection(Connection):
    """Passes everything on; in the ``at``-th large message it flips a byte, or cuts the link."""

    def __init__(self, inner: Connection, at: int, *, cut: bool = False) -> None:
        self._inner = inner
        self._left = at
        self._cut = cut

    @property
    def local_address(self) -> str:
        return self._inner.local_address

    @property
    def peer_address(self) -> str:
        return self._inner.peer_address

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        data = bytearray(b"".join(as_bytes_view(p) for p in parts))
        if len(data) > 4096:
            self._left -= 1
            if self._left == 0:
                if self._cut:
                    self._inner.send([data[: len(data) // 2]], deadline)
                    self._inner.abort()
                    raise ConnectionClosedError("cut by the test")
                data[len(data) // 2] ^= 0x10
        self._inner.send([data], deadline)

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        self._inner.recv_into(views, deadline)

    def wait_readable(self, deadline: float) -> bool:
        return self._inner.wait_readable(deadline)

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


def _faulty_sender(end: DecodeEnd, at: int, *, cut: bool = False) -> LayerSender:
    connection = FaultyConnection(transports.connect(end.address, deadline_in(60)), at, cut=cut)
    channel = Channel.open(connection, ChannelOptions(role="prefill", session="p"), deadline_in(60))
    return LayerSender(channel, SPEC)


def _put_everything(sender: LayerSender, kv: PromptKV) -> None:
    sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(30))
    for layer in range(8):
        sender.put_layer(layer, kv.put(layer))
    sender.finish(HANDOFF, deadline_in(20))


@pytest.mark.parametrize("at", [1, 8])
def test_a_flipped_byte_is_found(end: DecodeEnd, store: MemoryStore, at: int) -> None:
    kv = PromptKV(SPEC, PROMPT)
    with pytest.raises(KVFerryError):
        _put_everything(_faulty_sender(end, at), kv)
    receiver = end.receiver(deadline_in(60))
    with pytest.raises(CorruptBlockError, match="xxh3_64"):
        receiver.wait(deadline_in(60))
    with pytest.raises(CorruptBlockError):
        receiver.wait_layer(7, deadline_in(60))
    _nothing_left(end, store, kv)
    _stream_is_right(end, kv)


@pytest.mark.parametrize("at", [1, 5])
def test_the_link_is_cut_in_mid_frame(end: DecodeEnd, store: MemoryStore, at: int) -> None:
    kv = PromptKV(SPEC, PROMPT)
    sender = _faulty_sender(end, at, cut=True)
    with pytest.raises(ConnectionClosedError):
        _put_everything(sender, kv)
    receiver = end.receiver(deadline_in(60))
    with pytest.raises(ConnectionClosedError):
        receiver.wait(deadline_in(60))
    _nothing_left(end, store, kv)
    _stream_is_right(end, kv)


def test_the_store_is_closed_in_mid_stream() -> None:
    kv = PromptKV(SPEC, PROMPT)
    store = MemoryStore(16 << 20)
    with DecodeEnd("tcp://127.0.0.1:0", store, SPEC) as end:
        sender = LayerSender(end.connect(), SPEC)
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(30))
        sender.put_layer(0, kv.put(0))
        receiver = end.receiver(deadline_in(60))
        receiver.wait_layer(0, deadline_in(60))
        store.close()
        for layer in range(1, 8):
            sender.put_layer(layer, kv.put(layer))
        with pytest.raises(KVFerryError, match="the store was closed"):
            sender.finish(HANDOFF, deadline_in(20))
        with pytest.raises(KVFerryError, match="the store was closed"):
            receiver.wait(deadline_in(60))
