"""Functions of the native library that work on a state of their own, which the caller keeps."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

from kvferry.core.native import native

__all__ = ["NativeCall", "native_call"]


class NativeCall(NamedTuple):
    """One of them: takes the address of a state of so many bytes, and returns a code."""

    function: Any
    state_nbytes: int


@functools.lru_cache
def native_call(kind: str, verb: str) -> NativeCall | None:
    """``kvc_<kind>_<verb>``, with the size that ``kvc_<kind>_nbytes`` gives; ``None`` without the library."""
    library = native().library
    if library is None:
        return None
    function, nbytes = getattr(library, f"kvc_{kind}_{verb}"), getattr(library, f"kvc_{kind}_nbytes")
    function.argtypes = (ctypes.c_void_p,)
    nbytes.restype = ctypes.c_size_t
    return NativeCall(function, int(nbytes()))
