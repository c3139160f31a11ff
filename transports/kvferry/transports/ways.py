"""Which of two ways to move something, by what the last ones took (``ways.h`` of the native library)."""

from __future__ import annotations

import ctypes
from typing import Final

from kvferry.core.native import native

__all__ = ["Ways"]

_MAX_NS: Final = 1 << 50


class Ways:
    """For messages of about one size; one thread at a time. The way is 0 until the other one was faster."""

    def __init__(self) -> None:
        library = native().library
        self._library = library
        if library is not None:
            library.kvc_ways_nbytes.restype = ctypes.c_size_t
            library.kvc_ways_next.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
            library.kvc_ways_took.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
            library.kvc_ways_took.restype = None
            self._state = ctypes.create_string_buffer(int(library.kvc_ways_nbytes()))

    def next(self, nbytes: int) -> int:
        """The way of a message of ``nbytes``: 0 or 1."""
        return 0 if self._library is None else int(self._library.kvc_ways_next(self._state, nbytes))

    def took(self, nbytes: int, ns: int) -> None:
        """That message took so long on the way that was :meth:`next`."""
        if self._library is not None:
            self._library.kvc_ways_took(self._state, nbytes, min(ns, _MAX_NS))
