"""int8, int4 and fp8 in numpy; ``native/quant.h`` describes the section. All sums are in float32, as there.

Groups are lanes here: the last axis of an array runs over the elements of a group.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.codecs.fallback.floats import (
    U16,
    Floats,
    bf16_above,
    bf16_of,
    fp8_of,
    fp8_value,
    of_value,
    sortable,
    value_of,
)
from kvferry.codecs.fallback.view import (
    DAMAGED,
    RAW,
    SECTION_NBYTES,
    TensorView,
    header,
    load_raw,
    parse_header,
    store_raw,
)
from kvferry.codecs.kernels import CHANNEL, FP8, FP8_PLAIN, INT4, INT8, INT8_RANGE, TOKEN
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import CorruptBlockError

__all__ = ["code_nbytes", "cuts", "parameters_of", "quant_decode", "quant_encode", "sizes_of", "valid"]

_KEPT: Final = 0xFFFF
_MOST_INT4: Final = 127
_LEVELS: Final = {
    INT8: np.float32(127),
    FP8: np.float32(448),
    INT4: np.float32(15),
    INT8_RANGE: np.float32(255),
}
_Mask: TypeAlias = "npt.NDArray[np.bool_]"


class _Lanes(NamedTuple):
    """Groups after encoding: parameters and codes of each, and which are kept as they are."""

    parameters: list[U16]  # scale; or step and lowest value
    codes: ByteArray  # [groups, bytes of a group]
    kept: _Mask


class Shape(Protocol):
    """What sizes follow from: a tensor of some slices, on the host or a device."""

    @property
    def count(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def last(self) -> int: ...


class _Sizes(NamedTuple):
    """Bytes of the two planes of a section."""

    parameters: int
    codes: int


def quant_encode(view: TensorView, kind: int, axis: int, group: int, dst: ByteArray) -> int:
    """As ``quant_encode`` of the native library."""
    raw = SECTION_NBYTES + view.count * view.nbytes
    if not valid(view, kind, axis, group):
        return store_raw(view, dst)
    sizes = sizes_of(view, kind, axis, group)
    if SECTION_NBYTES + sizes.parameters + sizes.codes > raw:
        return store_raw(view, dst)
    elements = view.load()
    if kind == FP8_PLAIN:
        if int((elements & 0x7FFF).max()) > (0x5F00 if view.dtype else 0x43E0):
            return store_raw(view, dst)
        parts, count = [fp8_of(value_of(elements, view.dtype))], 0
    elif axis == TOKEN:
        parts, count = _encode_tokens(elements.reshape(-1, view.last), kind, group, view.dtype)
    else:
        parts, count = _encode_channels(elements.reshape(-1, view.cols), kind, group, view.dtype)
    if SECTION_NBYTES + sum(part.size for part in parts) > raw:
        return store_raw(view, dst)
    dst[:SECTION_NBYTES] = np.frombuffer(header(kind, axis, group, count), np.uint8)
    at = SECTION_NBYTES
    for part in parts:
        dst[at : at + part.size] = part.reshape(-1)
        at += part.size
    return at


def quant_decode(view: TensorView, kind: int, src: ByteArray) -> int:
    """As ``quant_decode`` of the native library."""
    mode, axis, group, _ = parse_header(src)
    if mode == RAW:
        return load_raw(view, src)
    if mode != kind or not valid(view, kind, axis, group):
        raise CorruptBlockError(DAMAGED)
    sizes = sizes_of(view, kind, axis, group)
    at = SECTION_NBYTES + sizes.parameters
    end = at + sizes.codes
    if len(src) < end:
        raise CorruptBlockError(DAMAGED)
    parameters = np.ascontiguousarray(src[SECTION_NBYTES:at]).view("<u2")
    shape = (view.count, view.rows, view.cols)
    if kind == FP8_PLAIN:
        view.store(of_value(fp8_value(src[at:end]), view.dtype).reshape(shape))
        return end
    decode = _decode_tokens if axis == TOKEN else _decode_channels
    elements, used = decode(view, kind, group, parameters, src[at:end], src[end:])
    view.store(elements.reshape(shape))
    return end + used


def valid(view: Shape, kind: int, axis: int, group: int) -> bool:
    """Whether a section can be of that kind."""
    most = _MOST_INT4 if axis == TOKEN and kind == INT4 else 0xFFFF
    by_token, by_channel = kind in (INT8, INT4, FP8, FP8_PLAIN), kind in (INT8, INT8_RANGE, INT4, FP8)
    known = (axis == TOKEN and by_token) or (axis == CHANNEL and by_channel)
    return known and view.count * view.nbytes > 0 and 0 < group <= most


def code_nbytes(kind: int, length: int) -> int:
    """Bytes of the codes of a group."""
    return (length + 1) // 2 if kind == INT4 else length


def parameters_of(kind: int) -> int:
    """Parameters of a group: a scale, or a step and the lowest value."""
    return 2 if kind in (INT4, INT8_RANGE) else 1


def sizes_of(view: Shape, kind: int, axis: int, group: int) -> _Sizes:
    """Bytes of both planes of a section."""
    total, size = view.count * view.nbytes // 2, 2 * parameters_of(kind)
    length = view.last if axis == TOKEN else view.rows * view.count
    lanes = total // length
    groups = -(-length // group)
    rest = length % group
    codes = length // group * code_nbytes(kind, group) + code_nbytes(kind, rest)
    return _Sizes(0 if kind == FP8_PLAIN else lanes * groups * size, lanes * codes)


# -- groups --------------------------------------------------------------------------------------------


def _encode_lanes(raw: U16, kind: int, dtype: int, *, anchored: bool = False) -> _Lanes:
    if kind in (INT4, INT8_RANGE):
        return _encode_range(raw, kind, dtype, anchored and kind == INT4)
    top = (raw & 0x7FFF).max(axis=1)
    kept = top >= 0x7C00 if dtype else (top != 0) & ((top < 0x0880) | (top >= 0x7E80))
    zero = (top == 0) | kept
    largest = np.where(zero, np.float32(1), value_of(np.where(zero, 0, top), dtype))
    scale = np.where(zero, 0, bf16_above((largest / _LEVELS[kind]).astype(np.float32))).astype(np.uint16)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(zero, np.float32(0), np.float32(1) / value_of(scale, 0))
    scaled = value_of(np.where(kept[:, None], 0, raw).astype(np.uint16), dtype) * inverse[:, None]
    codes = (
        np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8) if kind == INT8 else fp8_of(scaled)
    )
    return _Lanes([np.where(kept, _KEPT, scale).astype(np.uint16)], np.where(kept[:, None], 0, codes), kept)


def _encode_range(raw: U16, kind: int, dtype: int, anchored: bool) -> _Lanes:
    order = sortable(raw)
    low, high = _unsortable(order.min(axis=1)), _unsortable(order.max(axis=1))
    limit = 0x7C00 if dtype else 0x7E80
    kept = ((low & 0x7FFF) >= limit) | ((high & 0x7FFF) >= limit)
    lowest, highest = (value_of(np.where(kept, 0, x).astype(np.uint16), dtype) for x in (low, high))
    span = highest - lowest
    kept |= (span != 0) & (span < np.float32(2.0**-100))
    share = (span / _LEVELS[kind]).astype(np.float32)
    step = (
        bf16_of(share) if kind == INT4 else bf16_above(share)
    )  # rounded down, the highest value had no code
    flat = (span == 0) | kept
    with np.errstate(divide="ignore", over="ignore"):  # of groups that are kept
        inverse = np.where(flat, np.float32(0), np.float32(1) / value_of(step, 0))
    values = value_of(np.where(kept[:, None], 0, raw).astype(np.uint16), dtype)
    if anchored:
        low = np.where(flat, low, _anchored(low, values[:, 0], value_of(step, 0), inverse, dtype))
        lowest = value_of(np.where(kept, 0, low).astype(np.uint16), dtype)
    with np.errstate(over="ignore"):
        scaled = (values - np.where(kept, np.float32(0), lowest)[:, None]) * inverse[:, None]
    codes = np.clip(np.rint(scaled), 0, _LEVELS[kind]).astype(np.uint8)
    packed = codes[:, : code_nbytes(kind, raw.shape[1])].copy()
    if kind == INT4:
        half = packed.shape[1]
        packed[:, : raw.shape[1] - half] |= codes[:, half:] << 4
    packed[kept] = 0
    steps = np.where(kept, _KEPT, step).astype(np.uint16)
    return _Lanes([steps, np.where(kept, 0, low).astype(np.uint16)], packed, kept)


def _anchored(low: U16, values: Floats, step: Floats, inverse: Floats, dtype: int) -> U16:
    """As ``anchored`` of the native library, for the first element of each group."""
    with np.errstate(over="ignore", invalid="ignore"):  # of groups that are kept
        above = np.rint((values - value_of(low, dtype)) * inverse) * step
        moved = of_value(values - above, dtype)
        off = value_of(moved, dtype) + above - values
        most = step * np.float32(0.125)
    return np.where((off <= most) & (-off <= most), moved, low).astype(np.uint16)


def _unsortable(order: npt.NDArray[np.int16]) -> U16:
    return (order ^ (order >> 15 & 0x7FFF)).view(np.uint16)


def _decode_lanes(parameters: list[U16], codes: ByteArray, length: int, kind: int, dtype: int) -> U16:
    scale = value_of(np.ascontiguousarray(parameters[0]), 0)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        if kind in (INT4, INT8_RANGE):
            lowest = value_of(np.ascontiguousarray(parameters[1]), dtype)[:, None]
            wide = codes
            if kind == INT4:
                wide = np.concatenate([codes & 15, codes[:, : length - codes.shape[1]] >> 4], axis=1)
            return of_value(wide.astype(np.float32) * scale + lowest, dtype)
        values = codes.view(np.int8).astype(np.float32) if kind == INT8 else fp8_value(codes)
        return of_value(values * scale, dtype)


# -- by token ------------------------------------------------------------------------------------------


def cuts(length: int, group: int) -> list[tuple[int, int, int]]:
    """Whole groups of a run together, then what is left over: first element, groups, elements of each."""
    whole, rest = divmod(length, group)
    return [cut for cut in ((0, whole, group), (whole * group, 1, rest)) if cut[1] and cut[2]]


def _encode_tokens(runs: U16, kind: int, group: int, dtype: int) -> tuple[list[ByteArray], int]:
    count, length = runs.shape
    parameters, codes, kept = [], [], []
    for start, groups, size in cuts(length, group):
        lane = _encode_lanes(runs[:, start : start + groups * size].reshape(-1, size), kind, dtype)
        parameters.append(np.stack(lane.parameters, axis=1).reshape(count, groups, -1))
        codes.append(lane.codes.reshape(count, -1))
        kept.append(lane.kept.reshape(count, groups))
    raw = [
        np.ascontiguousarray(runs[run, number * group : (number + 1) * group]).view(np.uint8)
        for run, number in np.argwhere(np.concatenate(kept, axis=1))
    ]
    planes = [np.concatenate(parameters, axis=1).astype("<u2").view(np.uint8), np.concatenate(codes, axis=1)]
    return [*planes, *raw], len(raw)


def _decode_tokens(
    view: TensorView, kind: int, group: int, parameters: U16, codes: ByteArray, kept: ByteArray
) -> tuple[U16, int]:
    length = view.last
    runs = view.count * view.nbytes // 2 // length
    table = parameters.reshape(runs, -(-length // group), -1)
    coded = codes.reshape(runs, -1)
    out = np.zeros((runs, length), np.uint16)
    first = offset = 0
    for start, groups, size in cuts(length, group):
        nbytes = code_nbytes(kind, size)
        lane = coded[:, offset : offset + groups * nbytes].reshape(-1, nbytes)
        columns = [table[:, first : first + groups, i].reshape(-1) for i in range(table.shape[2])]
        values = _decode_lanes(columns, lane, size, kind, view.dtype)
        out[:, start : start + groups * size] = values.reshape(runs, -1)
        first, offset = first + groups, offset + groups * nbytes
    used = 0
    for run, number in np.argwhere(table[:, :, 0] == _KEPT):
        piece = out[run, number * group : (number + 1) * group]
        used = _take_kept(kept, used, piece)
    return out, used


def _take_kept(kept: ByteArray, at: int, piece: U16) -> int:
    end = at + 2 * piece.size
    if end > len(kept):
        raise CorruptBlockError(DAMAGED)
    piece[:] = np.frombuffer(kept[at:end].tobytes(), "<u2")
    return end


# -- by channel ----------------------------------------------------------------------------------------


def _encode_channels(rows: U16, kind: int, group: int, dtype: int) -> tuple[list[ByteArray], int]:
    parameters: list[ByteArray] = []
    codes: list[ByteArray] = []
    raw: list[ByteArray] = []
    for at in range(0, len(rows), group):
        columns = np.ascontiguousarray(rows[at : at + group].T)
        lane = _encode_lanes(columns, kind, dtype, anchored=at == 0)
        parameters += [p.astype("<u2").view(np.uint8) for p in lane.parameters]
        codes.append(np.ascontiguousarray(lane.codes.T))
        raw += [columns[c].view(np.uint8) for c in np.flatnonzero(lane.kept)]
    return [*parameters, *codes, *raw], len(raw)


def _decode_channels(
    view: TensorView, kind: int, group: int, parameters: U16, codes: ByteArray, kept: ByteArray
) -> tuple[U16, int]:
    rows, cols = view.rows * view.count, view.cols
    width = cols * parameters_of(kind)
    out = np.zeros((rows, cols), np.uint16)
    at = used = 0
    for number, row in enumerate(range(0, rows, group)):
        size = min(group, rows - row)
        table = parameters[number * width : (number + 1) * width].reshape(-1, cols)
        nbytes = code_nbytes(kind, size) * cols
        lane = np.ascontiguousarray(codes[at : at + nbytes].reshape(-1, cols).T)
        at += nbytes
        block = _decode_lanes(list(table), lane, size, kind, view.dtype)
        for column in np.flatnonzero(table[0] == _KEPT):
            used = _take_kept(kept, used, block[column])
        out[row : row + size] = block.T
    return out, used
