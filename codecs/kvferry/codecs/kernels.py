"""Which kernels the codecs run on: the native library, or numpy where it is not there."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvferry.codecs.native import native
from kvferry.codecs.tensors import TensorView
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import ConfigError

__all__ = ["Kernels", "kernels", "use_kernels"]


class Kernels(Protocol):
    """Functions that write or read one section of one tensor and give its size.

    Raises:
        CodecError: If a destination is too small.
        CorruptBlockError: If a section cannot be decoded.
    """

    def ebp_encode(self, view: TensorView, bits: int, dst: ByteArray) -> int:
        """Exponent packing with 3 or 4 bits, 0 to choose."""
        ...

    def ebp_decode(self, view: TensorView, src: ByteArray) -> int:
        """The reverse."""
        ...

    def split_encode(self, view: TensorView, dst: ByteArray) -> int:
        """Split planes, the exponents entropy coded."""
        ...

    def split_decode(self, view: TensorView, src: ByteArray) -> int:
        """The reverse, of what either set of kernels wrote."""
        ...

    def quant_encode(self, view: TensorView, kind: int, axis: int, group: int, dst: ByteArray) -> int:
        """int8, int4 and fp8; see :mod:`kvferry.codecs.quantised`."""
        ...

    def quant_decode(self, view: TensorView, kind: int, src: ByteArray) -> int:
        """The reverse."""
        ...


_forced: list[Kernels] = []


def kernels() -> Kernels:
    """The kernels of this process."""
    return _forced[-1] if _forced else _default()


@functools.lru_cache(1)
def _default() -> Kernels:
    return _named("native" if native().library is not None else "numpy")


def _named(name: str) -> Kernels:
    if name == "numpy":
        from kvferry.codecs.fallback import NumpyKernels

        return NumpyKernels()
    library = native().library
    if name != "native" or library is None:
        raise ConfigError(f"kernels {name!r} are not to be had: {native().reason or 'write native or numpy'}")
    from kvferry.codecs.native.kernels import NativeKernels

    return NativeKernels(library)


@contextmanager
def use_kernels(name: str) -> Iterator[None]:
    """Take ``native`` or ``numpy`` kernels meanwhile, in all threads: for tests and measurements.

    Raises:
        ConfigError: If there is no native library, with the reason.
    """
    _forced.append(_named(name))
    try:
        yield
    finally:
        _forced.pop()
