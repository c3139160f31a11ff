"""Listening: a thread takes the sockets of the port and finds out what each of them wants."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final

from kvferry.core.address import Address
from kvferry.core.errors import KVFerryError
from kvferry.core.log import LogLimiter
from kvferry.core.units import parse_rate
from kvferry.transports import ip
from kvferry.transports.accepting import next_ready
from kvferry.transports.auto.connection import AutoConnection, wrap
from kvferry.transports.auto.offers import Ask, Offer
from kvferry.transports.auto.options import AutoOptions
from kvferry.transports.auto.place import host_identity
from kvferry.transports.auto.port import Arrival, Port
from kvferry.transports.auto.side import SideListener, Tickets
from kvferry.transports.base import Connection, Listener
from kvferry.transports.choices import Choice, announced_regions
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.lanes import LaneConnection
from kvferry.transports.sockets import SocketConnection
from kvferry.transports.spin import DEFAULT_SPIN_S

__all__ = ["AutoListener"]

_log = logging.getLogger(__name__)
_JOIN_S: Final = 5.0
_MAX_READY: Final = 256
_PLAIN: Final = Choice("tcp", "the peer dialled the port without asking")


class AutoListener(Listener):
    """A port with what listens beside it. Any thread may accept or close.

    Args:
        sock: Bound and listening; owned from here on.
        asked: The address that was asked for.
        options: Its options.
        sides: Listeners beside the port and whether they lead over RDMA; owned from here on.
        lacking: What is not offered, with the reason, by transport.
    """

    def __init__(
        self,
        sock: socket.socket,
        asked: Address,
        options: AutoOptions,
        sides: Sequence[tuple[Listener, bool]],
        lacking: Mapping[str, str],
    ) -> None:
        self._address: Final = ip.dialable_address(sock, asked)
        self._options = options
        self._lacking = dict(lacking)
        self._pid = os.getpid()
        self._uid = os.geteuid()
        self._changed = threading.Condition()
        self._ready: deque[AutoConnection] = deque()
        self._closed = False
        self._ended = False  # by close(); it may be closed before, by a failure of its thread
        self._tickets = Tickets()
        self._limiter = LogLimiter(_log)
        name = f"kvferry-auto-{sock.getsockname()[1]}"
        self._host = host_identity()
        self._port = Port(sock, self._answer, self._deliver, self._address)  # the last that can fail
        self._sides = [
            SideListener(
                one, self._tickets, self._deliver_side, name=f"{name}-{one.address.split(':')[0]}", rdma=rdma
            )
            for one, rdma in sides
        ]
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The URL to dial, with the port that the kernel bound and the options that were asked for."""
        return self._address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address}>"

    @property
    def offered(self) -> list[str]:
        """The transports that are offered to those who ask, the best first."""
        return [offer.scheme for offer in self._offers()]

    def accept(self, deadline: float) -> Connection:
        """The next connection; see :meth:`Listener.accept`."""
        return next_ready(
            self._address, self._pid, self._changed, self._ready, lambda: self._closed, deadline
        )

    def close(self) -> None:
        """Stop listening and wake waiting threads; who was not accepted yet is turned away."""
        if os.getpid() != self._pid:  # copies; the lock may be held for ever here
            self._port.forget()
            for side in self._sides:
                side.forget()
            return
        with self._changed:
            if self._ended:
                return
            self._closed = self._ended = True
            waiting = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        self._port.wake()
        for side in self._sides:
            side.close()
        self._thread.join(_JOIN_S)
        for connection in waiting:
            connection.abort()
        self._limiter.flush()

    # -- the thread of the port ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._port.turn()
        except Exception:  # noqa: BLE001 - the root of a thread
            _log.exception("the listener on %s failed and is closed", self._address)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._port.close()

    def _offers(self) -> list[Offer]:
        offers = []
        for side in self._sides:
            try:
                offers.append(side.offer(self._uid))
            except OSError as error:  # its socket's file was removed by somebody
                self._lacking["unix"] = f"its socket is gone: {error.strerror}"
        if self._options.considers("tcp"):
            offers.append(Offer(scheme="tcp"))
        return offers

    def _answer(self, ask: Ask) -> tuple[str, list[Offer], bytes, dict[str, str], list[str]]:
        """Host, offers, ticket, what is lacking, and regions."""
        return (
            self._host, self._offers(), self._tickets.give(ask), self._lacking, list(announced_regions())
        )  # fmt: skip

    def _deliver(self, arrival: Arrival) -> None:
        """A connection over sockets of the port."""
        rate = parse_rate(self._options.rate) if self._options.rate is not None else None
        made: list[SocketConnection] = []
        alone = len(arrival.sockets) == 1
        try:
            for sock, sockaddr in arrival.sockets:
                ip.tune(sock)
                peer = ip.url_of("tcp", sockaddr)
                made.append(
                    HashedSocketConnection(
                        sock,
                        local_address=self._address,
                        peer_address=peer,
                        rate=rate if alone else None,
                        spin_s=DEFAULT_SPIN_S,
                    )
                )
        except OSError as error:  # gone meanwhile
            _log.debug("%s: a connection ended while it was accepted: %s", self._address, error)
            for sock, _ in arrival.sockets:
                sock.close()
            return
        inner: Connection = made[0] if alone else LaneConnection(made, rate=rate)
        self._put(inner, _PLAIN if arrival.ask is None else _chosen("tcp", arrival.ask))

    def _deliver_side(self, inner: Connection, ask: Ask) -> None:
        self._put(inner, _chosen(inner.peer_address.partition("://")[0], ask))

    def _put(self, inner: Connection, choice: Choice) -> None:
        made = wrap(inner, choice, local_address=self._address, peer_address=inner.peer_address)
        dropped: AutoConnection | None = None
        with self._changed:
            closed = self._closed
            if not closed:
                self._ready.append(made)
                if len(self._ready) > _MAX_READY:
                    dropped = _dispensable(self._ready)
                    self._ready.remove(dropped)
                self._changed.notify_all()
        if dropped is not None:
            host = _host(dropped)
            self._limiter.log(
                logging.WARNING, host, "%s: a connection from %s was dropped, %d others wait to be accepted",
                self._address, host, _MAX_READY,
            )  # fmt: skip
        gone = made if closed else dropped
        if gone is not None:
            try:
                gone.abort()
            except KVFerryError as error:
                _log.debug("%s: %s", self._address, error)


def _dispensable(ready: Sequence[AutoConnection]) -> AutoConnection:
    """Who goes when one too many waits: one that did not ask, and rather one that says nothing.

    Of those the one that has waited longest of the host that has most, so that who opens connections and says
    nothing pushes out his own. The newest, the last of ``ready``, goes only if all others have asked.
    """
    plain = [one for one in ready if one.choice is _PLAIN and one is not ready[-1]]
    if not plain:
        return ready[-1]
    of_host = Counter(_host(one) for one in plain)
    largest = max(of_host.values())
    those = [one for one in plain if of_host[_host(one)] == largest]
    return next((one for one in those if _is_silent(one)), those[0])


def _is_silent(one: AutoConnection) -> bool:
    try:
        return not one.wait_readable(time.monotonic())
    except KVFerryError:
        return True


def _host(one: AutoConnection) -> str:
    return one.peer_address.rpartition(":")[0]


def _chosen(scheme: str, ask: Ask) -> Choice:
    common = tuple(sorted(set(ask.regions) & set(announced_regions())))
    return Choice(scheme, "the peer chose it", regions=common)
