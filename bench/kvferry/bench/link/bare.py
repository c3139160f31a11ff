"""Bare sockets in the same pattern as the channels beside them: a header and the parts, then one byte back.

As fast as Python goes: one system call sends header and parts, one receives all parts (``MSG_WAITALL``), into
the same cold, page-aligned memory. Over TLS, whose sockets have neither, part by part.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvferry.bench.link.memory import LinkMemory, MemoryPool, SharedMemory, timed
from kvferry.bench.link.requests import Operation
from kvferry.bench.results import Sample
from kvferry.core.errors import ConfigError, ConnectionClosedError, KVFerryError
from kvferry.transports.ip import tune

__all__ = ["BareLink", "BareServer", "Certificates", "Kind"]

Kind = Literal["tcp", "unix", "tls"]

_HEADER = struct.Struct("<BIQ")  # operation, parts, bytes of each
_WAIT_S = 60
_MAX_PARTS = 1024
_MAX_NBYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of the listener, and what who dials trusts."""

    cert: str
    key: str
    ca: str

    @property
    def options(self) -> str:
        """As options of an address."""
        return f"cert={self.cert}&key={self.key}&ca={self.ca}"


class _Wire:
    """One connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._whole = not isinstance(sock, ssl.SSLSocket)
        if self._whole:
            # blocking in the kernel: with a timeout of its own, Python would poll before each call
            sock.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", _WAIT_S, 0))
        else:
            sock.settimeout(_WAIT_S)
        if sock.family != socket.AF_UNIX:
            tune(sock)  # as a connection's, so that what is compared is not the kernel's congestion control
        self._header = bytearray(_HEADER.size)

    def send(self, operation: Operation, nbytes: int, parts: list[memoryview], batch: int) -> None:
        header = memoryview(_HEADER.pack(operation, batch, nbytes))
        if not self._whole:
            for part in (header, *parts):
                self.sock.sendall(part)
            return
        left = [header, *parts]
        while left:
            sent = self.sock.sendmsg(left[:_MAX_PARTS])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def receive(self, places: list[memoryview]) -> int:
        """Fill all places; the bytes that came."""
        if self._whole and len(places) > 1:
            wanted = sum(map(len, places))
            got = self.sock.recvmsg_into(places[:_MAX_PARTS], 0, socket.MSG_WAITALL)[0]
            if got == wanted:
                return got
            for place in places:
                if got < len(place):
                    self._fill(place[got:])
                got = max(0, got - len(place))
            return wanted
        for place in places:
            self._fill(place)
        return sum(map(len, places))

    def _fill(self, place: memoryview) -> None:
        got, flags = 0, socket.MSG_WAITALL if self._whole else 0
        while got < len(place):
            n = self.sock.recv_into(place[got:], 0, flags)
            if n == 0:
                raise ConnectionClosedError("the bare socket's peer has ended")
            got += n

    def receive_header(self) -> tuple[Operation, int, int]:
        self._fill(memoryview(self._header))
        operation, batch, nbytes = _HEADER.unpack(self._header)
        return Operation(operation), batch, nbytes

    def ack(self) -> None:
        self.sock.sendall(b"k")


class BareLink:
    """The end that measures. One thread at a time; a failure ends the benchmark.

    Args:
        kind: Of the socket.
        address: ``(host, port)``, or the path of a unix socket.
        memory: Of this end; others may use it in turn with this.
        certificates: For ``tls``.
        server_cpu_s: Processor seconds of the other end so far.
    """

    def __init__(
        self,
        kind: Kind,
        address: tuple[str, int] | str,
        memory: LinkMemory,
        *,
        certificates: Certificates | None = None,
        server_cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._memory = memory
        self._nbytes = memory.nbytes
        self._server_cpu_s = server_cpu_s
        self._wire = _Wire(_dial(kind, address, certificates))

    def put(self, batch: int, count: int) -> Sample:
        """Messages of ``batch`` parts, each answered with one byte."""
        return self._timed(self._put, batch, count)

    def get(self, batch: int, count: int) -> Sample:
        """Messages of ``batch`` parts from the other end."""
        return self._timed(self._get, batch, count)

    def echo(self, count: int) -> Sample:
        """Parts there and back again."""
        return self._timed(self._echo, 1, count)

    def close(self) -> None:
        """End the connection."""
        self._wire.sock.close()

    def _timed(self, operation: Callable[[int], int], batch: int, count: int) -> Sample:
        def failed(error: KVFerryError) -> None:
            raise error

        calls = (partial(operation, batch) for _ in range(count))
        return timed(calls, failed, lambda: time.process_time() + self._server_cpu_s())

    def _put(self, batch: int) -> int:
        _, parts = self._memory.parts(batch)
        self._wire.send(Operation.PUT, self._nbytes, parts, batch)
        if self._wire.sock.recv(1) != b"k":
            raise ConnectionClosedError("the bare socket's peer has ended; is memory short?")
        return batch * self._nbytes

    def _get(self, batch: int) -> int:
        self._wire.send(Operation.GET, self._nbytes, [], batch)
        return self._answer(batch)

    def _echo(self, batch: int) -> int:
        _, parts = self._memory.parts(batch)
        self._wire.send(Operation.ECHO, self._nbytes, parts, batch)
        return 2 * self._answer(batch)

    def _answer(self, batch: int) -> int:
        places = self._memory.places(batch)
        self._wire.receive_header()
        return self._wire.receive(places)


def _dial(kind: Kind, address: tuple[str, int] | str, certificates: Certificates | None) -> socket.socket:
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(_WAIT_S)
        sock.connect(str(address))
        return sock
    assert isinstance(address, tuple)
    if kind == "tcp":
        return socket.create_connection(address, _WAIT_S)
    if certificates is None:
        raise ConfigError("a bare TLS socket needs certificates")
    sock = socket.create_connection(address, _WAIT_S)
    context = ssl.create_default_context(cafile=certificates.ca)
    return context.wrap_socket(sock, server_hostname=address[0])


class BareServer:
    """The other end: a thread that accepts, and one for each connection, which ends with it.

    Args:
        kind: Of the socket.
        address: ``(host, 0)``, or the path of a unix socket.
        walk_nbytes: What each end walks through.
        certificates: For ``tls``.
        pool: Memory that others use in turn with this; else its own.
    """

    def __init__(
        self,
        kind: Kind,
        address: tuple[str, int] | str,
        walk_nbytes: int,
        certificates: Certificates | None = None,
        pool: MemoryPool | None = None,
    ) -> None:
        self._pool = pool or MemoryPool()
        self._walk_nbytes = walk_nbytes
        self._context: ssl.SSLContext | None = None
        if kind == "unix":
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(address))
            self._listener.listen()
        else:
            assert isinstance(address, tuple)
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._listener = socket.create_server(address, family=family)
        if kind == "tls":
            assert certificates is not None
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(certificates.cert, certificates.key)
        self._thread = threading.Thread(target=self._accept, name="kvferry-bench-bare", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that was bound; 0 for a unix socket."""
        return 0 if self._listener.family == socket.AF_UNIX else int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Accept no more; connections end with their other ends."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_WAIT_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(sock,), name="kvferry-bench-bare-one", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, KVFerryError, ValueError), contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            if self._context is not None:
                sock.settimeout(_WAIT_S)
                sock = stack.enter_context(self._context.wrap_socket(sock, server_side=True))
            self._answer(_Wire(sock))

    def _answer(self, wire: _Wire) -> None:
        shared: SharedMemory | None = None
        while True:
            operation, batch, nbytes = wire.receive_header()
            if not 0 < nbytes * batch <= _MAX_NBYTES:
                return
            if shared is None or shared.size[0] != nbytes:
                shared = self._pool.of(nbytes, self._walk_nbytes)
            memory = shared.take()
            try:
                _answer(wire, operation, batch, memory)
            finally:
                shared.give_back(memory)


def _answer(wire: _Wire, operation: Operation, batch: int, memory: LinkMemory) -> None:
    if operation is Operation.GET:
        wire.send(operation, memory.nbytes, memory.parts(batch)[1], batch)
        return
    places = memory.places(batch)
    wire.receive(places)
    if operation is Operation.ECHO:
        wire.send(operation, memory.nbytes, places, batch)
    else:
        wire.ack()
