"""How far decoded slices are from what was encoded, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.codecs.kernels import KEEP, Piece, Plan, SumsOfSquares, kernels
from kvferry.core.spec import DType, LayerSpec, TensorSpec

__all__ = ["SliceError", "as_float32", "compared", "is_exact", "slice_errors", "sums_of_squares"]

Floats: TypeAlias = "npt.NDArray[np.float32]"
_STICKS_OUT = 16.0
_LEAST, _MOST = 1e-24, 1e30  # of sums that float32 holds without loss that matters
_HALVES = (DType.BFLOAT16, DType.FLOAT16)
_NOT_COMPARED = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.BOOL)
_FLOATS = {DType.FLOAT16: np.float16, DType.FLOAT32: np.float32, DType.FLOAT64: np.float64}


@dataclass(frozen=True, slots=True)
class SliceError:
    """The error of one tensor over all slices that were compared.

    Attributes:
        tensor: Which.
        relative_l2: ``|x - decoded| / |x|``; 0 where both are zero, NaN or infinite where a value that was
            finite is not finite any more.
        bounded: The same, but channels (columns of a tensor with a token axis) that stick out count in
            ``|x|`` with 16 times the energy of the median channel at most. What the bound of a codec is
            compared with: a few large channels, as the keys of some models have them, would hide an error
            that spoils all others.
        maximum: Largest ``|x - decoded|``.
    """

    tensor: TensorSpec
    relative_l2: float
    bounded: float
    maximum: float


def as_float32(raw: npt.NDArray[np.uint8], dtype: DType) -> Floats:
    """Values of ``raw`` (last axis: bytes, contiguous) as float32; integers are taken as numbers.

    Raises:
        ValueError: For a type that has no values to compare.
    """
    if dtype is DType.BFLOAT16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    kind: Any = _FLOATS.get(dtype, {DType.INT8: np.int8, DType.UINT8: np.uint8}.get(dtype))
    if kind is None:
        raise ValueError(f"values of {dtype.value} are not compared")
    values: Floats = raw.view(kind).astype(np.float32)
    return values


def slice_errors(
    before: memoryview, after: memoryview, layer: LayerSpec, tokens: int | None = None
) -> Iterator[SliceError]:
    """The error of each tensor of whole slices of ``layer``; fp8 and bool tensors are left out.

    Args:
        before: The slices.
        after: What became of them.
        layer: What they are.
        tokens: Compare about as many of each slice at least, spread evenly; all by default.
    """
    if not layer.nbytes or not len(before):
        return
    plan = _halves(layer)
    count = len(before) // layer.nbytes
    quick = iter(kernels().errors(plan, before, after, count, tokens or 0) if plan.pieces else ())
    for tensor, offset in layer.slots():
        if not tensor.nbytes or tensor.dtype in _NOT_COMPARED:
            continue
        sums = next(quick) if _is_half(tensor) else None
        if sums is None or not is_exact(sums):
            part = _part(tensor, offset)
            x, y = (compared(data, layer.nbytes, part, tensor.dtype, tokens or 0) for data in (before, after))
            sums = sums_of_squares(x, y)
        distance = math.sqrt(sums.square)
        yield SliceError(tensor, _over(distance, sums.whole), _over(distance, sums.capped), sums.largest)


def compared(data: memoryview, slice_nbytes: int, part: Piece, dtype: DType, tokens: int) -> Floats:
    """The values of one tensor of all slices, of some ``tokens`` at least (0: all), a channel a column."""
    raw = np.frombuffer(data, np.uint8).reshape(-1, slice_nbytes)
    whole = raw[:, part.offset : part.offset + part.nbytes].reshape(len(raw), part.rows, -1)
    step = max(1, part.rows // tokens) if tokens else 1
    return as_float32(np.ascontiguousarray(whole[:, ::step]).reshape(-1), dtype).reshape(-1, part.cols)


def sums_of_squares(x: Floats, y: Floats) -> SumsOfSquares:
    """In float32 where that holds the sums of squares, which it does for KV; else slower, in float64.

    Args:
        x: What was encoded, a channel a column.
        y: What became of it.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        difference = x - y
        square = float(np.dot(difference.reshape(-1), difference.reshape(-1)))
        by_channel = np.einsum("rc,rc->c", x, x).astype(np.float64)
    sums = _sums(square, by_channel, max(float(difference.max()), -float(difference.min())))
    if is_exact(sums):
        return sums
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.where(same, np.float32(0), x - y).astype(np.float64)
    by_channel = np.square(np.where(np.isfinite(x), x, 0).astype(np.float64)).sum(axis=0)
    return _sums(float(np.square(exact).sum()), by_channel, float(np.abs(exact).max()))


def is_exact(sums: SumsOfSquares) -> bool:
    """Whether float32 held them."""
    return _LEAST < sums.whole < _MOST and (sums.square == 0 or _LEAST < sums.square < _MOST)


@lru_cache(64)
def _halves(layer: LayerSpec) -> Plan:
    """The tensors that kernels compare."""
    found = [_part(t, offset) for t, offset in layer.slots() if t.nbytes and _is_half(t)]
    return Plan(tuple(found), layer.nbytes)


def _is_half(tensor: TensorSpec) -> bool:
    return tensor.dtype in _HALVES and len(tensor.shape) > 1


def _part(tensor: TensorSpec, offset: int) -> Piece:
    rows, cols = (tensor.shape[0], math.prod(tensor.shape[1:])) if len(tensor.shape) > 1 else (1, 1)
    return Piece(offset, tensor.nbytes, KEEP, rows, cols, cols, int(tensor.dtype is DType.FLOAT16))


def _sums(square: float, by_channel: npt.NDArray[np.float64], largest: float) -> SumsOfSquares:
    capped = float(np.minimum(by_channel, _cap(by_channel)).sum())
    return SumsOfSquares(square, float(by_channel.sum()), capped, largest)


def _cap(by_channel: npt.NDArray[np.float64]) -> float:
    live = by_channel[by_channel > 0]
    return _STICKS_OUT * float(np.median(live)) if live.size else 0.0


def _over(distance: float, energy: float) -> float:
    return 0.0 if distance == 0 else distance / math.sqrt(energy) if energy else math.inf
