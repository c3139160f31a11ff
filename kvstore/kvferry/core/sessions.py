"""Sessions: one engine, however many processes and connections it has; they own leases."""

from __future__ import annotations

import os
import select
import threading
import uuid
from collections import deque
from collections.abc import Callable
from typing import Final

from kvferry.core.blockstore import Completion
from kvferry.core.errors import StoreError

__all__ = ["Session"]

_COMPLETIONS: Final = 4096


class Session:
    """Who holds leases. Thread safe.

    A session ends when :meth:`end` is called (its last connection is gone) or when the process that it was
    made with is gone; its leases end with it. Once a process is watched, only the end of all that are proves
    that nobody writes into its slots any more, so :meth:`end` alone leaves those in quarantine; without one
    the writers are threads of this process, and :meth:`end` says that they are done. A process is watched by
    a descriptor, which is closed when the process is gone, or by :meth:`close`.

    Args:
        name: For messages and metrics.
        pid: Process that the session is, and that is watched. Take it from the kernel (``SO_PEERCRED``), not
            from the client's word.

    Attributes:
        completions: What ended in the background for this session, for ``poll``.
        earlier: Sessions that are over, whose slots in quarantine count as this one's: a name of its own
            gives nobody a write quota anew.

    Raises:
        StoreError: If there is no such process.
    """

    def __init__(self, name: str, pid: int | None = None) -> None:
        self.name = name
        self.session_id = uuid.uuid4().hex
        self.pid = pid
        self.completions: deque[Completion] = deque(maxlen=_COMPLETIONS)
        self.earlier: tuple[Session, ...] = ()
        self._lock = threading.Lock()
        self._ended = False
        self._closed = False
        self._listeners: list[Callable[[], None]] = []
        self._watched: dict[int, int] = {}  # process id to its descriptor, -1 once it is gone
        if pid is not None:
            self.watch(pid)

    def __repr__(self) -> str:
        watched = "" if self.pid is None else f", pid={self.pid}"
        return f"Session({self.name!r}{watched})"

    def watch(self, pid: int) -> None:
        """Another process of the session, which may write into its slots until it is gone.

        Raises:
            StoreError: If there is no such process, or the session is closed.
        """
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, ValueError) as error:
            raise StoreError(f"session {self.name}: there is no process {pid}") from error
        with self._lock:
            if self._closed:
                os.close(descriptor)
                raise StoreError(f"session {self.name} is closed; open another")
            known = self._watched.get(pid, -1)
            if known >= 0 and not _is_gone(known):
                os.close(descriptor)
                return
            if known >= 0:
                os.close(known)
            self._watched[pid] = descriptor

    @property
    def watches(self) -> bool:
        """Whether the end of a process matters."""
        return bool(self._watched)

    @property
    def ended(self) -> bool:
        """Whether the session holds nothing any more; asks the kernel about its process."""
        return self._ended or (self.pid is not None and self.writers_gone)

    @property
    def writers_gone(self) -> bool:
        """Whether nobody of the session can write into a slot any more."""
        with self._lock:
            if not self._watched:
                return self._ended
            for pid, descriptor in self._watched.items():
                if descriptor >= 0 and _is_gone(descriptor):
                    os.close(descriptor)
                    self._watched[pid] = -1
            return all(descriptor < 0 for descriptor in self._watched.values())

    def end(self) -> None:
        """End the session and its leases in every store; a second call does nothing."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def close(self) -> None:
        """End the session and watch its processes no more; a second call does nothing.

        For when none of its write leases is left, or the store itself goes: from here on its writers count
        as gone.
        """
        self.end()
        with self._lock:
            self._closed = True
            for pid, descriptor in self._watched.items():
                if descriptor >= 0:
                    self._watched[pid] = -1
                    os.close(descriptor)

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once, from the thread that calls :meth:`end`, with no lock held."""
        with self._lock:
            if not self._ended:
                self._listeners.append(listener)
                return
        listener()

    def take_completions(self) -> list[Completion]:
        """What ended since the last call."""
        found: list[Completion] = []
        while self.completions:
            found.append(self.completions.popleft())
        return found

    def __del__(self) -> None:
        for descriptor in getattr(self, "_watched", {}).values():
            if descriptor >= 0:
                os.close(descriptor)


def _is_gone(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
