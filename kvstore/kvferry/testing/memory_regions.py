"""A region transport within one process: what :class:`~kvferry.testing.regions.RegionSuite` is tested with.

Also for tests of what is built on region transports, on machines that have none.
"""

from __future__ import annotations

import itertools
import queue
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import xxhash

from kvferry.core.buffers import copy_into
from kvferry.core.clock import is_past, time_left
from kvferry.core.errors import ProtocolError, TransferTimeoutError, TransportError
from kvferry.transports.region import (
    Access,
    RegionPart,
    RegionTransfer,
    RegionTransport,
    Window,
    check_access,
    check_memory,
)

__all__ = ["MemoryRegions"]

_GRANT: Final = struct.Struct("<4sBQQ")  # magic, for writing, number of the window, its size
_SUM: Final = struct.Struct("<Q")
_MAGIC: Final = b"KVRG"
_STEP_NBYTES: Final = 256 << 10  # copied with the window's lock held
_JOIN_S: Final = 10.0

_numbers = itertools.count(1)
_windows_lock = threading.Lock()
_windows: dict[int, _MemoryWindow] = {}


class _MemoryWindow(Window):
    """A view that others may use until it is closed."""

    def __init__(self, view: memoryview, access: Access) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._open = True
        self._number = next(_numbers)
        head = _GRANT.pack(_MAGIC, access == "write", self._number, len(view))
        self._grant = head + _SUM.pack(xxhash.xxh3_64_intdigest(head))
        with _windows_lock:
            _windows[self._number] = self

    @property
    def grant(self) -> bytes:
        return self._grant

    def close(self) -> None:
        with _windows_lock:
            _windows.pop(self._number, None)
        with self._lock:
            self._open = False

    def copy(self, part: RegionPart, *, write: bool) -> None:
        """Copy one part, a step at a time, as long as the window is open."""
        for start in range(0, len(part.local), _STEP_NBYTES):
            local = part.local[start : start + _STEP_NBYTES]
            at = part.offset + start
            with self._lock:
                if not self._open:
                    raise TransportError(f"window {self._number} was closed by its owner")
                theirs = self._view[at : at + len(local)]
                copy_into(theirs, local) if write else copy_into(local, theirs)


@dataclass(frozen=True, slots=True)
class _Grant:
    write: bool
    number: int
    nbytes: int

    @classmethod
    def parse(cls, grant: bytes, *, write: bool) -> _Grant:
        if len(grant) != _GRANT.size + _SUM.size or not grant.startswith(_MAGIC):
            raise ProtocolError(f"a grant of {len(grant)} bytes that is none of this transport", remote=True)
        head = grant[: _GRANT.size]
        if _SUM.pack(xxhash.xxh3_64_intdigest(head)) != grant[_GRANT.size :]:
            raise ProtocolError("the grant was damaged: its checksum does not match", remote=True)
        _, for_writing, number, nbytes = _GRANT.unpack(head)
        if bool(for_writing) != write:
            wanted, has = ("write", "read") if write else ("read", "write")
            raise ProtocolError(f"the grant of window {number} is to {has}, not to {wanted}", remote=True)
        return cls(write, number, nbytes)

    def check(self, parts: Sequence[RegionPart]) -> None:
        """Refuse what lies outside the window, before anything is moved."""
        for index, part in enumerate(parts):
            if part.offset < 0 or part.offset + len(part.local) > self.nbytes:
                raise TransportError(
                    f"part {index}: {len(part.local)} bytes at offset {part.offset} are not inside "
                    f"window {self.number} of {self.nbytes} bytes"
                )


@dataclass(eq=False)
class _Transfer(RegionTransfer):
    grant: _Grant
    parts: Sequence[RegionPart]
    done: threading.Event = field(default_factory=threading.Event)
    error: TransportError | None = None

    def poll(self) -> bool:
        if not self.done.is_set():
            return False
        if self.error is not None:
            raise TransportError(str(self.error)) from self.error
        return True

    def wait(self, deadline: float) -> None:
        if is_past(deadline) or not self.done.wait(time_left(deadline)):
            raise TransferTimeoutError(
                f"window {self.grant.number}: {len(self.parts)} parts were not moved by the deadline"
            )
        self.poll()

    def run(self) -> None:
        """Move all parts."""
        try:
            with _windows_lock:
                window = _windows.get(self.grant.number)
            if window is None:
                raise TransportError(f"window {self.grant.number} is not open")
            for part in self.parts:
                window.copy(part, write=self.grant.write)
        except TransportError as error:
            self.error = error
        self.done.set()


class MemoryRegions(RegionTransport):
    """An endpoint with one thread that moves bytes; windows of all endpoints of the process are in reach."""

    name: ClassVar[str] = "memory"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._mine: list[_MemoryWindow] = []
        self._work: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvferry-memory-regions", daemon=True)
        self._thread.start()

    def trusts(self, host: str) -> bool:
        """Itself only."""
        return host in ("", "localhost", "127.0.0.1")

    def open_window(self, view: memoryview, access: Access) -> Window:
        """See :meth:`RegionTransport.open_window`."""
        check_access(access)
        check_memory(view)
        if not view.contiguous or (access == "write" and view.readonly):
            raise TransportError(f"a window to {access} needs memory that is contiguous and writable")
        window = _MemoryWindow(view.cast("B"), access)
        with self._lock:
            if not self._closed:
                self._mine.append(window)
                return window
        window.close()
        raise TransportError("this endpoint is closed")

    def write(self, grant: bytes, parts: Sequence[RegionPart]) -> RegionTransfer:
        """See :meth:`RegionTransport.write`."""
        return self._start(grant, parts, write=True)

    def read(self, grant: bytes, parts: Sequence[RegionPart]) -> RegionTransfer:
        """See :meth:`RegionTransport.read`."""
        if any(part.local.readonly for part in parts):
            raise TransportError("read-only memory cannot be read into")
        return self._start(grant, parts, write=False)

    def _start(self, grant: bytes, parts: Sequence[RegionPart], *, write: bool) -> RegionTransfer:
        parsed = _Grant.parse(grant, write=write)
        parsed.check(parts)
        transfer = _Transfer(parsed, list(parts))
        with self._lock:
            if self._closed:
                raise TransportError("this endpoint is closed")
            self._work.put(transfer)
        return transfer

    def _run(self) -> None:
        while (transfer := self._work.get()) is not None:
            transfer.run()

    def close(self) -> None:
        """See :meth:`RegionTransport.close`; transfers that have begun end first."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._work.put(None)
        for window in self._mine:
            window.close()
        self._thread.join(_JOIN_S)
