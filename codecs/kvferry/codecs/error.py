"""How far decoded slices are from what was encoded, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.core.buffers import ByteArray
from kvferry.core.spec import DType, LayerSpec, TensorSpec

__all__ = ["SliceError", "as_float32", "slice_errors"]

Floats: TypeAlias = "npt.NDArray[np.float32]"
_STICKS_OUT = 16.0
_LEAST, _MOST = 1e-24, 1e30  # of sums that float32 holds without loss that matters
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
    old = np.frombuffer(before, np.uint8).reshape(-1, layer.nbytes)
    new = np.frombuffer(after, np.uint8).reshape(-1, layer.nbytes)
    for tensor, offset in layer.slots():
        if not tensor.nbytes:
            continue
        try:
            x, y = (as_float32(_some(raw, tensor, offset, tokens), tensor.dtype) for raw in (old, new))
        except ValueError:
            continue
        yield _error(tensor, x.reshape(-1, _channels(tensor)), y.reshape(-1, _channels(tensor)))


def _some(raw: ByteArray, tensor: TensorSpec, offset: int, tokens: int | None) -> ByteArray:
    """The bytes of a tensor, or of some of its tokens, of all slices."""
    whole = raw[:, offset : offset + tensor.nbytes]
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    step = rows // tokens if tokens else 1
    if step > 1:
        whole = whole.reshape(len(raw), rows, -1)[:, ::step]
    return np.ascontiguousarray(whole).reshape(-1)


def _error(tensor: TensorSpec, x: Floats, y: Floats) -> SliceError:
    """In float32 where that holds the sums of squares, which it does for KV; else slower, in float64."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        difference = x - y
        square = float(np.dot(difference.reshape(-1), difference.reshape(-1)))
        by_channel = np.einsum("rc,rc->c", x, x).astype(np.float64)
    whole = float(by_channel.sum())
    if not (_LEAST < whole < _MOST and (square == 0 or _LEAST < square < _MOST)):
        return _exact_error(tensor, x, y)
    largest = max(float(difference.max()), -float(difference.min()))
    return _of(tensor, math.sqrt(square), by_channel, largest)


def _exact_error(tensor: TensorSpec, x: Floats, y: Floats) -> SliceError:
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(same, np.float32(0), x - y).astype(np.float64)
    by_channel = np.square(np.where(np.isfinite(x), x, 0).astype(np.float64)).sum(axis=0)
    distance = math.sqrt(float(np.square(difference).sum()))
    return _of(tensor, distance, by_channel, float(np.abs(difference).max()))


def _of(
    tensor: TensorSpec, distance: float, by_channel: npt.NDArray[np.float64], largest: float
) -> SliceError:
    whole, capped = float(by_channel.sum()), float(np.minimum(by_channel, _cap(by_channel)).sum())
    return SliceError(tensor, _over(distance, whole), _over(distance, capped), largest)


def _channels(tensor: TensorSpec) -> int:
    return math.prod(tensor.shape[1:]) if len(tensor.shape) > 1 else 1


def _cap(by_channel: npt.NDArray[np.float64]) -> float:
    live = by_channel[by_channel > 0]
    return _STICKS_OUT * float(np.median(live)) if live.size else 0.0


def _over(distance: float, energy: float) -> float:
    return 0.0 if distance == 0 else distance / math.sqrt(energy) if energy else math.inf
