"""Host memory that a device may copy from and to directly: what was registered with it, whole."""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from kvferry.core.buffers import address_of
from kvferry.core.errors import DeviceError
from kvferry.core.segments import is_mapped_segment, is_segment
from kvferry.device.base import Device, DeviceBytes
from kvferry.device.pinned import PinFailure, pin
from kvferry.device.tickets import CopyPart

__all__ = ["RegisteredMemory"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One registration.

    Attributes:
        start: Its address.
        view: All of it.
        there: The same as the device takes it.
        segment: The memory behind it, if it is an arena's segment, and goes when nobody else has it.
    """

    start: int
    view: memoryview
    there: DeviceBytes
    segment: mmap.mmap | None = None


def _memory_behind(view: memoryview) -> mmap.mmap | None:
    """What was mapped, if that is what a view is of; a view may be of an array that is of a view of it."""
    owner: object = view.obj
    while isinstance(owner, np.ndarray):
        base = owner.base
        owner = base.obj if isinstance(base, memoryview) else base
    return owner if isinstance(owner, mmap.mmap) else None


def _references(entry: _Entry) -> int:
    return sys.getrefcount(entry.segment)


def _least_references() -> int:
    """Of memory that only its entry keeps: each release of Python counts in its own way."""
    memory = mmap.mmap(-1, 1)
    entry = _Entry(0, memoryview(memory), cast("DeviceBytes", None), memory)
    del memory
    return _references(entry)


_UNUSED: Final = _least_references()


class RegisteredMemory:
    """The registrations of one device. Thread safe.

    Segments of arenas are registered when the first of their blocks is copied, each as a whole, and no more
    once everybody else has let go of them: the arena of a daemon that has ended must not stay in memory.

    Args:
        device: The device.
        on_failure: See :func:`~kvferry.device.pinned.pin`.
    """

    def __init__(self, device: Device, on_failure: PinFailure) -> None:
        self._device = device
        self._on_failure: PinFailure = on_failure
        self._pinning = threading.Lock()  # pinning takes long; nobody who copies waits for it
        self._lock = threading.Lock()
        self._entries: tuple[_Entry, ...] = ()
        self._segments: frozenset[int] = frozenset()  # by the id of what the entries keep
        self._refused: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._last: _Entry | None = None

    @property
    def has_segments(self) -> bool:
        """Whether there is something that :meth:`sweep` may find unused."""
        return bool(self._segments)

    @property
    def nbytes(self) -> int:
        """Bytes registered."""
        return sum(len(entry.view) for entry in self._entries)

    def add(self, view: memoryview) -> bool:
        """Register memory; whether it is. See :meth:`CopyEngine.register`."""
        with self._pinning:
            return self._add(view, None)

    def adopt(self, view: memoryview) -> None:
        """Register the segment of an arena that ``view`` lies in, if it is one that can be.

        Raises:
            DeviceError: See :func:`~kvferry.device.pinned.pin`.
        """
        memory = _memory_behind(view)
        if memory is None or id(memory) in self._segments or view.readonly or memory in self._refused:
            return
        if not (is_mapped_segment(memory) or is_segment(memory)):
            return
        with self._pinning:
            if id(memory) not in self._segments and not self._add(memoryview(memory), memory):
                self._refused.add(memory)

    def _add(self, view: memoryview, segment: mmap.mmap | None) -> bool:
        option = "the size of the arena (store.dram_capacity)"
        if not pin(self._device, view, on_failure=self._on_failure, option=option):
            return False
        entry = _Entry(address_of(view), view, self._device.host_bytes(view), segment)
        with self._lock:
            self._set((*self._entries, entry))
        return True

    def _set(self, entries: tuple[_Entry, ...]) -> None:
        self._entries, self._last = entries, None
        self._segments = frozenset(id(entry.segment) for entry in entries if entry.segment is not None)

    def remove(self, view: memoryview) -> None:
        """Unregister what was registered under the same address.

        Raises:
            ValueError: If it is not.
        """
        with self._lock:
            gone = [entry for entry in self._entries if entry.start == address_of(view)]
            if not gone:
                raise ValueError(f"{len(view)} bytes that were never registered with {self._device.name}")
            self._set(tuple(entry for entry in self._entries if entry is not gone[0]))
        self._device.host_unregister(view)

    def direct(self, parts: Sequence[CopyPart]) -> list[DeviceBytes] | None:
        """The host sides, each within one registration, as the device takes them; ``None`` if one is not."""
        if not self._entries:
            return None
        found = []
        for _, host in parts:
            start = address_of(host)
            entry = self._last
            if entry is None or not entry.start <= start <= entry.start + len(entry.view) - len(host):
                entry = self._find(start, len(host))
                if entry is None:
                    return None
                self._last = entry
            at = start - entry.start
            found.append(entry.there[at : at + len(host)])
        return found

    def _find(self, start: int, nbytes: int) -> _Entry | None:
        for entry in self._entries:
            if entry.start <= start <= entry.start + len(entry.view) - nbytes:
                return entry
        return None

    def sweep(self) -> None:
        """Unregister segments that nobody else has a view of any more, requests under way included.

        Raises:
            DeviceError: If the device failed.
        """
        for entry in self._entries:
            if entry.segment is not None and _references(entry) <= _UNUSED:
                self.remove(entry.view)
                _log.info(
                    "%s: a segment of %d bytes that nobody uses any more is unpinned",
                    self._device.name, len(entry.view),
                )  # fmt: skip

    def close(self, *, unpin: bool) -> None:
        """Let go of everything; only when no copy is in flight.

        Args:
            unpin: Whether the device still answers.
        """
        with self._lock:
            entries = self._entries
            self._set(())
        for entry in entries if unpin else ():
            try:
                self._device.host_unregister(entry.view)
            except DeviceError as error:
                _log.warning("%s: memory stays pinned: %s", self._device.name, error)
