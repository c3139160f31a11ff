"""A proxy that makes a link bad: slow, narrow, cut, half open, out of order between lanes, or wrong.

It stands between who dials and a listener, for transports over TCP or unix sockets (``tcp``, ``tls``,
``unix``), and forwards bytes::

    with FaultProxy(listener.address) as proxy:
        connection = connect(proxy.address, deadline)
        proxy.faults = Faults(delay_s=0.02)
        proxy.cut(5.0)

Over unix sockets it passes bytes only, no descriptors, and the peer's credentials are those of the proxy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import select
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from kvferry.core.address import Address, parse_url
from kvferry.core.clock import deadline_in, is_past, time_left
from kvferry.core.errors import ConfigError, TransferTimeoutError
from kvferry.testing.fault_link import GOOD, Direction, Faults, Pair

__all__ = ["Direction", "FaultProxy", "Faults"]

log = logging.getLogger(__name__)

_TICK_S: Final = 0.5
_NOT_BETWEEN: Final = frozenset({"ucx", "auto"})
_JOIN_S: Final = 10.0
_BACKLOG: Final = 128


class FaultProxy:
    """Listens on a free loopback address and forwards each connection to ``target``, with faults.

    One thread does all of it. Any thread may change the faults while bytes are on their way.

    Args:
        target: URL of the listener behind it.
        faults: What is wrong from the start.
        seed: For the bits that are flipped.

    Raises:
        ConfigError: If ``target`` is no address of a socket.
    """

    def __init__(self, target: str, faults: Faults = GOOD, *, seed: int = 0) -> None:
        self._target = parse_url(target)
        if self._target.scheme in _NOT_BETWEEN:
            raise ConfigError(
                f"address {target}: what {self._target.scheme} moves does not pass through a socket alone, "
                "the fault proxy cannot stand between; take tcp, tls or unix"
            )
        self._seed = seed
        self._changed = threading.Condition()
        self._faults = faults
        self._cut_until = 0.0
        self._reset_asked = False
        self._changes = self._noted = 0
        self._closing = False
        self._pairs: list[Pair] = []
        self._accepted = 0
        self._past = {"to_server": 0, "to_client": 0, "flipped": 0, "swallowed": 0}  # of pairs that ended
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._listener, self._dial = self._listen()
        self._wake, self._woken = socket.socketpair()
        for sock in (self._listener, self._wake, self._woken):
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvferry-fault-proxy", daemon=True)
        self._thread.start()

    def _listen(self) -> tuple[socket.socket, Address]:
        target = self._target
        if target.path:
            self._folder = tempfile.TemporaryDirectory(prefix="kvferry-proxy-")
            path = str(Path(self._folder.name, "s"))
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen(_BACKLOG)
            return listener, dataclasses.replace(target, path=path)
        if target.port is None:
            raise ConfigError(f"address {target}: the fault proxy stands before sockets only")
        ipv6 = ":" in target.host
        host = "::1" if ipv6 else "127.0.0.1"
        family = socket.AF_INET6 if ipv6 else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        return listener, dataclasses.replace(target, host=host, port=listener.getsockname()[1])

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FaultProxy {self.address} to {self._target}>"

    # -- what tests use --------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """What to dial instead of the target: same scheme, same options."""
        return self._dial.url

    @property
    def faults(self) -> Faults:
        """What is wrong with the link; another one may be assigned at any time and is in force at once."""
        with self._changed:
            return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        with self._changed:
            self._faults = faults
            self._until_in_force()

    def cut(self, seconds: float) -> None:
        """Let nothing pass for that time, counted from now; what is wrong otherwise stays so."""
        with self._changed:
            self._cut_until = deadline_in(seconds)
            self._until_in_force()

    def reset_connections(self) -> None:
        """Reset all connections there are; new ones are not concerned."""
        with self._changed:
            self._reset_asked = True
            self._until_in_force()

    @property
    def connections(self) -> int:
        """How many are open now."""
        with self._changed:
            return len(self._pairs)

    @property
    def accepted(self) -> int:
        """How many were accepted so far."""
        with self._changed:
            return self._accepted

    def forwarded(self, direction: Direction) -> int:
        """Bytes that were passed on, of all connections so far."""
        with self._changed:
            live = sum(f.forwarded for pair in self._pairs for f in pair.flows if f.direction == direction)
            return self._past[direction] + live

    def forwarded_each(self, direction: Direction) -> list[int]:
        """Bytes that were passed on, of each connection that is open now, in the order of their making."""
        with self._changed:
            return [f.forwarded for pair in self._pairs for f in pair.flows if f.direction == direction]

    @property
    def flipped(self) -> int:
        """Bytes that were changed so far."""
        return self._counted("flipped")

    @property
    def swallowed(self) -> int:
        """Bytes that were taken and not passed on so far."""
        return self._counted("swallowed")

    def _counted(self, what: Literal["flipped", "swallowed"]) -> int:
        with self._changed:
            return self._past[what] + sum(int(getattr(f, what)) for pair in self._pairs for f in pair.flows)

    def wait_for_connections(self, count: int, deadline: float) -> None:
        """Wait until exactly ``count`` are open.

        Raises:
            TransferTimeoutError: At the deadline; with how many there are.
        """
        with self._changed:
            while len(self._pairs) != count:
                if is_past(deadline):
                    raise TransferTimeoutError(f"{self!r}: {len(self._pairs)} connections, not {count}")
                self._changed.wait(min(time_left(deadline), _TICK_S))

    def close(self) -> None:
        """Reset all connections, stop listening and join the thread; a second call does nothing."""
        with self._changed:
            self._closing = True
        self._notify()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _until_in_force(self) -> None:
        """Wait until the thread has taken note of a change: no byte that is sent later escapes it."""
        self._changes += 1
        mine = self._changes
        self._notify()
        self._changed.wait_for(lambda: self._noted >= mine or self._closing, _JOIN_S)

    def _notify(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake anyway, or closed
            self._wake.send(b"!")

    # -- its thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        before = GOOD
        try:
            while True:
                with self._changed:
                    if self._closing:
                        return
                    now = time.monotonic()
                    faults = self._current(now)
                    self._reset_some(before, faults)
                    before = faults
                    self._noted = self._changes
                    self._changed.notify_all()
                self._turn(faults, now)
        except Exception:
            log.exception("%r failed", self)
        finally:
            self._close_all()

    def _current(self, now: float) -> Faults:
        if now < self._cut_until and self._faults.link in ("up", "cut"):
            return dataclasses.replace(self._faults, link="cut", only=None)
        return self._faults

    def _reset_some(self, before: Faults, faults: Faults) -> None:
        everything = self._reset_asked or faults.link == "reset"
        healed = before.link == "half_open" and faults.link != "half_open"
        self._reset_asked = False
        for pair in list(self._pairs):
            if everything or (healed and any(flow.lost for flow in pair.flows)):
                pair.reset()
                self._forget(pair)

    def _forget(self, pair: Pair) -> None:
        self._pairs.remove(pair)
        for flow in pair.flows:
            self._past[flow.direction] += flow.forwarded
            self._past["flipped"] += flow.flipped
            self._past["swallowed"] += flow.swallowed
        self._changed.notify_all()

    def _turn(self, faults: Faults, now: float) -> None:
        """Wait until something can be done, and do it."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        # while the link is cut nobody gets through: who dials waits in the listener's queue
        if faults.link != "cut":
            poll.register(self._listener, select.POLLIN)
        until = now + _TICK_S
        owner: dict[int, Pair] = {}
        for pair in self._pairs:
            for sock in (pair.client, pair.server):
                # without interest it is left out: poll would report its end over and over
                if events := pair.interest(sock, faults, now):
                    poll.register(sock, events)
                    owner[sock.fileno()] = pair
            for flow in pair.flows:
                if (due := flow.due_at(faults)) is not None and due > now:
                    until = min(until, due)
        if self._cut_until > now:
            until = min(until, self._cut_until)
        ready = dict(poll.poll(max(0.0, until - now) * 1000))
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
            return  # what is wrong may be something else now
        now = time.monotonic()
        for pair in dict.fromkeys(owner[fd] for fd in ready if fd in owner):
            if not pair.move(faults, now):
                with self._changed:
                    self._forget(pair)
        if self._listener.fileno() in ready:
            self._accept(faults)

    def _accept(self, faults: Faults) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # gone again
        target = self._target
        server = socket.socket(client.family)
        pair = Pair(self._accepted, client, server, self._seed)
        for sock in (client, server):
            sock.setblocking(False)
            if not target.path:
                with contextlib.suppress(OSError):  # gone again; seen when it is read
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:  # before the listener behind it can know of it
            self._accepted += 1
            self._pairs.append(pair)
            self._changed.notify_all()
        try:
            if faults.link == "reset":
                raise ConnectionResetError("the link is down")
            server.connect(target.path or (target.host, target.port))
        except BlockingIOError:
            pass  # under way; how it ends is seen when it is used
        except OSError:
            pair.reset()
            with self._changed:
                self._forget(pair)

    def _close_all(self) -> None:
        with self._changed:
            for pair in list(self._pairs):
                pair.reset()
                self._forget(pair)
            for sock in (self._listener, self._wake, self._woken):
                sock.close()
        if self._folder is not None:
            self._folder.cleanup()
