"""Which kernels the codecs run on: the native library, or numpy where it is not there."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvferry.codecs.native import native
from kvferry.core.errors import ConfigError
from kvferry.core.forks import loading

__all__ = [
    "CHANNEL",
    "EBP",
    "FP8",
    "FP8_PLAIN",
    "INT4",
    "INT8",
    "INT8_RANGE",
    "KEEP",
    "QUANT",
    "SPLIT",
    "TOKEN",
    "FrameForm",
    "Frames",
    "Kernels",
    "Operation",
    "Piece",
    "Plan",
    "SumsOfSquares",
    "kernels",
    "use_kernels",
]

EBP, SPLIT, QUANT = 1, 2, 3
INT8, INT8_RANGE, INT4, FP8, FP8_PLAIN = 8, 9, 4, 1, 2
TOKEN, CHANNEL = 1, 2


class Operation(NamedTuple):
    """What is done with a tensor: :data:`EBP`, :data:`SPLIT`, :data:`QUANT`, or 0 to keep it.

    Attributes:
        code: Which.
        first: Bits of :data:`EBP` (0: chosen by a sample); kind of :data:`QUANT`.
        second: :data:`TOKEN` or :data:`CHANNEL`, of :data:`QUANT`.
        group: Elements of a group, of :data:`QUANT`.
    """

    code: int
    first: int = 0
    second: int = 0
    group: int = 0

    def __bool__(self) -> bool:
        return self.code != 0


KEEP = Operation(0)


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor, or bytes that are kept, inside a layer slice.

    Attributes:
        offset: From the start of the slice, in bytes.
        nbytes: In one slice.
        operation: What is done with it.
        rows: Tokens of a slice.
        cols: Elements of a token.
        last: Elements of the last axis, a divisor of ``cols``.
        dtype: 0 for bfloat16, 1 for float16.
    """

    offset: int
    nbytes: int
    operation: Operation = KEEP
    rows: int = 0
    cols: int = 0
    last: int = 0
    dtype: int = 0


@dataclass(frozen=True)
class Plan:
    """The pieces of a layer slice in order, and what kernels derive from them.

    Attributes:
        pieces: In the order of their sections.
        slice_nbytes: From one slice to the next.
        derived: For the kernels that run it.
    """

    pieces: tuple[Piece, ...]
    slice_nbytes: int
    derived: dict[str, object] = field(default_factory=dict, compare=False)

    @property
    def useful(self) -> bool:
        """Whether a piece is not just kept; also of a slice of no bytes."""
        return not self.slice_nbytes or any(piece.operation for piece in self.pieces)


class SumsOfSquares(NamedTuple):
    """Of one tensor: what :mod:`kvferry.codecs.error` makes the error of.

    Attributes:
        square: Of the differences.
        whole: Of the elements.
        capped: Of the elements, without what channels that stick out have more than they count for.
        largest: Largest difference.
    """

    square: float
    whole: float
    capped: float
    largest: float


@dataclass(frozen=True, slots=True)
class FrameForm:
    """What the frames of one pipeline have in common for so many slices of one layer.

    Attributes:
        plan: Of the layer.
        count: Slices in a frame, at least one, of at least one byte.
        header: Of such a frame that is not stored as it is, with a body of no bytes.
        room: What kernels may write to while they encode the body.
        derived: For the kernels that run it.
    """

    plan: Plan
    count: int
    header: bytes
    room: int
    derived: dict[str, object] = field(default_factory=dict, compare=False)


class Frames(Protocol):
    """Whole frames, header and all, many in one call. Thread safe.

    Both verbs take the frames in their order, and stop before the first that is not as expected. They give
    size and flags (:mod:`kvferry.codecs.frame`) of those that are done.
    """

    def encode(
        self,
        forms: Sequence[FrameForm],
        srcs: Sequence[memoryview],
        dsts: Sequence[memoryview],
        *,
        in_row: bool = False,
    ) -> list[tuple[int, int]]:
        """Encode the slices ``srcs`` each to the start of its ``dsts``, or all in a row to the only one.

        In a row each frame begins at a multiple of 64 bytes from the start, with zeros before it, and after
        the last. What would be larger is stored as it is.
        """
        ...

    def decode(
        self,
        forms: Sequence[FrameForm],
        srcs: Sequence[memoryview],
        dsts: Sequence[memoryview],
        *,
        in_row: bool = False,
    ) -> list[tuple[int, int]]:
        """The reverse; each of ``srcs`` is exactly one frame, or the only one begins with them in a row."""
        ...


class Kernels(Protocol):
    """Encode and decode whole layer slices, one section a piece. Thread safe.

    Attributes:
        frames: For whole frames, if the kernels have that; else :mod:`kvferry.codecs.pipeline` makes them.
    """

    @property
    def frames(self) -> Frames | None:
        """See the class."""
        ...

    def encode(self, plan: Plan, src: memoryview, count: int, dst: memoryview) -> int:
        """Write ``count`` slices to the start of ``dst``; the bytes written.

        ``dst`` has room for the slices and eight bytes a piece.
        """
        ...

    def decode(self, plan: Plan, src: memoryview, count: int, dst: memoryview) -> None:
        """The reverse, whichever kernels wrote ``src``.

        Raises:
            CorruptBlockError: If ``src`` does not hold exactly ``count`` slices.
        """
        ...

    def errors(
        self, plan: Plan, before: memoryview, after: memoryview, count: int, tokens: int
    ) -> list[SumsOfSquares]:
        """How far ``count`` decoded slices are from what was encoded, for each piece, all of them tensors.

        At least ``tokens`` tokens of each slice are compared (0: all), spread evenly. In float32: where there
        are values that are not finite, or too large, so are the sums.
        """
        ...


_forced: list[Kernels] = []


def kernels() -> Kernels:
    """The kernels of this process."""
    return _forced[-1] if _forced else _default()


@functools.lru_cache(1)
def _default() -> Kernels:
    with loading():
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
