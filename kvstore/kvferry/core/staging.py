"""Staging memory: a segment of a client's own, out of which the owner of an arena copies what is saved.

Where only the owner may write the arena, a client puts blocks into such a segment and says where they lie.
The client makes it, so it counts against the client's limits; the owner maps it read-only, after it has made
sure that nothing which happens to it later can hurt who reads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from kvferry.core.allocator import PageAllocator
from kvferry.core.buffers import PAGE_NBYTES, ByteArray
from kvferry.core.errors import ProtocolError, StoreError
from kvferry.core.streaming_copy import stream_into

__all__ = ["MappedStaging", "StagingMemory", "StagingPiece"]

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TMPFS_MAGIC: Final = 0x01021994  # <linux/magic.h>
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of <linux/mman.h>, from Linux 5.14 on
_TAKEN_AT_ONCE_NBYTES: Final = 4 << 20
_STATFS_NBYTES: Final = 512  # more than any struct statfs


class StagingPiece(NamedTuple):
    """A piece of staging memory; it is used again once the last view of it is gone.

    Attributes:
        offset: Bytes from the start of the segment; a multiple of the page size.
        view: Its writable bytes.
    """

    offset: int
    view: memoryview


class StagingMemory:
    """The client's side: one sealed memfd that pieces are handed out of. Thread safe.

    Memory is taken as pieces need it, and stays taken.

    Args:
        nbytes: Size, rounded down to pages.

    Attributes:
        fd: To be passed to the owner of the arena; this object's.
        nbytes: Size.

    Raises:
        StoreError: If it cannot be made.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // PAGE_NBYTES * PAGE_NBYTES
        try:
            self.fd = os.memfd_create("kvferry-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self.fd, self.nbytes)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
                self._map = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED)
            except BaseException:
                os.close(self.fd)
                raise
        except (OSError, ValueError) as error:
            raise StoreError(f"staging memory of {self.nbytes} bytes cannot be had: {error}") from error
        self._lock = threading.Lock()
        self._pages = PageAllocator(self.nbytes // PAGE_NBYTES)
        self._taken_nbytes = 0
        self._closed = False
        self._freed: deque[int] = deque()
        """First pages of pieces that nobody looks at any more: noted by whoever drops the last view, at any
        point of any thread, so that no lock may be taken there."""

    @property
    def used_nbytes(self) -> int:
        """Bytes of the pieces in use."""
        with self._lock:
            self._collect()
            return (self._pages.pages - self._pages.free_pages) * PAGE_NBYTES

    @property
    def taken_nbytes(self) -> int:
        """Bytes of memory that it has taken."""
        return self._taken_nbytes

    def piece(self, nbytes: int) -> StagingPiece | None:
        """A piece of exactly ``nbytes``, not cleared; ``None`` if there is no room for it."""
        pages = -(-nbytes // PAGE_NBYTES)
        with self._lock:
            self._collect()
            start = None if self._closed or not pages else self._pages.allocate(pages)
            if start is None:
                return None
            offset = start * PAGE_NBYTES
            if not self._take(offset + pages * PAGE_NBYTES):
                self._pages.free(start)
                return None
        array: ByteArray = np.frombuffer(self._map, np.uint8, nbytes, offset)
        weakref.finalize(array, self._freed.append, start).atexit = False
        return StagingPiece(offset, array.data)

    def _take(self, stop: int) -> bool:
        """See that there is memory up to ``stop``, so that no write into it can fail."""
        start = self._taken_nbytes
        if stop <= start:
            return True
        stop = min(self.nbytes, -(-stop // _TAKEN_AT_ONCE_NBYTES) * _TAKEN_AT_ONCE_NBYTES)
        try:
            os.posix_fallocate(self.fd, start, stop - start)
        except OSError:
            return False
        with contextlib.suppress(OSError):  # page faults one by one cost half the bandwidth
            self._map.madvise(_POPULATE_WRITE, start, stop - start)
        self._taken_nbytes = stop
        return True

    def _collect(self) -> None:
        while self._freed:
            self._pages.free(self._freed.popleft())

    def close(self) -> None:
        """Hand out nothing more; the memory goes with the last view. A second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class MappedStaging:
    """The owner's side: a client's staging memory, as it may be read. Used by one thread at a time.

    Args:
        fd: Descriptor that the client has passed; stays the caller's and may be closed afterwards.
        nbytes: Bytes that it is to have.

    Raises:
        ProtocolError: If it is not memory that is safe to read: a memfd of pages of the usual size, sealed
            against shrinking, and as large as it should be.
        StoreError: If it cannot be mapped.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._verify(fd, nbytes)
        try:
            self._map = memoryview(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise StoreError(f"staging memory of {nbytes} bytes cannot be mapped: {error}") from error

    @staticmethod
    def _verify(fd: int, nbytes: int) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolError("staging memory that is no memfd", remote=True) from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("staging memory that is not sealed against shrinking", remote=True)
        if not _is_tmpfs(fd):  # huge pages may be missing when they are read, which kills who reads
            raise ProtocolError("staging memory of huge pages", remote=True)
        size = os.fstat(fd).st_size
        if not 0 < nbytes <= size:
            raise ProtocolError(f"staging memory of {size} bytes, not {nbytes}", remote=True)

    def copy(self, offset: int, dst: memoryview) -> None:
        """Copy what lies at ``offset`` to ``dst``, as much as that takes, with the GIL released.

        Raises:
            ProtocolError: If it does not lie inside.
        """
        if not 0 <= offset <= offset + len(dst) <= len(self._map):
            raise ProtocolError(
                f"{len(dst)} bytes from {offset} on, of staging memory of {len(self._map)}", remote=True
            )
        stream_into(np.frombuffer(dst, np.uint8), 0, self._map[offset : offset + len(dst)])


def _is_tmpfs(fd: int) -> bool:
    libc = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(_STATFS_NBYTES)
    if libc.fstatfs(ctypes.c_int(fd), buffer) != 0:
        return False
    return ctypes.c_long.from_buffer(buffer).value == _TMPFS_MAGIC
