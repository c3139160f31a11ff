"""The owner of the arena in ``transport.unix.arena``: ``python -m kvferry.bench.arena_peer FOLDER SIZE …``.

Keeps one block of each size in a memory store and listens on three sockets in FOLDER: ``arena`` passes the
segments, ``lease`` hands out leases on the blocks, ``raw`` answers with as many bytes and does nothing.
Prints one line when it is ready, and ends when its standard input closes.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from kvferry import transports
from kvferry.bench.blocks import block_spec
from kvferry.core.buffers import PAGE_NBYTES
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, KVFerryError
from kvferry.core.keys import BlockKey
from kvferry.core.leases import LeaseTicket, SlotReadLease
from kvferry.core.memory import MemoryStore
from kvferry.transports import Connection
from kvferry.wire import SHARED_ARENA, ArenaOffer, Channel, ChannelOptions, ChannelServer

__all__ = ["FILL", "LEASE", "RELEASE", "ArenaPeer", "arena_options", "fill_block", "read_ticket"]

LEASE, RELEASE, FILL = b"l", b"r", b"f"
"""Requests: two bytes each, the second one the number of the block; a fill has its seed, one byte, too."""
_KEY = BlockKey(bytes(32))
_TILE_NBYTES = 1 << 20
_WAIT_S = 60.0
_IDLE_S = 3600.0
_TICKETS = msgspec.msgpack.Decoder(LeaseTicket)


def arena_options(role: str) -> ChannelOptions:
    """What both ends say in the handshake."""
    return ChannelOptions(role=role, session=role, capabilities=(SHARED_ARENA,))


def fill_block(view: memoryview, seed: int) -> None:
    """Bytes that both processes can make."""
    tile = np.random.default_rng(seed).integers(0, 256, _TILE_NBYTES, np.uint8)
    whole = np.frombuffer(view, np.uint8)
    for start in range(0, len(whole), _TILE_NBYTES):
        piece = whole[start : start + _TILE_NBYTES]
        piece[:] = tile[: len(piece)]


def read_ticket(connection: Connection) -> LeaseTicket:
    """The answer to a lease."""
    head = bytearray(2)
    connection.recv_into([memoryview(head)], deadline_in(_WAIT_S))
    data = bytearray(int.from_bytes(head, "little"))
    connection.recv_into([memoryview(data)], deadline_in(_WAIT_S))
    return _TICKETS.decode(data)


class _Owner:
    """The store, and what the three sockets do with it."""

    def __init__(self, sizes: list[int]) -> None:
        capacity = sum(-(-size // PAGE_NBYTES) * PAGE_NBYTES for size in sizes)
        self._store = MemoryStore(capacity, lease_s=_IDLE_S)
        self._namespaces = [self._store.namespace(block_spec(size)) for size in sizes]
        self._leases: dict[int, SlotReadLease] = {}
        for number in reversed(range(len(sizes))):  # the largest one first: the segment is made for it
            self._fill(number, 0)

    def _fill(self, number: int, seed: int) -> None:
        namespace = self._namespaces[number]
        namespace.remove([_KEY])
        with namespace.reserve([_KEY], parent=None, deadline=deadline_in(_WAIT_S)) as lease:
            fill_block(lease.view(0), seed)
            lease.commit()

    def serve_arena(self, channel: Channel) -> None:
        offer = ArenaOffer(channel, self._store.arena, may_write=True)
        while (incoming := channel.receive_idle(deadline_in(_IDLE_S))) is not None:
            offer.answer(incoming, deadline_in(_WAIT_S))

    def serve_leases(self, connection: Connection) -> None:
        request = bytearray(2)
        while True:
            connection.recv_into([memoryview(request)], deadline_in(_IDLE_S))
            number = request[1]
            if request[:1] == LEASE:
                lease = self._namespaces[number].load([_KEY], deadline=deadline_in(_WAIT_S))
                data = msgspec.msgpack.encode(lease.ticket())
                connection.send([len(data).to_bytes(2, "little"), data], deadline_in(_WAIT_S))
                self._leases[number] = lease
            elif request[:1] == RELEASE:
                self._leases.pop(number).release()
            else:
                seed = bytearray(1)
                connection.recv_into([memoryview(seed)], deadline_in(_WAIT_S))
                self._fill(number, seed[0])
                connection.send([b"k"], deadline_in(_WAIT_S))


def _serve_raw(sock: socket.socket) -> None:
    """Two bytes that say how many come back."""
    with sock:
        while len(request := sock.recv(2)) == 2:
            sock.sendall(bytes(int.from_bytes(request, "little")))


class ArenaPeer:
    """The owner as a child process.

    Attributes:
        folder: Where its sockets lie.
    """

    def __init__(self, sizes: list[int]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvf-")  # short: a socket's path has a limit
        self.folder = Path(self._folder.name)
        command = [sys.executable, "-m", "kvferry.bench.arena_peer", str(self.folder), *map(str, sizes)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        if not self._child.stdout.readline():
            code = self._child.wait(_WAIT_S)
            self._folder.cleanup()
            raise KVFerryError(f"the benchmark's owning process ended with code {code}; is memory short?")

    def url(self, name: str, options: str = "") -> str:
        """Address of one of its sockets."""
        return f"unix://{self.folder}/{name}{options}"

    def close(self) -> None:
        """End it."""
        self._child.communicate(timeout=_WAIT_S)
        self._folder.cleanup()


def main() -> None:
    """Serve until standard input closes, as it does however the benchmark ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, *sizes = sys.argv[1:]
    owner = _Owner([int(size) for size in sizes])
    server = ChannelServer(f"unix://{folder}/arena", arena_options("owner"), owner.serve_arena, name="bench")
    leases = transports.listen(f"unix://{folder}/lease")
    raw = socket.socket(socket.AF_UNIX)
    raw.bind(f"{folder}/raw")
    raw.listen()

    def serve_leases() -> None:
        with contextlib.suppress(ConnectionClosedError):  # the benchmark is done
            owner.serve_leases(leases.accept(deadline_in(_IDLE_S)))

    threading.Thread(target=serve_leases, name="kvferry-bench-lease", daemon=True).start()
    threading.Thread(
        target=lambda: _serve_raw(raw.accept()[0]), name="kvferry-bench-raw", daemon=True
    ).start()
    print("ready", time.monotonic(), flush=True)
    sys.stdin.read()
    leases.close()
    server.close()


if __name__ == "__main__":
    main()
