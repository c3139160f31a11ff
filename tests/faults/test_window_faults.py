"""A prefill process that dies, or stops, while it writes through mooncake into the slots of decode."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from kvferry.core import deadline_in
from kvferry.core.clock import time_left
from kvferry.core.errors import KVFerryError
from kvferry.core.memory import MemoryStore
from kvferry.streaming import LayerReceiver
from kvferry.testing.blocks import stop_process
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.transports.mooncake import MooncakeRegions, unavailable

pytestmark = pytest.mark.skipif(bool(unavailable()) and "CI" not in os.environ, reason=unavailable())

SPEC = kv_spec(8, kv_heads=4, head_dim=64)
PROMPT = 16 * 8 + 5

# It writes layers over and over, past the stream's own order, until it is killed.
SENDER = """
import sys
from kvferry.core import deadline_in
from kvferry.streaming import LayerSender, windows, windows_capability
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.transports.mooncake import MooncakeRegions
from kvferry.wire import Channel, ChannelOptions
regions = MooncakeRegions(trusted_peers=["127.0.0.1"])
write = windows.RegionDelivery._write
def again(self, part, deadline):
    write(self, part, deadline)
    print("writing", flush=True)
    while True:
        write(self, part, deadline)
windows.RegionDelivery._write = again
kv = PromptKV(kv_spec(8, kv_heads=4, head_dim=64), 16 * 8 + 5)
options = ChannelOptions(role="prefill", session="child", capabilities=(windows_capability(regions),))
channel = Channel.connect(sys.argv[1], options, deadline_in(60))
sender = LayerSender(channel, kv.spec, regions=regions)
sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(60))
sender.put_layer(0, kv.put(0))
sys.stdin.read()
"""


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore(16 << 20)
    yield store
    store.close()


@pytest.fixture
def regions() -> Iterator[MooncakeRegions]:
    with closing(MooncakeRegions(trusted_peers=["127.0.0.1"])) as endpoint:
        yield endpoint


@pytest.fixture
def end(store: MemoryStore, regions: MooncakeRegions) -> Iterator[DecodeEnd]:
    with DecodeEnd("tcp://127.0.0.1:0", store, SPEC, timeout_s=20.0, regions=regions) as end:
        yield end


@contextmanager
def writing_child(end: DecodeEnd) -> Iterator[tuple[subprocess.Popen[str], LayerReceiver]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, end.address],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "writing\n"
            yield child, end.receiver(deadline_in(60))
        finally:
            child.kill()


def taken_again(store: MemoryStore, regions: MooncakeRegions) -> None:
    """All slots are free, no window is open, and what is stored in them now stays as it is."""
    limit = deadline_in(60)
    while (stats := store.stats()).leases or stats.quarantined_nbytes or stats.used_nbytes:
        assert time_left(limit), stats
        time.sleep(0.005)
    assert not regions._windows
    kv = PromptKV(SPEC, PROMPT, seed=5)
    namespace = store.namespace(SPEC)
    data = np.full(SPEC.block_nbytes, 0x77, np.uint8)
    namespace.save([(key, data) for key in kv.keys], parent=None, deadline=deadline_in(60))
    with namespace.load(kv.keys, deadline=deadline_in(60)) as lease:
        limit = deadline_in(0.3)
        while time_left(limit):
            assert all((np.frombuffer(lease.view(i), np.uint8) == 0x77).all() for i in range(len(kv.keys)))
            time.sleep(0.01)


def test_killed_while_it_writes(end: DecodeEnd, store: MemoryStore, regions: MooncakeRegions) -> None:
    with writing_child(end) as (child, receiver):
        child.kill()
        with pytest.raises(KVFerryError):
            receiver.wait(deadline_in(60))
        taken_again(store, regions)


@pytest.mark.parametrize("stopped", [True, False])
def test_given_up_by_decode_while_it_writes(
    end: DecodeEnd, store: MemoryStore, regions: MooncakeRegions, *, stopped: bool
) -> None:
    """No word of the sender is needed, and what it still sends meets nothing."""
    with writing_child(end) as (child, receiver):
        if stopped:
            stop_process(child.pid)
        started = time.monotonic()
        receiver.close()
        assert time.monotonic() - started < 25
        if stopped:
            child.send_signal(signal.SIGCONT)
        taken_again(store, regions)
