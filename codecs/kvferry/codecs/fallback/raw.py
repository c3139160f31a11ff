"""Sections that hold the elements as they are."""

from __future__ import annotations

import numpy as np

from kvferry.codecs.tensors import RAW, SECTION_NBYTES, TensorView, header
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import CorruptBlockError

__all__ = ["DAMAGED", "load_raw", "store_raw"]

DAMAGED = "an encoded tensor cannot be decoded: its section is damaged"


def store_raw(view: TensorView, dst: ByteArray) -> int:
    """Write the section; its size."""
    end = SECTION_NBYTES + view.count * view.nbytes
    dst[:SECTION_NBYTES] = np.frombuffer(header(RAW), np.uint8)
    dst[SECTION_NBYTES:end] = view.load().view(np.uint8).reshape(-1)
    return end


def load_raw(view: TensorView, src: ByteArray) -> int:
    """Read the section; its size.

    Raises:
        CorruptBlockError: If ``src`` is too short.
    """
    end = SECTION_NBYTES + view.count * view.nbytes
    if len(src) < end:
        raise CorruptBlockError(DAMAGED)
    elements = np.ascontiguousarray(src[SECTION_NBYTES:end]).view("<u2")
    view.store(elements.reshape(view.count, view.rows, view.cols))
    return end
