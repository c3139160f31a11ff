"""Listeners beside the port: they take whoever shows a ticket that the port gave out."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, KVFerryError, OverloadedError, TransferTimeoutError
from kvferry.core.log import LogLimiter
from kvferry.transports.auto.offers import ACCEPTED, TICKET_NBYTES, Ask, Offer
from kvferry.transports.base import Connection, Listener

__all__ = ["SideListener", "Tickets"]

_log = logging.getLogger(__name__)
_TICKET_S: Final = 30.0
_MAX_TICKETS: Final = 4096
_ACCEPT_S: Final = 1.0
_AT_ONCE_S: Final = 0.05
_SHOW_S: Final = 5.0
_MAX_SILENT: Final = 64
_JOIN_S: Final = 5.0


class Tickets:
    """Tickets given out and not yet shown, with the question that each answered. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: OrderedDict[bytes, tuple[float, Ask]] = OrderedDict()

    def give(self, ask: Ask) -> bytes:
        """A new one; the oldest are forgotten when there are too many."""
        ticket = secrets.token_bytes(TICKET_NBYTES)
        with self._lock:
            self._given[ticket] = (time.monotonic() + _TICKET_S, ask)
            while len(self._given) > _MAX_TICKETS:
                self._given.popitem(last=False)
        return ticket

    def take(self, ticket: bytes) -> Ask | None:
        """The question that ``ticket`` answered; ``None`` if it is not a good one. It is used up."""
        with self._lock:
            until, ask = self._given.pop(ticket, (0.0, None))
        return ask if time.monotonic() < until else None


@dataclass(eq=False)
class _Silent:
    """A connection that has not shown its ticket yet."""

    connection: Connection
    until: float = field(default_factory=lambda: deadline_in(_SHOW_S))


class SideListener:
    """Owns ``listener`` and a thread that accepts on it.

    Args:
        listener: Of ``unix`` or ``ucx``.
        tickets: Of the port.
        deliver: Takes a connection with the question that led to it; called by the thread.
        name: Of the thread.
        rdma: Whether the listener leads over RDMA.
    """

    def __init__(
        self,
        listener: Listener,
        tickets: Tickets,
        deliver: Callable[[Connection, Ask], None],
        *,
        name: str,
        rdma: bool = False,
    ) -> None:
        self._listener = listener
        self._tickets = tickets
        self._deliver = deliver
        self._rdma = rdma
        self._silent: list[_Silent] = []
        self._limiter = LogLimiter(_log)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, uid: int) -> Offer:
        """How a peer reaches it."""
        address = parse_url(self._listener.address)
        if address.scheme == "unix":
            found = Path(address.path).stat()
            return Offer(scheme="unix", path=address.path, inode=(found.st_dev, found.st_ino), uid=uid)
        return Offer(scheme=address.scheme, port=address.port or 0, rdma=self._rdma)

    def forget(self) -> None:
        """Close a forked child's copies; the parent's go on."""
        self._listener.close()

    def close(self) -> None:
        """Stop listening and join the thread."""
        self._listener.close()
        self._thread.join(_JOIN_S)

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:  # noqa: BLE001 - the root of a thread
            _log.exception("%s failed, its listener is closed", self._thread.name)
        finally:
            self._listener.close()
            for one in self._silent:
                one.connection.abort()
            self._limiter.flush()

    def _turn(self) -> bool:
        """Accept one connection and look after those that are silent; ``False`` once it is closed."""
        try:
            made = self._listener.accept(deadline_in(_AT_ONCE_S if self._silent else _ACCEPT_S))
        except TransferTimeoutError:
            pass
        except ConnectionClosedError:
            return False
        except KVFerryError as error:
            self._limiter.log(logging.WARNING, error.code, "%s: cannot accept: %s", self._thread.name, error)
            time.sleep(_AT_ONCE_S)
        else:
            # the ticket comes right behind the connection: wait a moment, and later only look
            new = _Silent(made)
            if not self._hear(new, deadline_in(_AT_ONCE_S)):
                self._silent.append(new)
        self._silent = [one for one in self._silent if not self._hear(one, time.monotonic())]
        while len(self._silent) > _MAX_SILENT:
            self._refuse(
                self._silent.pop(0).connection,
                OverloadedError(f"{_MAX_SILENT} others have not shown their tickets either"),
            )
        return True

    def _hear(self, silent: _Silent, deadline: float) -> bool:
        """Take the ticket, if it comes by the deadline; whether that is over, well or not."""
        connection = silent.connection
        try:
            if not connection.wait_readable(deadline):
                if time.monotonic() < silent.until:
                    return False
                raise TransferTimeoutError(f"no ticket within {_SHOW_S:g} s")
            ticket = bytearray(TICKET_NBYTES)
            connection.recv_into([memoryview(ticket)], deadline_in(_AT_ONCE_S))
            ask = self._tickets.take(bytes(ticket))
            if ask is None:
                raise ConnectionClosedError("its ticket is not one of ours, or too old")
            connection.send([ACCEPTED], deadline_in(_AT_ONCE_S))
        except KVFerryError as error:
            self._refuse(connection, error)
            return True
        self._deliver(connection, ask)
        return True

    def _refuse(self, connection: Connection, error: KVFerryError) -> None:
        self._limiter.log(
            logging.INFO, error.code, "%s: %s was refused: %s",
            self._thread.name, connection.peer_address, error,
        )  # fmt: skip
        with contextlib.suppress(KVFerryError):
            connection.abort()
