"""Encoded blocks of a disk tier: through a codec to the parts of a file, and back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from kvferry.core.errors import CorruptBlockError, TierError
from kvferry.core.keys import BlockKey
from kvferry.store.disk import names
from kvferry.store.disk.encoded_header import EncodedFields, encoded_nbytes
from kvferry.store.disk.entries import DiskEntry
from kvferry.store.disk.files import Files, read_parts
from kvferry.store.disk.header import HeaderTemplate, header_length, parse_header
from kvferry.store.disk.header_fields import ALIGNMENT, ENCODED
from kvferry.store.disk.identity import require_checksum, require_identity
from kvferry.store.encoded_block import Encoding, Memory
from kvferry.store.encoding import LOSSY_REASON, Decoded, TierCodec
from kvferry.store.tier import ReadOutcome, TierNamespace, WriteOutcome, WriteResult

if TYPE_CHECKING:
    from kvferry.store.disk.write_job import WriteJob

__all__ = ["Stored", "encode_job", "lay_out_encoded", "may_be_encoded", "read_encoded"]

_ZEROS: Final = memoryview(bytes(ALIGNMENT))
_pages, _file = Memory(), Memory()


class Stored(NamedTuple):
    """What the header of a block says beside its identity, which was compared."""

    parent: BlockKey | None
    position: int
    checksum: int
    encoding: Encoding | None = None


# -- the way down --------------------------------------------------------------------------------------


def encode_job(
    codec: TierCodec, namespace: TierNamespace, template: HeaderTemplate, job: WriteJob, deadline: float
) -> WriteResult | None:
    """Encode the block of a job, where that is configured and makes its file smaller.

    What it is encoded into is valid until the thread encodes the next block.

    Returns:
        A result if it cannot be stored.
    """
    job.asked = True
    block, headers = job.block, template.encoded
    if block.lossy and not codec.takes(lossy=True):
        return WriteResult(WriteOutcome.REFUSED, "it has lost something in another tier; no loss is allowed")
    most = template.file_nbytes - headers.most_nbytes - ALIGNMENT
    try:
        found = codec.encode(block.data, namespace.spec, lossy=block.lossy, most=most, deadline=deadline)
    except TierError as error:
        return WriteResult(WriteOutcome.FAILED, str(error))
    if found is None:
        return None
    checksum = xxhash.xxh3_64_intdigest(found.data)
    fields = EncodedFields(block.parent, block.position, checksum, found.encoding, found.sizes)
    job.encoded, job.encoding = found.data, found.encoding
    job.header = headers.build(block.key, fields)
    job.nbytes = headers.file_nbytes(len(job.header), found.sizes)
    job.name = names.block_name(block.key)
    return None


def lay_out_encoded(job: WriteJob, *, direct: bool) -> None:
    """The parts of a file, in order; with ``direct`` fit for O_DIRECT, in memory of the thread."""
    data, header = job.encoded, job.header
    assert data is not None  # else it is laid out otherwise
    rest = len(data) % ALIGNMENT
    if not direct:
        job.parts = [memoryview(header), data, *([_ZEROS[rest:]] if rest else [])]
        return
    pages = _pages.take(len(header) + ALIGNMENT)
    page, last = pages[: len(header)], pages[len(header) :]
    page[:] = header
    if rest:
        last[:rest], last[rest:] = data[-rest:], _ZEROS[rest:]
    job.parts = [page, data[: len(data) - rest], *([last] if rest else [])]


# -- the way up ----------------------------------------------------------------------------------------


def may_be_encoded(entry: DiskEntry | None, template: HeaderTemplate) -> bool:
    """Whether a file is not to be read as one that holds a block as it is."""
    if entry is None:
        return False
    return entry.encoding is not None or (not entry.verified and entry.nbytes < template.file_nbytes)


def read_encoded(
    files: Files,
    fd: int,
    nbytes: int,
    key: BlockKey,
    into: memoryview,
    namespace: TierNamespace,
    template: HeaderTemplate,
    codec: TierCodec,
    deadline: float,
) -> Stored | Decoded | None:
    """Read an encoded block of ``nbytes``, header and all, by one call, and decode it.

    Returns:
        Why not, if it is sound and still of no use; ``None`` if the file holds no encoded block.

    Raises:
        CorruptBlockError: If it is not that block, whole and unchanged.
        OSError: If it cannot be read.
    """
    headers = template.encoded
    if nbytes > headers.most_file_nbytes:
        return None
    memory, began = _file.take(nbytes), time.monotonic()
    if read_parts(files, fd, [memory]) != nbytes:
        raise CorruptBlockError(f"the file ends before its {nbytes} bytes")
    took = time.monotonic() - began
    header_nbytes = header_length(bytes(memory[:8]))
    if header_nbytes > nbytes:
        raise CorruptBlockError(f"the file is shorter than its header of {header_nbytes} bytes")
    header = bytes(memory[:header_nbytes])
    found = headers.check(header, key)
    if found is None:
        parsed = parse_header(header)
        if parsed.version != ENCODED or parsed.encoding is None:
            return None
        require_identity(parsed, namespace, key)
        found = EncodedFields(parsed.parent, parsed.position, parsed.checksum, parsed.encoding, parsed.sizes)
    wanted = headers.file_nbytes(header_nbytes, found.sizes)
    if nbytes != wanted:
        raise CorruptBlockError(f"the file has {nbytes} bytes, its header speaks of {wanted}")
    codec.carried("read", nbytes, took)
    data = memory[header_nbytes : header_nbytes + encoded_nbytes(found.sizes)]
    require_checksum(xxhash.xxh3_64_intdigest(data), found.checksum)
    lossy = found.encoding.lossy
    if not codec.takes(lossy=lossy):
        return Decoded(ReadOutcome.MISS, LOSSY_REASON, lossy=True)
    decoded = codec.decode(data, namespace.spec, into, deadline=deadline)
    if decoded.outcome is ReadOutcome.CORRUPT:
        raise CorruptBlockError(decoded.reason)
    if decoded.outcome is not ReadOutcome.HIT:
        return decoded
    encoding = found.encoding._replace(lossy=lossy or decoded.lossy)
    return Stored(found.parent, found.position, found.checksum, encoding)
