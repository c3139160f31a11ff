"""One block out of a directory, as a file whose tensors are the block's own."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

import xxhash

from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CorruptBlockError, StoreError
from kvferry.store.disk.files import Files, read_parts
from kvferry.store.disk.header import BlockHeader, decoded_header
from kvferry.store.disk.header_fields import ENCODED, round_up
from kvferry.store.encoding import TierCodec
from kvferry.store.tier import ReadOutcome

__all__ = ["write_block"]

_CHUNK_NBYTES: Final = 4 << 20


def write_block(files: Files, fd: int, header: BlockHeader, target: str) -> None:
    """Copy a block that was verified to ``target``, which must not exist; decoded, if it is encoded.

    Raises:
        CorruptBlockError: If it cannot be decoded; nothing is written.
        StoreError: If that needs a codec that is not installed.
        OSError: If ``target`` cannot be written, or the block cannot be read.
    """
    if header.version != ENCODED:
        with os.fdopen(os.dup(fd), "rb") as source, Path(target).open("xb") as out:
            source.seek(0)
            while chunk := source.read(_CHUNK_NBYTES):
                out.write(chunk)
        return
    data, block = page_aligned(header.data_nbytes), page_aligned(header.spec.block_nbytes)
    if read_parts(files, fd, [data], header.header_nbytes) != len(data):
        raise CorruptBlockError("the file ends in its data")
    found = TierCodec(allow_lossy=True).decode(data, header.spec, block, deadline=math.inf)
    if found.outcome is not ReadOutcome.HIT:
        corrupt = found.outcome is ReadOutcome.CORRUPT
        raise CorruptBlockError(found.reason) if corrupt else StoreError(found.reason)
    with Path(target).open("xb") as out:
        out.write(decoded_header(header, xxhash.xxh3_64_intdigest(block)))
        out.write(block)
        out.write(bytes(round_up(len(block)) - len(block)))
