"""Who is inside a call on a socket, and when its descriptor may be closed."""

from __future__ import annotations

import os
import socket
import threading
from typing import Final

from kvferry.core.errors import ConnectionClosedError

__all__ = ["GuardedSocket"]

_forks = (
    object()
)  # another one in each forked child: asked for every call, and faster than the system's getpid


def _forked() -> None:
    global _forks  # noqa: PLW0603 - it belongs to the process
    _forks = object()


os.register_at_fork(after_in_child=_forked)


class GuardedSocket:
    """A socket whose descriptor is closed only when no thread is inside a call on it.

    Otherwise a thread that blocks in a system call could find itself on a descriptor that the kernel has
    given to another file meanwhile.

    A forked child has a copy of the descriptor, and with it the parent's stream: there every call fails,
    and the end closes the copy and leaves the stream alone.
    """

    __slots__ = ("_fork", "_lock", "_pid", "closed", "closing", "inside", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock: Final = sock
        self.closing: Final = threading.Event()
        self._lock = threading.Lock()
        self.inside: Final[list[None]] = []
        """One entry a call inside: a list grows and shrinks in one step, without the cost of a lock."""
        self._pid = os.getpid()
        self._fork = _forks
        self.closed = False
        """Whether the end has begun; calls still inside come back soon. As ``closing``, but faster to ask."""

    def enter(self, name: str) -> None:
        """A call on the socket starts; each needs its :meth:`leave`.

        Raises:
            ConnectionClosedError: If it was closed here, or belongs to the parent of this process;
                ``name`` says what.
        """
        if self._fork is not _forks and self._inherited():
            raise ConnectionClosedError(
                f"{name} was made by process {self._pid}, which forked this one; make a new one here"
            )
        self.inside.append(None)
        if self.closed:
            self.leave()
            raise ConnectionClosedError(f"{name} is closed")

    def leave(self) -> None:
        """A call ends; the last one out closes the descriptor once that was asked for."""
        self.inside.pop()
        if self.closed and not self.inside:
            self.sock.close()

    def _inherited(self) -> bool:
        """Whether this is a forked child's copy; it is closed then. The lock may be held for ever there."""
        if self._fork is _forks:
            return False
        self.sock.close()
        return True

    def begin_close(self) -> bool:
        """Mark as closed and enter; ``False`` (not entered) if it was closed before, or is inherited."""
        if self._inherited():
            return False
        with self._lock:
            if self.closed:
                return False
            self._close()
            return True

    def reenter(self) -> bool:
        """Enter even if it is being closed; ``False`` if the descriptor is gone, or inherited."""
        if self._inherited():
            return False
        with self._lock:
            if self.sock.fileno() < 0:
                return False
            self._close()
            return True

    def _close(self) -> None:
        self.inside.append(None)
        self.closed = True
        self.closing.set()

    @property
    def others(self) -> bool:
        """Whether another thread is inside; for a caller that is inside itself."""
        return len(self.inside) > 1
