"""Exponent packing in torch; ``native/ebp.h`` describes the section."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import pad

from kvferry.codecs.device.view import (
    DAMAGED,
    DeviceView,
    head_of,
    load_raw,
    parse_header,
    store_raw,
)
from kvferry.codecs.fallback.view import RAW, SECTION_NBYTES
from kvferry.core.errors import CorruptBlockError

__all__ = ["ebp_decode", "ebp_encode"]

_SAMPLES: Final = 32
_GROUP: Final = 32


def ebp_encode(view: DeviceView, bits: int) -> torch.Tensor:
    """The section."""
    total, raw = view.count * view.nbytes // 2, SECTION_NBYTES + view.count * view.nbytes
    if not total or SECTION_NBYTES + view.cols > raw:
        return store_raw(view)
    elements = view.load()
    exponents = (elements >> 10 & 31) if view.dtype else (elements >> 7 & 255)
    base, chosen = _base_and_bits(exponents.view(-1, view.cols))
    bits = bits or chosen
    fixed = SECTION_NBYTES + view.cols + _plane_nbytes(view, bits)
    limit = (1 << bits) - 1
    offsets = ((base - exponents) & 255).clamp(max=limit)
    escaped = offsets == limit
    counts = _groups(escaped.to(torch.int32), view).sum(dim=1)
    before = counts.cumsum(0) - counts
    if fixed > raw or bool(((counts > 0) & (before + _GROUP > raw - fixed)).any()):
        return store_raw(view)
    escapes = exponents[escaped]
    parts = [base, ((elements << 1 | elements >> 15) & 255).view(-1)]
    if view.dtype:
        parts.append(_pack3(_groups(elements >> 7 & 7, view)))
    parts += [(_pack3 if bits == 3 else _pack4)(_groups(offsets, view)), escapes]
    return torch.cat([head_of(view, bits, number=escapes.numel()), *(p.to(torch.uint8) for p in parts)])


def ebp_decode(view: DeviceView, src: torch.Tensor) -> int:
    """Read a section; its size.

    Raises:
        CorruptBlockError: If it cannot be decoded.
    """
    bits, _, _, count = parse_header(src)
    if bits == RAW:
        return load_raw(view, src)
    total = view.count * view.nbytes // 2
    end = SECTION_NBYTES + view.cols + (_plane_nbytes(view, bits) if bits in (3, 4) else 0)
    if bits not in (3, 4) or not total or src.numel() < end + count:
        raise CorruptBlockError(DAMAGED)
    at = SECTION_NBYTES + view.cols
    base = src[SECTION_NBYTES:at].to(torch.int32)
    low = src[at : at + total].to(torch.int32).view(view.count, view.rows, view.cols)
    at += total
    groups = view.count * _group_count(view)
    small = src[at : at + 12 * groups] if view.dtype else src[:0]
    at += small.numel()
    packed = src[at : at + 4 * bits * groups]
    offsets = _elements((_unpack3 if bits == 3 else _unpack4)(packed), view)
    exponents = (base - offsets) & 255
    escaped = offsets == (1 << bits) - 1
    if int(escaped.sum()) != count:
        raise CorruptBlockError("an encoded tensor cannot be decoded: its escapes do not fit its offsets")
    exponents[escaped] = src[end : end + count].to(torch.int32)
    if view.dtype:
        exponents = (exponents << 3 | _elements(_unpack3(small), view)) & 255
    view.store((low & 1) << 15 | exponents << 7 | low >> 1)
    return end + count


def _base_and_bits(exponents: torch.Tensor) -> tuple[torch.Tensor, int]:
    rows = exponents.shape[0]
    samples = min(rows, _SAMPLES)
    numbers = (torch.arange(samples, device=exponents.device) * rows + rows // 2) // samples
    sampled = exponents[numbers]
    base = sampled.amax(dim=0)
    offsets = base - sampled
    out3, out4 = torch.stack([(offsets >= 7).sum(), (offsets >= 15).sum()]).tolist()
    seen = sampled.numel()
    return base, 3 if 3 * seen + 8 * out3 <= 4 * seen + 8 * out4 else 4


def _group_count(view: DeviceView) -> int:
    return -(-view.rows * view.cols // _GROUP)


def _plane_nbytes(view: DeviceView, bits: int) -> int:
    small = 12 if view.dtype else 0
    return view.count * (view.rows * view.cols + _group_count(view) * (small + 4 * bits))


def _groups(values: torch.Tensor, view: DeviceView) -> torch.Tensor:
    fill = _group_count(view) * _GROUP - view.rows * view.cols
    return pad(values.reshape(view.count, -1), (0, fill)).view(-1, _GROUP)


def _elements(groups: torch.Tensor, view: DeviceView) -> torch.Tensor:
    whole = groups.view(view.count, -1)[:, : view.rows * view.cols]
    return whole.reshape(view.count, view.rows, view.cols)


def _pack3(groups: torch.Tensor) -> torch.Tensor:
    shifts = 3 * torch.arange(8, dtype=torch.int32, device=groups.device)
    joined = (groups.reshape(-1, 8) << shifts).sum(dim=1, dtype=torch.int32)
    return torch.stack([joined & 255, joined >> 8 & 255, joined >> 16], dim=1).view(-1)


def _unpack3(packed: torch.Tensor) -> torch.Tensor:
    raw = packed.view(-1, 3).to(torch.int32)
    joined = raw[:, 0] | raw[:, 1] << 8 | raw[:, 2] << 16
    return (joined[:, None] >> (3 * torch.arange(8, dtype=torch.int32, device=packed.device)) & 7).view(-1)


def _pack4(groups: torch.Tensor) -> torch.Tensor:
    return (groups[:, :16] | groups[:, 16:] << 4).reshape(-1)


def _unpack4(packed: torch.Tensor) -> torch.Tensor:
    halves = packed.view(-1, 16).to(torch.int32)
    return torch.cat([halves & 15, halves >> 4], dim=1).view(-1)
