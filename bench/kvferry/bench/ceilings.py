"""Ceilings that are measured beside every figure: what memory and a bare socket give in the same run.

Buffers are cold: source and destination walk through at least 256 MiB, so that no cache holds them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from kvferry.bench.results import Sample
from kvferry.bench.side_by_side import SideBySide
from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.errors import ConnectionClosedError
from kvferry.transports.ip import tune

__all__ = ["COLD_NBYTES", "ColdWalk", "MemcpyCold", "RawSocket"]

COLD_NBYTES = 256 << 20
_WAIT_S = 60.0


class ColdWalk:
    """Pieces of a populated, page-aligned buffer of at least 256 MiB, taken in turn."""

    def __init__(self, piece_nbytes: int, total_nbytes: int = COLD_NBYTES, fill: int = 1) -> None:
        self._count = max(1, -(-total_nbytes // piece_nbytes))
        self._piece = piece_nbytes
        self._whole = page_aligned(self._count * piece_nbytes)
        np.frombuffer(self._whole, np.uint8)[:] = fill
        self._next = 0

    def take(self) -> memoryview:
        """The next piece."""
        start = self._next * self._piece
        self._next = (self._next + 1) % self._count
        return self._whole[start : start + self._piece]


class MemcpyCold:
    """Copies of ``piece_nbytes`` from one cold buffer to another, ``pieces`` a run.

    Args:
        piece_nbytes: Bytes of one copy.
        pieces: Copies of one run.
        walk_nbytes: What source and destination each walk through; below 256 MiB they are not cold.
        threads: That copy side by side, each its own pieces.
    """

    def __init__(
        self, piece_nbytes: int, pieces: int, *, walk_nbytes: int = COLD_NBYTES, threads: int = 1
    ) -> None:
        self._pieces = pieces
        self._threads = SideBySide(threads)
        self._src = ColdWalk(piece_nbytes, walk_nbytes)
        self._dst = ColdWalk(piece_nbytes, walk_nbytes, fill=0)
        self._nbytes = piece_nbytes * pieces

    def __call__(self) -> Sample:
        """One run."""
        pairs = [
            (np.frombuffer(self._dst.take(), np.uint8), np.frombuffer(self._src.take(), np.uint8))
            for _ in range(self._pieces)
        ]
        count = self._threads.threads
        return Sample(self._threads.run(_copy, [pairs[t::count] for t in range(count)]), self._nbytes)

    def close(self) -> None:
        """End its threads."""
        self._threads.close()


def _copy(pairs: Sequence[tuple[ByteArray, ByteArray]]) -> None:
    for dst, src in pairs:
        np.copyto(dst, src)


_SINK = """
import mmap, socket, sys
port, piece, pieces, total = map(int, sys.argv[1:5])
count = max(1, -(-total // piece))
whole = memoryview(mmap.mmap(-1, count * piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x8000))
s = socket.create_connection(("127.0.0.1", port), 60)
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
at = 0
while True:
    for _ in range(pieces):
        view = whole[at * piece : (at + 1) * piece]
        at = (at + 1) % count
        got = 0
        while got < piece:
            n = s.recv_into(view[got:])
            if not n:
                sys.exit(0)
            got += n
    s.sendall(b"k")
"""


class RawSocket:
    """Plain sockets on loopback: ``pieces`` messages in a stream to a child process, then one byte back."""

    def __init__(self, piece_nbytes: int, pieces: int) -> None:
        self._pieces, self._nbytes = pieces, piece_nbytes * pieces
        self._src = ColdWalk(piece_nbytes)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_WAIT_S)
            port = server.getsockname()[1]
            args = [str(v) for v in (port, piece_nbytes, pieces, COLD_NBYTES)]
            self._child = subprocess.Popen([sys.executable, "-c", _SINK, *args])
            self._socket, _ = server.accept()
        self._socket.settimeout(_WAIT_S)
        tune(
            self._socket
        )  # as a connection's, so that what is compared is not the kernel's congestion control

    def __call__(self) -> Sample:
        """One run."""
        views = [self._src.take() for _ in range(self._pieces)]
        start = time.perf_counter()
        for view in views:
            self._socket.sendall(view)
        if self._socket.recv(1) != b"k":
            raise ConnectionClosedError("the baseline's receiving process ended; is memory short?")
        return Sample(time.perf_counter() - start, self._nbytes)

    def close(self) -> None:
        """End the child process."""
        self._socket.close()
        self._child.wait(_WAIT_S)
