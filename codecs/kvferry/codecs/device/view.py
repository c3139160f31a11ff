"""One tensor of several layer slices on a device, and the headers of sections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvferry.codecs.fallback.view import DAMAGED, RAW, SECTION_NBYTES, header
from kvferry.codecs.fallback.view import parse_header as parse_on_host
from kvferry.codecs.kernels import Piece
from kvferry.core.errors import CorruptBlockError

__all__ = ["DAMAGED", "DeviceView", "head_of", "load_raw", "parse_header", "store_raw", "value_of"]


@dataclass(frozen=True, slots=True)
class DeviceView:
    """As :class:`kvferry.codecs.fallback.view.TensorView`, over a tensor ``[count, bytes of a slice]``."""

    data: torch.Tensor
    offset: int
    nbytes: int
    rows: int
    cols: int
    last: int
    dtype: int

    @classmethod
    def of(cls, data: torch.Tensor, piece: Piece) -> DeviceView:
        """The part of ``data`` that is ``piece``."""
        return cls(data, piece.offset, piece.nbytes, piece.rows, piece.cols, piece.last, piece.dtype)

    @property
    def count(self) -> int:
        """Slices."""
        return self.data.shape[0]

    @property
    def bytes(self) -> torch.Tensor:
        """The bytes, ``[count, nbytes]``, a view."""
        return self.data[:, self.offset : self.offset + self.nbytes]

    def load(self) -> torch.Tensor:
        """The bits of the elements as int32, ``[count, rows, cols]``."""
        flat = self.bytes.contiguous().view(-1).view(torch.int16).to(torch.int32) & 0xFFFF
        return flat.view(self.count, self.rows, self.cols)

    def store(self, elements: torch.Tensor) -> None:
        """Put the bits of ``elements`` in place."""
        self.bytes.copy_(to_bytes(elements).view(self.count, self.nbytes))


def to_bytes(bits: torch.Tensor) -> torch.Tensor:
    """The lower 16 bits of each element, as bytes."""
    return bits.to(torch.int16).contiguous().view(-1).view(torch.uint8)


def value_of(bits: torch.Tensor, dtype: int) -> torch.Tensor:
    """Values of bfloat16 (``dtype`` 0) or float16 (1) bits."""
    if dtype:
        return bits.to(torch.int16).view(torch.float16).to(torch.float32)
    return (bits << 16).view(torch.float32)


def head_of(view: DeviceView, mode: int, parameter: int = 0, small: int = 0, number: int = 0) -> torch.Tensor:
    """The eight bytes at the start of a section."""
    raw = torch.frombuffer(bytearray(header(mode, parameter, small, number)), dtype=torch.uint8)
    return raw.to(view.data.device)


def parse_header(src: torch.Tensor) -> tuple[int, int, int, int]:
    """Mode, parameter, small and large number; waits for the device."""
    return parse_on_host(np.ascontiguousarray(src[:SECTION_NBYTES].cpu().numpy()))


def store_raw(view: DeviceView) -> torch.Tensor:
    """A section that holds the bytes as they are."""
    return torch.cat([head_of(view, RAW), view.bytes.reshape(-1)])


def load_raw(view: DeviceView, src: torch.Tensor) -> int:
    """Read such a section; its size.

    Raises:
        CorruptBlockError: If ``src`` is too short or another section.
    """
    end = SECTION_NBYTES + view.count * view.nbytes
    if parse_header(src)[0] != RAW or src.numel() < end:
        raise CorruptBlockError(DAMAGED)
    view.bytes.copy_(src[SECTION_NBYTES:end].view(view.count, view.nbytes))
    return end
