"""How far decoded slices are from what was encoded, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.core.spec import DType, LayerSpec, TensorSpec

__all__ = ["SliceError", "as_float32", "slice_errors"]

Floats: TypeAlias = "npt.NDArray[np.float32]"
_FLOATS = {DType.FLOAT16: np.float16, DType.FLOAT32: np.float32, DType.FLOAT64: np.float64}


@dataclass(frozen=True, slots=True)
class SliceError:
    """The error of one tensor over all slices that were compared.

    Attributes:
        tensor: Which.
        relative_l2: ``|x - decoded| / |x|``; 0 where both are zero, NaN or infinite where a value that was
            finite is not finite any more.
        maximum: Largest ``|x - decoded|``.
    """

    tensor: TensorSpec
    relative_l2: float
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


def slice_errors(before: memoryview, after: memoryview, layer: LayerSpec) -> Iterator[SliceError]:
    """The error of each tensor of whole slices of ``layer``; fp8 and bool tensors are left out."""
    if not layer.nbytes or not len(before):
        return
    old = np.frombuffer(before, np.uint8).reshape(-1, layer.nbytes)
    new = np.frombuffer(after, np.uint8).reshape(-1, layer.nbytes)
    for tensor, offset in layer.slots():
        piece = slice(offset, offset + tensor.nbytes)
        try:
            x = as_float32(np.ascontiguousarray(old[:, piece]), tensor.dtype)
            y = as_float32(np.ascontiguousarray(new[:, piece]), tensor.dtype)
        except ValueError:
            continue
        if not x.size:
            continue
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.where(same, np.float32(0), x - y).astype(np.float64)
        norm = math.sqrt(float(np.square(x[np.isfinite(x)].astype(np.float64)).sum()))
        distance = math.sqrt(float(np.square(difference).sum()))
        relative = 0.0 if distance == 0 else distance / norm if norm else math.inf
        yield SliceError(tensor, relative, float(np.abs(difference).max()))
