"""The ``unix`` transport: ``unix:///path?rate=1GB/s&spin=300us&allow_uid=1001``, with descriptors.

Only processes of the listener's own user, and of root, are let in, whatever the permissions of the
socket's file say; ``allow_uid`` and ``allow_gid`` name others (numbers, with commas between). Who is
refused finds the reason at its first call, and the listener logs it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import math
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from kvferry.core.address import Address
from kvferry.core.clock import is_past, remaining
from kvferry.core.errors import (
    AuthError,
    ConnectError,
    ConnectionClosedError,
    KVFerryError,
    ProtocolError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.core.log import LogLimiter
from kvferry.transports.base import Connection, Listener, SharedMemoryConnection, Transport
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.ip import reason_of
from kvferry.transports.sockets import GuardedSocket, poll_timeout_ms
from kvferry.transports.unix_options import UnixOptions, parse_unix
from kvferry.transports.unix_path import SocketFile, bind_path, peer_credentials

__all__ = ["UnixConnection", "UnixListener", "UnixTransport"]

_log = logging.getLogger(__name__)
_SEND_BUFFER_NBYTES: Final = 1 << 20
_MAX_BATCH: Final = 253  # SCM_MAX_FD
_INT_NBYTES: Final = struct.calcsize("i")
_BATCH_ROOM: Final = socket.CMSG_SPACE(_MAX_BATCH * _INT_NBYTES)
# Plain numbers: an operation on members of the socket module's enums costs as much as a system call.
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED: Final = int(socket.MSG_CTRUNC)
_PEEK: Final = int(socket.MSG_PEEK)
_NOW: Final = int(socket.MSG_DONTWAIT)
_ALL: Final = int(socket.MSG_WAITALL)
# What a listener sends to a process that it does not let in, before anything else: this and a text.
_REFUSED: Final = bytes.fromhex("00ff4b564659d5c41e0a7bb20d93e6f8")
_MAX_REFUSAL_NBYTES: Final = 1024


class UnixTransport(Transport):
    """Connects processes of one machine; has no state, any thread may use it."""

    scheme: ClassVar[str] = "unix"

    def connect(self, address: str, deadline: float) -> Connection:
        """Connect to ``address``; a listener of another user than root is refused like a peer that dials.

        A listener that does not let this process in says so at the first call that sends or receives.

        Raises:
            AuthError: If another user listens there, whom neither ``allow_uid`` nor ``allow_gid`` names.
            ConnectError: See :meth:`Transport.connect`.
            ConfigError: See :meth:`Transport.connect`.
        """
        parsed, settings = parse_unix(address)
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectError(f"cannot connect to {parsed.url}: {reason_of(error)}") from error
        try:
            _dial(sock, parsed, deadline)
            credentials = pid, uid, gid = peer_credentials(sock)
            if not settings.admits(sock, uid, gid):
                raise AuthError(
                    f"process {pid} of uid {uid}, gid {gid} listens on unix://{parsed.path}, this one has "
                    f"uid {os.geteuid()}; if that is meant, add allow_uid={uid} to the address"
                )
            return _connection(
                sock,
                settings,
                credentials,
                local_address=_end_url(parsed.path, os.getpid(), os.geteuid()),
                peer_address=parsed.url,
                admitted=False,
            )
        except BaseException:
            sock.close()
            raise

    def listen(self, address: str) -> UnixListener:
        """Listen on ``address``; a socket file whose listener is gone is replaced.

        The file is for the own user alone (0600), unless others are allowed; then it is open to all (0666)
        and what counts is who they are.
        """
        parsed, settings = parse_unix(address)
        sock, file = bind_path(parsed.path, 0o666 if settings.open else 0o600)
        return UnixListener(sock, file, parsed, settings)


class UnixListener(Listener):
    """A listening socket and its file. Any thread may accept or close.

    Closing removes the file if it is still the same one; a forked child's copy leaves it alone.
    """

    def __init__(self, sock: socket.socket, file: SocketFile, asked: Address, settings: UnixOptions) -> None:
        sock.setblocking(False)
        self._guard = GuardedSocket(sock)
        self._file = file
        self._settings = settings
        self._limiter = LogLimiter(_log)
        options = dict(asked.options)
        if settings.open:  # they must trust us in turn
            options.pop("allow_gid", None)
            options["allow_uid"] = str(os.geteuid())
        self._address: Final = Address("unix", path=asked.path, options=options).url

    @property
    def address(self) -> str:
        """The URL to dial, with the options that hold for both ends."""
        return self._address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address}>"

    def accept(self, deadline: float) -> Connection:
        """The next connection of a process that is let in; others are told why not, and logged."""
        self._guard.enter(f"the listener on {self._address}")
        try:
            while True:
                sock = self._accept(deadline)
                connection = self._admit(sock)
                if connection is not None:
                    return connection
        finally:
            self._guard.leave()

    def _accept(self, deadline: float) -> socket.socket:
        poll = select.poll()
        poll.register(self._guard.sock, select.POLLIN)
        while True:
            ready = poll.poll(poll_timeout_ms(deadline))
            if self._guard.closed:
                raise ConnectionClosedError(f"the listener on {self._address} was closed while accepting")
            if not ready:
                if not is_past(deadline):
                    continue
                raise TransferTimeoutError(f"nobody connected to {self._address} by the deadline")
            try:
                return self._guard.sock.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                continue  # the peer has gone again
            except OSError as error:
                if self._guard.closed:
                    continue
                raise TransportError(f"cannot accept on {self._address}: {reason_of(error)}") from error

    def _admit(self, sock: socket.socket) -> Connection | None:
        try:
            credentials = pid, uid, gid = peer_credentials(sock)
            if self._settings.admits(sock, uid, gid):
                return _connection(
                    sock,
                    self._settings,
                    credentials,
                    local_address=self._address,
                    peer_address=_end_url(self._file.path, pid, uid),
                    admitted=True,
                )
        except BaseException:
            sock.close()
            raise
        text = f"the listener on {self._address} lets in uid {os.geteuid()} and root{self._settings.others}"
        _refuse(sock, f"{text}; process {pid} has uid {uid}, gid {gid}: ask its owner for allow_uid={uid}")
        self._limiter.log(
            logging.WARNING, uid, "%s; process %d of uid %d, gid %d was refused", text, pid, uid, gid
        )
        return None

    def close(self) -> None:
        """Stop listening, remove the file, and wake a waiting thread."""
        if not self._guard.begin_close():
            return
        try:
            self._file.remove()
            with contextlib.suppress(OSError):
                self._guard.sock.shutdown(socket.SHUT_RDWR)
            self._limiter.flush()
        finally:
            self._guard.leave()


class UnixConnection(HashedSocketConnection, SharedMemoryConnection):
    """A connection to a process of the same machine; see :class:`SharedMemoryConnection`.

    Descriptors go with a byte of their own, which says how many they are, at most 253 at a time. Those
    that a peer attaches to other bytes are closed by the kernel, and end the connection.

    Args:
        sock: Connected; owned from here on.
        local_address: URL of this end.
        peer_address: URL of the other end.
        credentials: (pid, uid, gid) of the peer.
        rate: Bytes a second at which it sends; ``None`` for as fast as it goes.
        spin_s: See :class:`HashedSocketConnection`.
        admitted: Whether the other end has no say any more in who connects.
    """

    receive_flags = _ALL | _CLOEXEC

    def __init__(
        self,
        sock: socket.socket,
        *,
        local_address: str,
        peer_address: str,
        credentials: tuple[int, int, int],
        rate: float | None = None,
        spin_s: float = 0.0,
        admitted: bool = True,
    ) -> None:
        super().__init__(
            sock, local_address=local_address, peer_address=peer_address, rate=rate, spin_s=spin_s
        )
        # what the kernel allows of it: a message that fits is handed over without a wake-up on the way
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_NBYTES)
        self._credentials = credentials
        self._admitted = self._receives_hashed = admitted
        self._room = 0  # for descriptors, in the call that receives
        self._taken: list[int] = []

    @property
    def peer_credentials(self) -> tuple[int, int, int]:
        """(pid, uid, gid) of the peer when it connected, or began to listen."""
        return self._credentials

    # -- descriptors -----------------------------------------------------------------------------------

    def send_descriptors(self, descriptors: Sequence[int], deadline: float) -> None:
        """See :meth:`SharedMemoryConnection.send_descriptors`."""
        if not descriptors:
            raise ValueError("no descriptors to send")
        self._guard.enter(self._name)
        try:
            for first in range(0, len(descriptors), _MAX_BATCH):
                batch = array.array("i", descriptors[first : first + _MAX_BATCH])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, batch)]
                doing = f"sending descriptors, {first} of {len(descriptors)} had gone"
                marker, waits = [memoryview(bytes([len(batch)]))], False
                while not self._send_some(marker, 0, deadline, doing, waits=waits, ancillary=ancillary):
                    waits = True
        finally:
            self._guard.leave()

    def recv_descriptors(self, count: int, deadline: float) -> list[int]:
        """See :meth:`SharedMemoryConnection.recv_descriptors`."""
        if count < 1:
            raise ValueError(f"{count} descriptors asked")
        self._guard.enter(self._name)
        self._room, self._taken = _BATCH_ROOM, []
        try:
            while len(self._taken) < count:
                self._recv_batch(min(_MAX_BATCH, count - len(self._taken)), count, deadline)
            return self._taken
        except BaseException:
            for fd in self._taken:
                os.close(fd)
            raise
        finally:
            self._room, self._taken = 0, []
            self._guard.leave()

    def _recv_batch(self, wanted: int, count: int, deadline: float) -> None:
        marker, had, waits = bytearray(1), len(self._taken), False
        doing = f"receiving descriptors, {had} of {count} had come"
        while (n := self._recv_some([memoryview(marker)], deadline, doing, waits=waits)) < 0:
            waits = True
        if n == 0 or self._guard.closed:
            who = "was closed here" if self._guard.closed else "was ended by the peer"
            raise ConnectionClosedError(f"{self._name} {who} after {had} of {count} descriptors")
        came = len(self._taken) - had
        if not came == marker[0] == wanted:
            self.abort()
            raise ProtocolError(
                f"{self._name}: the peer sent {came} descriptors and says {marker[0]}, {wanted} are due",
                remote=True,
            )

    # -- receiving -------------------------------------------------------------------------------------

    def _recv_call(self, batch: list[memoryview], flags: int) -> int:
        if not self._admitted:
            self._hear_verdict(flags)
        n, ancillary, found, _ = self._guard.sock.recvmsg_into(batch, self._room, flags | _CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._taken.extend(array.array("i", data[: len(data) - len(data) % _INT_NBYTES]))
        if found & _TRUNCATED:
            raise self._truncated()
        return n

    def _recv_one(self, view: memoryview, flags: int) -> int:
        if not self._admitted:
            self._hear_verdict(flags)
        # with room for nothing but bytes: the kernel closes descriptors, and says so
        n, _, found, _ = self._guard.sock.recvmsg_into((view,), 0, flags | _CLOEXEC)
        if found & _TRUNCATED:
            raise self._truncated()
        return n

    def _truncated(self) -> KVFerryError:
        if not self._room:
            self.abort()  # bytes are lost with them: what comes next would be taken for something else
            return ProtocolError(
                f"{self._name}: the peer attached descriptors where none are due; they were closed",
                remote=True,
            )
        return TransportError(
            f"{self._name}: only {len(self._taken)} of the peer's descriptors could be taken, this process "
            "may open no more files; allow more (ulimit -n)"
        )

    # -- being let in ----------------------------------------------------------------------------------

    def _hear_verdict(self, flags: int) -> None:
        """Look at the first bytes: a listener that refuses sends its reason and nothing else.

        Raises:
            AuthError: With that reason.
            OSError: If nothing is there yet, or the connection is broken.
        """
        most = len(_REFUSED) + _MAX_REFUSAL_NBYTES
        head = self._guard.sock.recv(most, _PEEK | (flags & _NOW))
        if head.startswith(_REFUSED):
            reason = head[len(_REFUSED) :].decode(errors="replace")
            raise AuthError("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in reason))
        self._admitted = True
        self._receives_hashed = True

    def _failed(self, error: OSError, doing: str) -> KVFerryError:
        if not self._admitted and not self._guard.closed:
            try:
                self._hear_verdict(_NOW)
            except AuthError as refusal:
                return refusal
            except OSError:
                pass  # no word came
        if error.errno == errno.ETOOMANYREFS:
            return TransportError(
                f"{self._name}: more descriptors are under way than this user may open files; the peer does "
                "not take them, or the limit (ulimit -n) is too low"
            )
        return super()._failed(error, doing)

    def _flush(self) -> None:
        """Nothing is lost on the way to a process of this machine; take what it still sends, once.

        Bytes left unread here would end its stream with a reset instead of an end.
        """
        scratch = bytearray(1 << 16)
        until = time.monotonic() + 0.05
        with contextlib.suppress(OSError):
            while time.monotonic() < until and self._guard.sock.recv_into(scratch, 0, _NOW):
                pass


def _connection(
    sock: socket.socket,
    settings: UnixOptions,
    credentials: tuple[int, int, int],
    *,
    local_address: str,
    peer_address: str,
    admitted: bool,
) -> UnixConnection:
    return UnixConnection(
        sock,
        local_address=local_address,
        peer_address=peer_address,
        credentials=credentials,
        rate=settings.rate,
        spin_s=settings.spin_s,
        admitted=admitted,
    )


def _end_url(path: str, pid: int, uid: int) -> str:
    return Address("unix", path=path, options={"uid": str(uid), "pid": str(pid)}).url


def _dial(sock: socket.socket, parsed: Address, deadline: float) -> None:
    """Connect by the deadline: only a blocking socket waits while the queue of the listener is full."""
    left = remaining(deadline)
    if left <= 0:
        raise ConnectError(f"cannot connect to {parsed.url}: the deadline has passed")
    fraction, whole = math.modf(min(max(1e-3, left), 3600.0))
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(whole), int(fraction * 1e6))
    )
    try:
        sock.connect(parsed.path)
    except OSError as error:
        why = {
            errno.ENOENT: "there is no such socket; check the path, and that it is running",
            errno.ECONNREFUSED: "nobody listens there; check that it is running",
            errno.EACCES: "this user may not open it; its owner lets others in with allow_uid or allow_gid",
            errno.EAGAIN: "its queue is full and was not served by the deadline",
            errno.EPROTOTYPE: "that is a socket of another kind, such as datagrams; check the path",
        }.get(error.errno or 0, error.strerror or str(error))
        if error.errno == errno.ECONNREFUSED and _is_something_else(parsed.path):
            why = "that is no socket; check the path"
        raise ConnectError(f"cannot connect to {parsed.url}: {why}") from error


def _is_something_else(path: str) -> bool:
    """Whether a file, folder or pipe lies at ``path``: the kernel refuses those as it does a dead socket."""
    try:
        return not stat.S_ISSOCK(Path(path).stat().st_mode)
    except OSError:
        return False


def _refuse(sock: socket.socket, reason: str) -> None:
    with sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.send(_REFUSED + reason.encode()[:_MAX_REFUSAL_NBYTES])
