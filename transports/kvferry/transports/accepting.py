"""What listeners share that make connections in a thread of their own and hand them to who accepts."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvferry.core.clock import is_past, time_left
from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError
from kvferry.transports.base import Connection

__all__ = ["next_ready"]

_C = TypeVar("_C", bound=Connection)


def next_ready(
    address: str,
    owner_pid: int,
    changed: threading.Condition,
    ready: deque[_C],
    is_closed: Callable[[], bool],
    deadline: float,
) -> _C:
    """The next of ``ready``; whoever waits on ``changed`` for a free place is told.

    Args:
        address: Of the listener, for messages.
        owner_pid: The process that made it.
        changed: Guards ``ready``, and is notified when something comes or the listener is closed.
        ready: Connections that wait to be accepted.
        is_closed: Asked while ``changed`` is held.
        deadline: As of :meth:`Listener.accept`.

    Raises:
        ConnectionClosedError: If the listener was closed, or in a forked child.
        TransferTimeoutError: At the deadline.
    """
    if os.getpid() != owner_pid:
        raise ConnectionClosedError(
            f"the listener on {address} was made by process {owner_pid}, which forked this one; "
            "make a new one here"
        )
    with changed:
        while True:
            if is_closed():
                raise ConnectionClosedError(f"the listener on {address} was closed")
            if ready:
                changed.notify_all()
                return ready.popleft()
            if is_past(deadline):
                raise TransferTimeoutError(f"nobody connected to {address} by the deadline")
            changed.wait(time_left(deadline))
