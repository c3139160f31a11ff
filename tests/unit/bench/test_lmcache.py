"""The baseline of LMCache's server, against one that speaks its protocol and keeps what it is given."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvferry.bench.lmcache import LMCacheLink
from kvferry.core.errors import ProtocolError

NBYTES = 8192


class Stub:
    """One connection; counts its commands."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.commands: list[int] = []
        self.cut_nbytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(20)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="suite-lmcache")
        self._thread.start()

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        with suppress(ConnectionError), sock, sock.makefile("rb") as stream:
            while len(head := stream.read(186)) == 186:
                command, nbytes, *_ = struct.unpack("iiiiiiiii", head[:36])
                self.commands.append(command)
                key = head[36:].strip()
                if command == 1:
                    self.values[key] = stream.read(nbytes)
                    continue
                value = self.values.get(key, b"")[self.cut_nbytes :] if command == 2 else b""
                code = 200 if command == 5 or value else 400
                sock.sendall(struct.pack("iiiiiiiii", code, len(value), 1, 6, 0, 0, 0, 0, 0) + value)

    def close(self) -> None:
        self._thread.join(20)
        self._listener.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.close()


def test_blocks_go_there_and_come_back(stub: Stub) -> None:
    link = LMCacheLink(stub.port, NBYTES, 4 * NBYTES)
    try:
        link.fill()
        assert (len(stub.values), stub.commands) == (4, [1, 1, 1, 1, 5])
        put, got = link.put(2, 3), link.get(3, 2, touch=True)
        assert (put.nbytes, got.nbytes, len(put.latencies), len(got.latencies)) == (
            6 * NBYTES, 6 * NBYTES, 3, 2,
        )  # fmt: skip
        assert stub.commands[5:] == [1, 1, 5] * 3 + [2] * 6
        assert bytes(link._into.take()) == next(iter(stub.values.values()))
        stub.cut_nbytes = 1
        with pytest.raises(ProtocolError, match="8191 bytes of 8192"):
            link.get(1, 1, touch=False)
    finally:
        link.close()
