"""A prefill process that dies, or stops, while it writes into the slots of decode's arena."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.core import deadline_in
from kvferry.core.clock import time_left
from kvferry.core.errors import KVFerryError
from kvferry.core.memory import MemoryStore
from kvferry.streaming import LayerSender
from kvferry.testing.blocks import stop_process
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.wire import SharedArena
from kvferry.wire.messages import Handoff, SamplingParams

SPEC = kv_spec(8, kv_heads=4, head_dim=64)
PROMPT = 16 * 8 + 5
HANDOFF = Handoff(prompt_tokens=PROMPT, cached_tokens=0, first_token=1, sampling=SamplingParams())

# Its copies never end: the first one tells, and waits in the middle of the slot.
SENDER = """
import sys, threading
from kvferry.core import deadline_in
from kvferry.streaming import STREAM_CAPABILITIES, LayerSender, delivery
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.wire import Channel, ChannelOptions, SharedArena
def write(slot, at, view):
    slot[at : at + 8] = 0x5A
    print("writing", flush=True)
    sys.stdin.read()  # until killed
delivery.write_into = write
kv = PromptKV(kv_spec(8, kv_heads=4, head_dim=64), 16 * 8 + 5)
options = ChannelOptions(role="prefill", session="child", capabilities=STREAM_CAPABILITIES)
channel = Channel.connect(sys.argv[1], options, deadline_in(60))
sender = LayerSender(channel, kv.spec, arena=SharedArena())
sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(60))
sender.put_layer(0, kv.put(0))
threading.Event().wait(60)
"""


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore(16 << 20)
    yield store
    store.close()


@pytest.fixture
def end(store: MemoryStore) -> Iterator[DecodeEnd]:
    with (
        tempfile.TemporaryDirectory(prefix="kvf-") as folder,
        DecodeEnd(f"unix://{folder}/kv", store, SPEC, timeout_s=20.0, segments=True) as end,
    ):
        yield end


@contextmanager
def _writing_child(end: DecodeEnd) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", SENDER, end.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        yield child
    finally:
        child.kill()
        child.communicate(timeout=60)


def _nothing_left(end: DecodeEnd, store: MemoryStore) -> None:
    limit = deadline_in(60)
    while end.watch.reap() or store.stats().quarantined_nbytes:
        assert time_left(limit), store.stats()
        time.sleep(0.01)
    stats = store.stats()
    assert (stats.used_nbytes, stats.leases, stats.pinned_nbytes) == (0, 0, 0)
    assert end.namespace.lookup(PromptKV(SPEC, PROMPT).keys).prefix == 0


def _another_stream_is_right(end: DecodeEnd) -> None:
    kv = PromptKV(SPEC, PROMPT, seed=5)
    channel = end.connect()
    sender = LayerSender(channel, SPEC, arena=SharedArena())
    sender.begin("other", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    for layer in range(len(SPEC.layers)):
        sender.put_layer(layer, kv.put(layer))
    sender.finish(HANDOFF, deadline_in(20))
    with end.receiver(deadline_in(60)) as receiver:
        receiver.wait(deadline_in(60))
        for block in range(9):
            assert receiver.view(7, block) == kv.layer_bytes(7, block)
    end.namespace.clear()
    channel.close()


def test_killed_in_the_middle_of_a_slot(end: DecodeEnd, store: MemoryStore) -> None:
    with _writing_child(end) as child:
        receiver = end.receiver(deadline_in(60))
        child.kill()
        with pytest.raises(KVFerryError):
            receiver.wait(deadline_in(60))
        receiver.close()
    _nothing_left(end, store)
    _another_stream_is_right(end)


def test_stopped_in_the_middle_of_a_slot(end: DecodeEnd, store: MemoryStore) -> None:
    """Neither time nor the end of the stream frees what a stopped process may still write."""
    with _writing_child(end) as child:
        receiver = end.receiver(deadline_in(60))
        stop_process(child.pid)
        started = time.monotonic()
        receiver.close()
        assert time.monotonic() - started < 25
        assert end.watch.reap() == 1
        held = store.stats().quarantined_nbytes
        assert held == store.stats().used_nbytes > 0
        _another_stream_is_right(end)
        assert store.stats().quarantined_nbytes == held
        os.kill(child.pid, signal.SIGCONT)
        assert end.watch.reap() == 1, "it may go on writing now"
    _nothing_left(end, store)
