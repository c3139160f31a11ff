"""Copies of bytes that nobody reads soon, past the caches: a block that is saved."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import cast

import numpy as np

from kvferry.core.buffers import ByteArray, write_into
from kvferry.core.native import native

__all__ = ["copy_kernel", "stream_into"]

_STREAM_FROM_NBYTES = 256 << 10  # less may well be read again while it is in a cache


def stream_into(dst: ByteArray, offset: int, source: memoryview) -> None:
    """Copy flat bytes into ``dst`` from ``offset`` on, with the GIL released once.

    Big ones go past the caches where the native library is there: they need not be read before they are
    overwritten, which takes two thirds of the time of a plain copy.

    Raises:
        ValueError: If they do not fit, or ``dst`` is read-only.
    """
    nbytes = len(source)
    if not 0 <= offset <= len(dst) - nbytes:
        raise ValueError(f"{nbytes} bytes do not fit into {len(dst)} from {offset} on")
    kernel = _kernel() if nbytes >= _STREAM_FROM_NBYTES else None
    if kernel is None:
        write_into(dst, offset, source)
        return
    if not dst.flags.writeable:
        raise ValueError("the destination is read-only")
    target = _address(dst) + offset
    start = _address(np.frombuffer(source, np.uint8))
    if -nbytes < target - start < nbytes:
        write_into(dst, offset, source)  # they overlap
    else:
        kernel(target, start, nbytes)


def copy_kernel() -> str:
    """What copies big blocks in this process: ``native``, past the caches, or ``numpy``."""
    return "numpy" if _kernel() is None else "native"


def _address(array: ByteArray) -> int:
    return cast("int", array.__array_interface__["data"][0])


@functools.lru_cache(1)
def _kernel() -> Callable[[int, int, int], None] | None:
    library = native().library
    if library is None or not hasattr(library, "kvc_copy"):
        return None
    function = library.kvc_copy
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return cast("Callable[[int, int, int], None]", function)
