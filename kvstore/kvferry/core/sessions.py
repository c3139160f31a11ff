"""Sessions: one engine, however many processes and connections it has; they own leases."""

from __future__ import annotations

import os
import select
import threading
import uuid
from collections.abc import Callable

from kvferry.core.errors import StoreError

__all__ = ["Session"]


class Session:
    """Who holds leases. Thread safe.

    A session ends when :meth:`end` is called (its last connection is gone) or when its process is
    gone; its leases end with it. With a ``pid`` only the end of that process proves that nobody
    writes into its slots any more, so :meth:`end` alone leaves those in quarantine; without one the
    writers are threads of this process, and :meth:`end` says that they are done.

    Args:
        name: For messages and metrics.
        pid: Process to watch. Take it from the kernel (``SO_PEERCRED``), not from the client's word.

    Raises:
        StoreError: If there is no such process.
    """

    def __init__(self, name: str, pid: int | None = None) -> None:
        self.name = name
        self.session_id = uuid.uuid4().hex
        self.pid = pid
        self._lock = threading.Lock()
        self._ended = False
        self._process_gone = False
        self._listeners: list[Callable[[], None]] = []
        self._pidfd = -1
        if pid is not None:
            try:
                self._pidfd = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise StoreError(f"session {name}: there is no process {pid}") from error

    def __repr__(self) -> str:
        watched = "" if self.pid is None else f", pid={self.pid}"
        return f"Session({self.name!r}{watched})"

    @property
    def ended(self) -> bool:
        """Whether the session holds nothing any more; asks the kernel about its process."""
        return self._ended or (self.pid is not None and self.writers_gone)

    @property
    def writers_gone(self) -> bool:
        """Whether nobody of the session can write into a slot any more."""
        with self._lock:
            if self.pid is None:
                return self._ended
            if not self._process_gone and self._pidfd >= 0:
                poll = select.poll()
                poll.register(self._pidfd, select.POLLIN)
                if poll.poll(0):
                    self._process_gone = True
                    os.close(self._pidfd)
                    self._pidfd = -1
            return self._process_gone

    def end(self) -> None:
        """End the session and its leases in every store; a second call does nothing."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once, from the thread that calls :meth:`end`, with no lock held."""
        with self._lock:
            if not self._ended:
                self._listeners.append(listener)
                return
        listener()

    def __del__(self) -> None:
        if getattr(self, "_pidfd", -1) >= 0:
            os.close(self._pidfd)
