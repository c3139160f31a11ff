"""LMCache's server (``lmcache_server``) as a baseline, where it is installed: PUT and GET over its protocol.

Its messages are written and read here with nothing around them, so what is measured is its server and the
connection, not its client.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvferry.bench.ceilings import ColdWalk
from kvferry.bench.results import Sample
from kvferry.core.errors import KVFerryError, ProtocolError
from kvferry.transports.ip import tune

__all__ = ["LMCacheLink", "lmcache_command", "lmcache_server"]

_WAIT_S: Final = 60.0
_START_S: Final = 60.0
_PAUSE_S: Final = 0.1
_REQUEST: Final = struct.Struct("iiiiiiiii150s")  # command, length, format, dtype, location, shape, key
_REPLY: Final = struct.Struct("iiiiiiiii")  # code, length, format, dtype, shape, location
_PUT, _GET, _HEALTH = 1, 2, 5
_SUCCESS: Final = 200
_FORMAT, _UINT8 = 1, 6


def lmcache_command() -> str | None:
    """The program, if it is on the path."""
    return shutil.which("lmcache_server")


@contextlib.contextmanager
def lmcache_server(command: str) -> Iterator[int]:
    """The port of a server of our own.

    Raises:
        KVFerryError: If it does not come up.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    words = [command, "127.0.0.1", str(port), "cpu"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            until = time.monotonic() + _START_S
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                if child.poll() is not None or time.monotonic() > until:
                    raise KVFerryError(f"LMCache's server did not start: {' '.join(words)}")
                time.sleep(_PAUSE_S)
            yield port
        finally:
            child.kill()


class LMCacheLink:
    """Blocks to and from a server of LMCache, from and to memory that is walked through. One thread.

    A block is one value. PUT is not answered, so a batch ends with a question for the server's health.

    Args:
        port: Of the server, on this machine.
        nbytes: Of a block.
        walk_nbytes: What each end walks through.
    """

    def __init__(self, port: int, nbytes: int, walk_nbytes: int) -> None:
        self._nbytes = nbytes
        self._names = max(2, walk_nbytes // nbytes)
        self._saved = self._loaded = 0
        self._source = ColdWalk(nbytes, walk_nbytes)
        self._into = ColdWalk(nbytes, walk_nbytes, fill=0)
        self._small = memoryview(bytearray(_REPLY.size))
        self._socket = socket.create_connection(("127.0.0.1", port), _WAIT_S)
        tune(self._socket)  # as ours; its server's end, by which it answers GET, is its own
        self._socket.settimeout(None)

    def put(self, batch: int, count: int) -> Sample:
        """``count`` batches of ``batch`` blocks."""
        latencies = []
        for _ in range(count):
            began = time.perf_counter()
            for _ in range(batch):
                self._socket.sendall(self._request(_PUT, self._saved, self._nbytes))
                self._socket.sendall(self._source.take())
                self._saved += 1
            self._socket.sendall(self._request(_HEALTH, 0, 0))
            self._reply()
            latencies.append(time.perf_counter() - began)
        return Sample(sum(latencies), count * batch * self._nbytes, 0.0, tuple(latencies))

    def get(self, batch: int, count: int, *, touch: bool) -> Sample:
        """``count`` batches of ``batch`` blocks that were put before; every byte is read if ``touch``.

        Raises:
            ProtocolError: If one is not there, or has another size.
        """
        latencies, total = [], 0
        for _ in range(count):
            began = time.perf_counter()
            for _ in range(batch):
                self._socket.sendall(self._request(_GET, self._loaded, 0))
                self._loaded += 1
                if (nbytes := self._reply()) != self._nbytes:
                    raise ProtocolError(f"LMCache's server has {nbytes} bytes of {self._nbytes}", remote=True)
                view = self._into.take()
                self._take(view)
                if touch:
                    total += int(np.frombuffer(view, np.uint64).max())
            latencies.append(time.perf_counter() - began)
        return Sample(sum(latencies), count * batch * self._nbytes, 0.0, tuple(latencies))

    def fill(self) -> None:
        """Put a value under every name that is used."""
        self.put(self._names, 1)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _request(self, command: int, number: int, nbytes: int) -> bytes:
        key = b"bench@1@0@%x@uint8" % (number % self._names)
        shape = (nbytes, 1, 1, 1) if nbytes else (0, 0, 0, 0)
        return _REQUEST.pack(command, nbytes, _FORMAT, _UINT8, 0, *shape, key.ljust(150))

    def _reply(self) -> int:
        """The length that a reply names."""
        self._take(self._small)
        code, nbytes, *_ = _REPLY.unpack(self._small)
        if code != _SUCCESS:
            raise ProtocolError(f"LMCache's server answered with {code}", remote=True)
        return int(nbytes)

    def _take(self, view: memoryview) -> None:
        if self._socket.recv_into(view, len(view), socket.MSG_WAITALL) != len(view):
            raise KVFerryError("LMCache's server ended the connection")
