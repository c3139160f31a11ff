"""int8, int4 and fp8 in torch; ``native/quant.h`` describes the section."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from kvferry.codecs.device.view import (
    DAMAGED,
    DeviceView,
    head_of,
    load_raw,
    parse_header,
    store_raw,
    to_bytes,
    value_of,
)
from kvferry.codecs.fallback.quant import code_nbytes, cuts, parameters_of, sizes_of, valid
from kvferry.codecs.fallback.view import RAW, SECTION_NBYTES
from kvferry.codecs.kernels import FP8, FP8_PLAIN, INT4, INT8, INT8_RANGE, TOKEN
from kvferry.core.errors import CorruptBlockError

__all__ = ["quant_decode", "quant_encode"]

_KEPT: Final = 0xFFFF
_LEVELS: Final = {INT8: 127.0, FP8: 448.0, INT4: 15.0, INT8_RANGE: 255.0}


class _Lanes(NamedTuple):
    """Groups after encoding, one a row: bits of the parameters, codes as bytes, and which are kept."""

    parameters: list[torch.Tensor]
    codes: torch.Tensor
    kept: torch.Tensor


def quant_encode(view: DeviceView, kind: int, axis: int, group: int) -> torch.Tensor:
    """The section."""
    raw = SECTION_NBYTES + view.count * view.nbytes
    if not valid(view, kind, axis, group):
        return store_raw(view)
    if SECTION_NBYTES + sum(sizes_of(view, kind, axis, group)) > raw:
        return store_raw(view)
    elements = view.load()
    if kind == FP8_PLAIN:
        if int((elements & 0x7FFF).max()) > (0x5F00 if view.dtype else 0x43E0):
            return store_raw(view)
        parts, count = [_fp8_of(value_of(elements, view.dtype)).reshape(-1)], 0
    elif axis == TOKEN:
        parts, count = _encode_tokens(elements.view(-1, view.last), kind, group, view.dtype)
    else:
        parts, count = _encode_channels(elements.view(-1, view.cols), kind, group, view.dtype)
    found = torch.cat([head_of(view, kind, axis, group, count), *parts])
    return found if found.numel() <= raw else store_raw(view)


def quant_decode(view: DeviceView, kind: int, src: torch.Tensor) -> int:
    """Read a section; its size.

    Raises:
        CorruptBlockError: If it cannot be decoded.
    """
    mode, axis, group, _ = parse_header(src)
    if mode == RAW:
        return load_raw(view, src)
    if mode != kind or not valid(view, kind, axis, group):
        raise CorruptBlockError(DAMAGED)
    sizes = sizes_of(view, kind, axis, group)
    at = SECTION_NBYTES + sizes.parameters
    end = at + sizes.codes
    if src.numel() < end:
        raise CorruptBlockError(DAMAGED)
    shape = (view.count, view.rows, view.cols)
    if kind == FP8_PLAIN:
        view.store(_of_value(_fp8_value(src[at:end]), view.dtype).view(shape))
        return end
    parameters = src[SECTION_NBYTES:at].clone().view(torch.int16).to(torch.int32) & 0xFFFF
    decode = _decode_tokens if axis == TOKEN else _decode_channels
    elements, used = decode(view, kind, group, parameters, src[at:end], src[end:])
    view.store(elements.view(shape))
    return end + used


# -- numbers -------------------------------------------------------------------------------------------


def _bf16_of(values: torch.Tensor) -> torch.Tensor:
    bits = values.view(torch.int32)
    return (bits + (0x7FFF + (bits >> 16 & 1))) >> 16 & 0xFFFF


def _bf16_above(values: torch.Tensor) -> torch.Tensor:
    return (values.view(torch.int32) + 0xFFFF) >> 16


def _of_value(values: torch.Tensor, dtype: int) -> torch.Tensor:
    if dtype:
        return values.clamp(-65504, 65504).to(torch.float16).view(torch.int16).to(torch.int32)
    return _bf16_of(values)


def _fp8_of(values: torch.Tensor) -> torch.Tensor:
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    below = (magnitude.view(torch.float32) + 2.0**14).view(torch.int32) - 0x46800000
    normal = (((magnitude + (0x7FFFF + (magnitude >> 20 & 1))) >> 20) - (120 << 3)).clamp(max=0x7E)
    found = torch.where(magnitude < 0x3C800000, below, normal)
    return (found | (bits >> 24 & 0x80)).to(torch.uint8)


def _fp8_value(raw: torch.Tensor) -> torch.Tensor:
    wide = raw.to(torch.int32)
    return (wide << 24 & -0x80000000 | (wide & 0x7F) << 20).view(torch.float32) * 2.0**120


def _sortable(bits: torch.Tensor) -> torch.Tensor:
    """Numbers in the order of the values."""
    return torch.where(bits >= 0x8000, (bits ^ 0x7FFF) - 0x10000, bits)


def _unsortable(order: torch.Tensor) -> torch.Tensor:
    return torch.where(order < 0, (order + 0x10000) ^ 0x7FFF, order)


# -- groups --------------------------------------------------------------------------------------------


def _encode_lanes(raw: torch.Tensor, kind: int, dtype: int, *, anchored: bool = False) -> _Lanes:
    if kind in (INT4, INT8_RANGE):
        return _encode_range(raw, kind, dtype, anchored and kind == INT4)
    top = (raw & 0x7FFF).amax(dim=1)
    kept = top >= 0x7C00 if dtype else (top != 0) & ((top < 0x0880) | (top >= 0x7E80))
    zero = (top == 0) | kept
    largest = torch.where(zero, 1.0, value_of(torch.where(zero, 0, top), dtype))
    scale = torch.where(zero, 0, _bf16_above(largest / _LEVELS[kind]))
    inverse = torch.where(zero, 0.0, 1.0 / value_of(scale, 0))
    scaled = value_of(torch.where(kept[:, None], 0, raw), dtype) * inverse[:, None]
    codes = (
        scaled.round().clamp(-127, 127).to(torch.int8).view(torch.uint8) if kind == INT8 else _fp8_of(scaled)
    )
    return _Lanes([torch.where(kept, _KEPT, scale)], torch.where(kept[:, None], 0, codes), kept)


def _encode_range(raw: torch.Tensor, kind: int, dtype: int, anchored: bool) -> _Lanes:
    order = _sortable(raw)
    low, high = _unsortable(order.amin(dim=1)), _unsortable(order.amax(dim=1))
    limit = 0x7C00 if dtype else 0x7E80
    kept = ((low & 0x7FFF) >= limit) | ((high & 0x7FFF) >= limit)
    lowest, highest = (value_of(torch.where(kept, 0, x), dtype) for x in (low, high))
    span = highest - lowest
    kept = kept | ((span != 0) & (span < 2.0**-100))
    share = span / _LEVELS[kind]
    step = _bf16_of(share) if kind == INT4 else _bf16_above(share)
    flat = (span == 0) | kept
    inverse = torch.where(flat, 0.0, 1.0 / value_of(step, 0))
    values = value_of(torch.where(kept[:, None], 0, raw), dtype)
    if anchored:
        low = torch.where(flat, low, _anchored(low, values[:, 0], value_of(step, 0), inverse, dtype))
        lowest = value_of(torch.where(kept, 0, low), dtype)
    scaled = (values - torch.where(kept, 0.0, lowest)[:, None]) * inverse[:, None]
    codes = scaled.round().clamp(0, _LEVELS[kind]).to(torch.uint8)
    packed = codes[:, : code_nbytes(kind, raw.shape[1])].clone()
    if kind == INT4:
        half = packed.shape[1]
        packed[:, : raw.shape[1] - half] |= codes[:, half:] << 4
    packed[kept] = 0
    return _Lanes([torch.where(kept, _KEPT, step), torch.where(kept, 0, low)], packed, kept)


def _anchored(
    low: torch.Tensor, values: torch.Tensor, step: torch.Tensor, inverse: torch.Tensor, dtype: int
) -> torch.Tensor:
    """As ``anchored`` of the native library, for the first element of each group."""
    above = ((values - value_of(low, dtype)) * inverse).round() * step
    moved = _of_value(values - above, dtype)
    off = value_of(moved, dtype) + above - values
    return torch.where((off <= step * 0.125) & (-off <= step * 0.125), moved, low)


def _decode_lanes(
    parameters: list[torch.Tensor], codes: torch.Tensor, length: int, kind: int, dtype: int
) -> torch.Tensor:
    scale = value_of(parameters[0], 0)[:, None]
    if kind in (INT4, INT8_RANGE):
        lowest = value_of(parameters[1], dtype)[:, None]
        wide = codes
        if kind == INT4:
            wide = torch.cat([codes & 15, codes[:, : length - codes.shape[1]] >> 4], dim=1)
        return _of_value(wide.to(torch.float32) * scale + lowest, dtype)
    values = codes.view(torch.int8).to(torch.float32) if kind == INT8 else _fp8_value(codes)
    return _of_value(values * scale, dtype)


# -- by token ------------------------------------------------------------------------------------------


def _spread(kept: torch.Tensor, length: int, group: int) -> torch.Tensor:
    """Which elements of runs are in the groups that are kept."""
    return kept.repeat_interleave(group, dim=1)[:, :length]


def _encode_tokens(runs: torch.Tensor, kind: int, group: int, dtype: int) -> tuple[list[torch.Tensor], int]:
    count, length = runs.shape
    parameters, codes, masks = [], [], []
    for start, groups, size in cuts(length, group):
        lane = _encode_lanes(runs[:, start : start + groups * size].reshape(-1, size), kind, dtype)
        parameters.append(torch.stack(lane.parameters, dim=1).view(count, groups, -1))
        codes.append(lane.codes.view(count, -1))
        masks.append(lane.kept.view(count, groups))
    kept = torch.cat(masks, dim=1)
    raw = runs[_spread(kept, length, group)]
    planes = [to_bytes(torch.cat(parameters, dim=1)), torch.cat(codes, dim=1).view(-1), to_bytes(raw)]
    return planes, int(kept.sum())


def _decode_tokens(
    view: DeviceView, kind: int, group: int, parameters: torch.Tensor, codes: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, int]:
    length = view.last
    runs = view.count * view.nbytes // 2 // length
    table = parameters.view(runs, -(-length // group), -1)
    coded = codes.view(runs, -1)
    out = torch.zeros((runs, length), dtype=torch.int32, device=codes.device)
    first = offset = 0
    for start, groups, size in cuts(length, group):
        nbytes = code_nbytes(kind, size)
        lane = coded[:, offset : offset + groups * nbytes].reshape(-1, nbytes)
        columns = [table[:, first : first + groups, i].reshape(-1) for i in range(table.shape[2])]
        values = _decode_lanes(columns, lane, size, kind, view.dtype)
        out[:, start : start + groups * size] = values.view(runs, -1)
        first, offset = first + groups, offset + groups * nbytes
    return out, _restore(out, _spread(table[:, :, 0] == _KEPT, length, group), kept)


def _restore(out: torch.Tensor, mask: torch.Tensor, kept: torch.Tensor) -> int:
    """Put the kept elements in place; their bytes."""
    nbytes = 2 * int(mask.sum())
    if kept.numel() < nbytes:
        raise CorruptBlockError(DAMAGED)
    out[mask] = kept[:nbytes].clone().view(torch.int16).to(torch.int32) & 0xFFFF
    return nbytes


# -- by channel ----------------------------------------------------------------------------------------


def _encode_channels(rows: torch.Tensor, kind: int, group: int, dtype: int) -> tuple[list[torch.Tensor], int]:
    parameters, codes, raw, count = [], [], [], 0
    for at in range(0, rows.shape[0], group):
        columns = rows[at : at + group].T.contiguous()
        lane = _encode_lanes(columns, kind, dtype, anchored=at == 0)
        parameters += [to_bytes(p) for p in lane.parameters]
        codes.append(lane.codes.T.reshape(-1))
        raw.append(to_bytes(columns[lane.kept]))
        count += int(lane.kept.sum())
    return [*parameters, *codes, *raw], count


def _decode_channels(
    view: DeviceView, kind: int, group: int, parameters: torch.Tensor, codes: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, int]:
    rows, cols = view.rows * view.count, view.cols
    width = cols * parameters_of(kind)
    out = torch.zeros((rows, cols), dtype=torch.int32, device=codes.device)
    at = used = 0
    for number, row in enumerate(range(0, rows, group)):
        size = min(group, rows - row)
        table = parameters[number * width : (number + 1) * width].view(-1, cols)
        nbytes = code_nbytes(kind, size) * cols
        lane = codes[at : at + nbytes].view(-1, cols).T.contiguous()
        at += nbytes
        block = _decode_lanes(list(table), lane, size, kind, view.dtype)
        mask = (table[0] == _KEPT)[:, None].expand(cols, size)
        used += _restore(block, mask, kept[used:])
        out[row : row + size] = block.T
    return out, used
