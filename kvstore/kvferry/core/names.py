"""Host names to addresses, by a deadline.

The system's look-up has none: it may hang for as long as the name servers that it asks do not answer. So it
runs in a thread of its own, which ends with it, and who waits for the same name waits for the same thread.
Numeric hosts need no look-up, and no thread.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import Any, Final, TypeAlias

from kvferry.core.clock import time_left

__all__ = ["MOST_LOOKUPS", "SockAddr", "connect_by", "resolve"]

SockAddr: TypeAlias = "tuple[Any, ...]"
_Found: TypeAlias = "list[tuple[socket.AddressFamily, SockAddr]]"
_Question: TypeAlias = "tuple[str, int, int]"

MOST_LOOKUPS: Final = 32
"""Names that are looked up at once; each may hold a thread for as long as no name server answers."""


class _Lookups:
    """Those under way; another object in each forked child, which has none of the threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.under_way: dict[_Question, Future[_Found]] = {}


_lookups = _Lookups()


def _forked() -> None:
    global _lookups  # noqa: PLW0603 - it belongs to the process
    _lookups = _Lookups()


os.register_at_fork(after_in_child=_forked)


def resolve(host: str, port: int, deadline: float, *, passive: bool = False) -> _Found:
    """The addresses of ``host`` for a stream socket, in the order in which they are to be tried.

    Raises:
        TimeoutError: If the system has not answered by the deadline, too many names hang already, or no
            thread can be started.
        OSError: What the system says of the name.
        UnicodeError: If it cannot be a name.
    """
    flags = int(socket.AI_PASSIVE) if passive else 0
    try:
        return _look_up((host, port, flags | int(socket.AI_NUMERICHOST)))
    except socket.gaierror as error:
        if error.errno != socket.EAI_NONAME:
            raise
    question = (host, port, flags)
    lookups = _lookups
    with lookups.lock:
        found = lookups.under_way.get(question)
        if found is None:
            if len(lookups.under_way) >= MOST_LOOKUPS:
                raise TimeoutError(
                    f"{MOST_LOOKUPS} names are being looked up, and no name server has answered; "
                    "check /etc/resolv.conf"
                )
            found = Future()
            try:
                threading.Thread(
                    target=_run, args=(lookups, question, found), name="kvferry-resolve", daemon=True
                ).start()
            except RuntimeError as error:
                raise TimeoutError(f"{error}; raise the limit of threads (ulimit -u)") from error
            lookups.under_way[question] = found  # it is forgotten with this lock, so after this
    try:
        return found.result(time_left(deadline))
    except WaitTimeoutError:
        raise TimeoutError("no name server answered by the deadline; check /etc/resolv.conf") from None


def connect_by(host: str, port: int, deadline: float) -> socket.socket:
    """As :func:`socket.create_connection`, by ``deadline`` with the look-up; the socket has what is left.

    Raises:
        OSError: If none of the addresses answers by then.
        UnicodeError: If ``host`` cannot be a name.
    """
    failure: OSError | None = None
    for family, sockaddr in resolve(host, port, deadline):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(1e-3, time_left(deadline)))
            sock.connect(sockaddr)
        except OSError as error:
            sock.close()
            failure = failure or error
        else:
            return sock
    raise failure or TimeoutError("the host has no address")


def _run(lookups: _Lookups, question: _Question, found: Future[_Found]) -> None:
    try:
        answer = _look_up(question)
    except BaseException as error:  # noqa: BLE001 - the root of a thread; whoever waits raises it
        _forget(lookups, question)
        found.set_exception(error)
    else:
        _forget(lookups, question)
        found.set_result(answer)


def _forget(lookups: _Lookups, question: _Question) -> None:
    with lookups.lock:
        lookups.under_way.pop(question, None)


def _look_up(question: _Question) -> _Found:
    host, port, flags = question
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]
