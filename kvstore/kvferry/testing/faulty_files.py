"""System calls that fail, stall or do half of their work on command, for tests of the disk tier."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from kvferry.store.disk.files import Files

__all__ = ["Call", "FaultyFiles"]

Call = Literal[
    "open_folder", "make_folder", "open_read", "open_write", "create", "preadv", "pwritev", "sync_data",
    "sync", "rename", "unlink",
]  # fmt: skip
"""A call that can be made to fail: a method of :class:`Files`."""


class FaultyFiles(Files):
    """Real system calls, but for those that were told to fail or to stall. Thread safe.

    Attributes:
        calls: How often each call was made.
        write_limit: Bytes that one write takes at most; ``None``: as many as it is given.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.write_limit: int | None = None
        self._lock = threading.Lock()
        self._errors: dict[Call, int] = {}
        self._stalled: dict[Call, _Gate] = {}

    @contextmanager
    def failing(self, *calls: Call, error: int = errno.EIO) -> Iterator[None]:
        """While open, these calls fail with ``error``."""
        self._errors.update(dict.fromkeys(calls, error))
        try:
            yield
        finally:
            for call in calls:
                self._errors.pop(call, None)

    @contextmanager
    def stalling(self, *calls: Call) -> Iterator[threading.Event]:
        """While open, these calls wait; yields an event that is set when the first one does."""
        begun, go_on = threading.Event(), threading.Event()
        gate = _Gate(begun, go_on)
        self._stalled.update(dict.fromkeys(calls, gate))
        try:
            yield begun
        finally:
            for call in calls:
                self._stalled.pop(call, None)
            go_on.set()

    def _pass(self, call: Call) -> None:
        with self._lock:
            self.calls[call] += 1
        gate = self._stalled.get(call)
        if gate is not None:
            gate.wait(60)
        error = self._errors.get(call)
        if error is not None:
            raise OSError(error, os.strerror(error))

    def open_folder(self, name: str, parent: int) -> int:
        """See :class:`Files`."""
        self._pass("open_folder")
        return super().open_folder(name, parent)

    def make_folder(self, name: str, parent: int) -> bool:
        """See :class:`Files`."""
        self._pass("make_folder")
        return super().make_folder(name, parent)

    def open_file(self, name: str, folder: int, flags: int = 0) -> int:
        """See :class:`Files`."""
        self._pass("open_read")
        return super().open_file(name, folder, flags)

    def create(self, name: str, folder: int, flags: int = 0) -> int:
        """See :class:`Files`."""
        self._pass("create")
        return super().create(name, folder, flags)

    def open_write(self, name: str, folder: int, flags: int = 0) -> int:
        """See :class:`Files`."""
        self._pass("open_write")
        return super().open_write(name, folder, flags)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """See :class:`Files`."""
        self._pass("preadv")
        return super().preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """See :class:`Files`."""
        self._pass("pwritev")
        limit = self.write_limit
        if limit is None:
            return super().pwritev(fd, views, offset)
        part = views[0][:limit]
        return super().pwritev(fd, [part], offset) if len(part) else 0

    def sync_data(self, fd: int) -> None:
        """See :class:`Files`."""
        self._pass("sync_data")
        super().sync_data(fd)

    def sync(self, fd: int) -> None:
        """See :class:`Files`."""
        self._pass("sync")
        super().sync(fd)

    def rename(self, source: str, source_folder: int, target: str, target_folder: int) -> None:
        """See :class:`Files`."""
        self._pass("rename")
        super().rename(source, source_folder, target, target_folder)

    def unlink(self, name: str, folder: int) -> None:
        """See :class:`Files`."""
        self._pass("unlink")
        super().unlink(name, folder)


class _Gate:
    def __init__(self, arrived: threading.Event, go_on: threading.Event) -> None:
        self._arrived = arrived
        self._go_on = go_on

    def wait(self, seconds: float) -> None:
        self._arrived.set()
        self._go_on.wait(seconds)
