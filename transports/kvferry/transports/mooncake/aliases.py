"""Second addresses for memory, which can be taken away while the kernel still copies to them.

Mooncake checks an address when a request comes, and then copies until it is done, also after the memory was
unregistered. So not the memory itself is registered, but an alias: the same pages at an address that nothing
else has. Taking the alias away ends what is under way at once, and since an address is not handed out again
soon, a late request with an old one is refused by the library itself. The alias of a window for reading is
read-only, which the library does not know either.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import threading
from collections import deque
from typing import Final

from kvferry.core.buffers import PAGE_NBYTES
from kvferry.core.errors import TransportError

__all__ = ["AliasArea", "shared_memory"]

_AREA_NBYTES: Final = 1 << 44  # addresses, not memory
_LEAST_AREA_NBYTES: Final = 1 << 36
_REMEMBERED: Final = 1024
_TRIES: Final = 256
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10  # <sys/mman.h>; not named by the mmap module
_MAP_NORESERVE: Final = 0x4000
_MREMAP_MAYMOVE_FIXED: Final = 1 | 2
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_FAILED: Final = ctypes.c_void_p(-1).value
_RESERVED: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mremap = _libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_mprotect = _libc.mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def shared_memory(nbytes: int) -> memoryview:
    """New page-aligned memory that windows can be opened on, populated; freed with its last view."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0x8000)
    return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=flags))[:nbytes]


class AliasArea:
    """Addresses set aside for aliases, one an engine. Thread safe.

    Raises:
        TransportError: If the process may not have as many addresses (``ulimit -v``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}  # first address: bytes, in pages
        self._left: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._random = random.SystemRandom()
        self._nbytes = _AREA_NBYTES
        while True:
            start = _mmap(None, self._nbytes, _PROT_NONE, _RESERVED, -1, 0)
            if start != _FAILED:
                break
            self._nbytes //= 2
            if self._nbytes < _LEAST_AREA_NBYTES:
                raise TransportError(
                    f"no {_LEAST_AREA_NBYTES} bytes of address space for windows (errno "
                    f"{_error()}); they are addresses, not memory: raise ulimit -v"
                )
        self._start = int(start or 0)

    def map(self, address: int, nbytes: int, *, writable: bool) -> int:
        """A second address of ``nbytes`` bytes at ``address``, which lie in one shared mapping.

        Raises:
            TransportError: If they are no shared memory, or the kernel gives no further mapping.
        """
        first = address - address % PAGE_NBYTES
        whole = -(-(address + nbytes - first) // PAGE_NBYTES) * PAGE_NBYTES
        at = self._take(whole)
        # with an old size of 0 a shared mapping is not moved but mapped once more
        if _mremap(first, 0, whole, _MREMAP_MAYMOVE_FIXED, at) != at:
            code = errno.errorcode.get(_error(), "?")
            self._give_back(at, whole)
            raise TransportError(
                f"a window of {nbytes} bytes cannot be opened ({code}): its memory must be shared, as that "
                "of an arena (without hugepages) or of kvferry.transports.mooncake.shared_memory, and the "
                "process must have mappings left (vm.max_map_count)"
            )
        if not writable and _mprotect(at, whole, mmap.PROT_READ):
            code = errno.errorcode.get(_error(), "?")
            self._withdraw(at, whole)
            raise TransportError(f"a window of {nbytes} bytes cannot be made read-only ({code})")
        # spares a page fault a page in the middle of a transfer; kernels before 5.14 do not know it
        _madvise(at, whole, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)
        return at + address - first

    def unmap(self, alias: int) -> None:
        """Take an alias away: when this returns nothing is copied through it any more. Idempotent.

        Raises:
            TransportError: If the kernel refuses; the alias may still be used then.
        """
        first = alias - alias % PAGE_NBYTES
        with self._lock:
            whole = self._taken.get(first)
        if whole is not None:
            self._withdraw(first, whole)

    def _withdraw(self, first: int, whole: int) -> None:
        # not munmap: something else could come to lie there while a copy is under way
        if _mmap(first, whole, _PROT_NONE, _RESERVED | _MAP_FIXED, -1, 0) != first:
            raise TransportError(
                f"a window of {whole} bytes cannot be withdrawn (errno {_error()}); its memory stays in use"
            )
        self._give_back(first, whole)

    def _take(self, whole: int) -> int:
        """A random place, so that a request with an old address, or a guessed one, meets nothing."""
        pages = (self._nbytes - whole) // PAGE_NBYTES
        with self._lock:
            for _ in range(_TRIES):
                at = self._start + self._random.randrange(max(1, pages)) * PAGE_NBYTES
                if pages > 0 and not self._overlaps(at, whole):
                    self._taken[at] = whole
                    return at
        raise TransportError(
            f"no room for a window of {whole} bytes among {len(self._taken)} others in {self._nbytes} bytes "
            "of addresses"
        )

    def _overlaps(self, at: int, whole: int) -> bool:
        return any(at < start + size and start < at + whole for start, size in self._taken.items()) or any(
            at < start + size and start < at + whole for start, size in self._left
        )

    def _give_back(self, first: int, whole: int) -> None:
        with self._lock:
            del self._taken[first]
            self._left.append((first, whole))


def _error() -> int:
    return ctypes.get_errno()
