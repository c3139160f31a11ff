"""Two processes are stopped past their leases while the store goes on: no wrong byte is ever taken for good.

The children have only the arena's descriptors and a ticket of plain data; none of the store's code runs
in them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvferry.core.blockstore import Namespace, ReadLease
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.core.leases import Session
from kvferry.core.memory import MemoryStore
from kvferry.core.segments import Slot
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, stop_process, wait_until

BLOCKS = 16
HELD = 3
LEASE_S = 1.5
SPEC = small_spec("sigstop")

COMMON = """
import sys, msgspec
from kvferry.core.arena import ArenaLayout, ArenaMap
from kvferry.core.errors import LeaseExpiredError
from kvferry.core.leases import LeaseTicket, MappedReadLease
from kvferry.testing.blocks import block_bytes
layout = msgspec.json.decode(sys.argv[1], type=ArenaLayout)
fds = [(int(sys.argv[2]), int(sys.argv[3]))]
arena = ArenaMap.from_fds(layout, fds, writable=sys.argv[4] == "fill")
print("ready", flush=True)
ticket = msgspec.json.decode(sys.stdin.readline(), type=LeaseTicket)
"""
FILLER = (
    COMMON
    + """
views = [arena.view(slot) for slot in ticket.slots]
passes = 0
while True:
    passes += 1
    for view in views:
        for at in range(8, len(view), 512):
            view[at : at + 512] = bytes([0xEE]) * len(view[at : at + 512])
        view[:8] = passes.to_bytes(8, "little")
    if passes == 1:
        print("busy", flush=True)
"""
)
READER = (
    COMMON
    + """
lease = MappedReadLease(arena, ticket)
want = [block_bytes(key, slot.nbytes) for key, slot in zip(ticket.keys, ticket.slots)]
passes = 0
try:
    while True:
        got = [bytes(lease.view(index)) for index in range(len(lease))]
        lease.check()
        if got != want:
            print("WRONG BYTES TAKEN FOR GOOD", flush=True)
            sys.exit(1)
        passes += 1
        if passes == 1:
            print("busy", flush=True)
except LeaseExpiredError:
    got = [bytes(lease.view(index)) for index in range(len(lease))]
    print("expired", sum(g != w for g, w in zip(got, want)), flush=True)
"""
)


class Child:
    def __init__(self, store: MemoryStore, script: str, mode: str) -> None:
        (fds,) = store.arena.descriptors()
        layout = msgspec.json.encode(store.layout()).decode()
        command = [sys.executable, "-c", script, layout, *map(str, fds), mode]
        self.process = subprocess.Popen(
            command, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"
        self.session = Session(mode, pid=self.process.pid)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self, ticket: object) -> bool:
        """Whether it has begun; a reader that came after the end of its lease has not."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(ticket).decode() + "\n")
        self.process.stdin.flush()
        return self.line() == "busy"

    def stop(self) -> None:
        stop_process(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def stopped_reader(store: MemoryStore, keys: list[BlockKey]) -> tuple[Child, ReadLease]:
    """One that stands still in mid-lease; a lease that was too short for that is taken again, longer."""
    for lease_s in (LEASE_S, 6.0, 24.0):
        store.lease_s = lease_s
        reader = Child(store, READER, "read")
        lease = store.for_session(reader.session).namespace(SPEC).load(keys, deadline=deadline_in(20))
        if reader.start(lease.ticket()):
            reader.stop()
            if time.monotonic() < lease.expires_at:
                return reader, lease
        reader.kill()
    raise AssertionError("a reader takes more than 24 s to begin")


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore(BLOCKS * SPEC.block_nbytes, lease_s=LEASE_S)
    yield store
    store.close()


def overwrite(namespace: Namespace, first: int, blocks: int) -> None:
    """Save ``blocks`` blocks, four a chain, and verify after each that every stored block is right."""
    for number in range(first, first + blocks // 4):
        assert save_blocks(namespace, chain(namespace, number, 4)) == 4
        verify(namespace, range(1, number + 1))


def chain(namespace: Namespace, number: int, blocks: int) -> list[BlockKey]:
    return namespace.keys([number] * (blocks * SPEC.block_tokens))


def verify(namespace: Namespace, numbers: range) -> int:
    seen = 0
    for number in numbers:
        with namespace.load(chain(namespace, number, 4), deadline=deadline_in(20)) as lease:
            for index, key in enumerate(lease.keys):
                assert lease.view(index) == block_bytes(key, SPEC.block_nbytes), (number, index)
            seen += len(lease)
    return seen


def test_processes_stopped_past_their_leases(store: MemoryStore) -> None:
    namespace = store.namespace(SPEC)
    shared = chain(namespace, 1, HELD)
    save_blocks(namespace, shared)  # also makes the segment whose descriptors are handed out
    children = [filler := Child(store, FILLER, "fill")]
    try:
        filling = store.for_session(filler.session).namespace(SPEC)
        fill = filling.reserve(chain(namespace, 0, HELD), parent=None, deadline=deadline_in(20))
        assert filler.start(fill.ticket())
        reader, read = stopped_reader(store, shared)
        children.append(reader)
        filler.stop()
        wait_until(lambda: time.monotonic() > max(fill.expires_at, read.expires_at))
        stats = store.stats()
        assert (stats.pinned_nbytes, stats.leases) == (0, 0)
        assert stats.quarantined_nbytes == HELD * SPEC.block_nbytes

        overwrite(namespace, 100, 2 * BLOCKS)
        assert namespace.lookup(shared).prefix == 0
        before = passes(store, fill.slots[0])
        for child in (filler, reader):
            child.process.send_signal(signal.SIGCONT)
        assert reader.line() == f"expired {HELD}"
        assert reader.process.wait(30) == 0
        wait_until(lambda: passes(store, fill.slots[0]) > before + 2)
        overwrite(namespace, 200, 2 * BLOCKS)
        assert verify(namespace, range(100, 300)) == BLOCKS - HELD

        assert store.stats().quarantined_nbytes == HELD * SPEC.block_nbytes
        filler.session.end()  # its connection is gone, but the process may still write
        assert store.stats().quarantined_nbytes == HELD * SPEC.block_nbytes
        filler.kill()
        assert store.stats().quarantined_nbytes == 0
        overwrite(namespace, 300, 2 * BLOCKS)
        assert verify(namespace, range(300, 400)) == BLOCKS
        assert store.stats().used_nbytes == store.stats().capacity_nbytes
    finally:
        for child in children:
            child.kill()


def test_the_end_of_a_process_wakes_who_waits_for_its_slots(store: MemoryStore) -> None:
    namespace = store.namespace(SPEC)
    save_blocks(namespace, chain(namespace, 1, 1))
    filler = Child(store, FILLER, "fill")
    try:
        filling = store.for_session(filler.session).namespace(SPEC)
        fill = filling.reserve(
            namespace.keys([0] * BLOCKS * SPEC.block_tokens), parent=None, deadline=deadline_in(20)
        )
        assert filler.start(fill.ticket())
        os.kill(filler.process.pid, signal.SIGKILL)
        assert save_blocks(namespace, chain(namespace, 2, 4), seconds=60) == 4
        assert time.monotonic() < fill.expires_at + 30
        assert verify(namespace, range(1, 3)) == 4
    finally:
        filler.kill()


def passes(store: MemoryStore, slot: Slot) -> int:
    """How often the filler has gone over its slots, as it wrote there itself."""
    return int.from_bytes(store.arena.view(slot)[:8], "little")
