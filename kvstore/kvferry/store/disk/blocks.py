"""One block from and to its file: straight between the caller's memory and the device, checked on the way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import xxhash

from kvferry.core.buffers import address_of, copy_into, page_aligned
from kvferry.core.errors import CorruptBlockError
from kvferry.core.keys import BlockKey
from kvferry.store.disk.encoded import Stored, read_encoded
from kvferry.store.disk.files import Files, read_parts, write_parts
from kvferry.store.disk.header import (
    ALIGNMENT,
    BlockHeader,
    HeaderTemplate,
    header_length,
    parse_header,
)
from kvferry.store.disk.identity import require_checksum, require_identity
from kvferry.store.encoding import LOSSY_REASON, Decoded, TierCodec
from kvferry.store.tier import ReadOutcome, TierNamespace

__all__ = [
    "BlockReader",
    "Scratch",
    "Stored",
    "is_aligned",
    "lay_out",
    "read_header",
    "read_header_bytes",
    "scratch",
    "write_whole",
]

_EMPTY: Final = memoryview(b"")
_ZEROS: Final = memoryview(bytes(ALIGNMENT))
_SHORT: Final = 8
_TAIL_NBYTES: Final = 2 * ALIGNMENT


class Scratch(threading.local):
    """Page-aligned memory of each thread for a few headers, and for the last, partial pages of the data.

    Attributes:
        pages: For headers.
        tails: As many pairs of pages.
        page_addresses: Where the pages are.
        tail_addresses: Where the tails are.
    """

    def __init__(self) -> None:
        self._header_nbytes = 0
        self._memory = _EMPTY
        self.pages: list[memoryview] = []
        self.tails: list[memoryview] = []
        self.page_addresses: range = range(0)
        self.tail_addresses: range = range(0)

    def provide(self, header_nbytes: int, count: int) -> None:
        """See that there are ``count`` of each. What was there before is no longer valid."""
        if header_nbytes != self._header_nbytes or count > len(self.pages):
            end = count * header_nbytes
            nbytes = end + count * _TAIL_NBYTES
            if len(self._memory) < nbytes:
                self._memory = page_aligned(nbytes)
            memory, start, self._header_nbytes = self._memory, address_of(self._memory), header_nbytes
            self.pages = [memory[at : at + header_nbytes] for at in range(0, end, header_nbytes)]
            self.tails = [memory[at : at + _TAIL_NBYTES] for at in range(end, nbytes, _TAIL_NBYTES)]
            self.page_addresses = range(start, start + end, header_nbytes)
            self.tail_addresses = range(start + end, start + nbytes, _TAIL_NBYTES)


_scratch = Scratch()


def scratch(template: HeaderTemplate, count: int) -> Scratch:
    """This thread's memory beside ``count`` blocks that it reads or writes next."""
    _scratch.provide(template.header_nbytes, count)
    return _scratch


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT takes ``view``, but for its length."""
    return address_of(view) % ALIGNMENT == 0


def lay_out(
    template: HeaderTemplate,
    header: bytes,
    data: memoryview,
    page: memoryview,
    last: memoryview,
    *,
    direct: bool,
) -> list[memoryview]:
    """The parts of a file, in order.

    Args:
        template: Of the namespace.
        header: As it makes it.
        data: The block; with ``direct`` it must be aligned.
        page: Memory for the header, from :func:`scratch`; used with ``direct``.
        last: A page or more for the end of the data, likewise.
        direct: Whether the parts must be fit for O_DIRECT.
    """
    rest = template.rest_nbytes
    if not direct:
        return [memoryview(header), data, _ZEROS[rest:]] if rest else [memoryview(header), data]
    page[:] = header
    if not rest:
        return [page, data]
    last = last[:ALIGNMENT]
    last[:rest] = data[-rest:]
    last[rest:] = _ZEROS[rest:]
    return [page, data[:-rest], last]


def write_whole(files: Files, fd: int, parts: Sequence[memoryview], nbytes: int) -> None:
    """Write a whole file of ``nbytes``.

    Raises:
        OSError: If it could not be written whole.
    """
    done = files.pwritev(fd, parts, 0)
    if done != nbytes:
        write_parts(files, fd, parts, done)


def read_header(files: Files, fd: int) -> BlockHeader:
    """Read and parse the header of an open file; errors as :func:`read_header_bytes`."""
    return parse_header(read_header_bytes(files, fd))


def read_header_bytes(files: Files, fd: int) -> bytes:
    """Read the header of an open file.

    Raises:
        CorruptBlockError: If it is none.
        OSError: If it cannot be read.
    """
    start = bytearray(_SHORT)
    got = read_parts(files, fd, [memoryview(start)])
    nbytes = header_length(bytes(start[:got]))
    if nbytes > files.status(fd).st_size:
        raise CorruptBlockError(f"the file is shorter than its header of {nbytes} bytes")
    header = bytearray(nbytes)
    got = read_parts(files, fd, [memoryview(header)])
    return bytes(header[:got])


class BlockReader:
    """Reads and checks blocks of one namespace.

    Args:
        files: System calls.
        namespace: Whose blocks, and of what shape.
        template: What their headers look like.
        codec: Decodes those that are encoded.
    """

    def __init__(
        self, files: Files, namespace: TierNamespace, template: HeaderTemplate, codec: TierCodec
    ) -> None:
        self._files = files
        self._codec = codec
        self._namespace = namespace
        self._template = template

    def scratch(self, count: int) -> Scratch:
        """This thread's memory for the headers of ``count`` blocks, and for what is behind the data."""
        return scratch(self._template, count)

    def fetch(
        self, fd: int, into: memoryview, page: memoryview, last: memoryview, *, direct: bool
    ) -> int | None:
        """Read a file that is just as the template makes it, in one call; :meth:`check` is to follow.

        Args:
            fd: The file.
            into: As long as a block; aligned with ``direct``.
            page: For its header; from :meth:`scratch`, as ``last`` is.
            last: For what lies behind the data: so much that a file which is too long shows.
            direct: Whether the file was opened with O_DIRECT.

        Returns:
            The checksum of the data; ``None`` if the file is of another length, which says nothing bad yet.

        Raises:
            OSError: If it cannot be read.
        """
        template = self._template
        rest = template.rest_nbytes
        if not rest:
            views = [page, into, last[:ALIGNMENT]]
        elif direct:
            views = [page, into[:-rest], last]
        else:
            views = [page, into, last[rest:]]
        if self._files.preadv(fd, views, 0) != template.file_nbytes:
            return None
        if direct:
            self.join(into, last)
        return xxhash.xxh3_64_intdigest(into)

    def join(self, into: memoryview, last: memoryview) -> None:
        """Put the end of the data, which was read to ``last`` if it ends within a page, where it belongs."""
        if rest := self._template.rest_nbytes:
            copy_into(into[-rest:], last[:rest])

    def check(self, page: memoryview, key: BlockKey, checksum: int) -> Stored | None:
        """Compare a header with what :meth:`fetch` found; ``None`` if it is not as the template makes it.

        Raises:
            CorruptBlockError: If the data is not what the header says.
        """
        found = self._template.check(bytes(page), key)
        if found is None:
            return None
        require_checksum(checksum, found[2])
        return Stored(*found)

    def read(
        self, fd: int, nbytes: int, key: BlockKey, into: memoryview, deadline: float
    ) -> Stored | Decoded:
        """Read any block into ``into``, step by step, and compare everything.

        Args:
            fd: Its file, opened without O_DIRECT.
            nbytes: Size of that.
            key: What it has to be.
            into: As long as a block.
            deadline: Of the call, for decoding.

        Returns:
            Why not, if the block is sound and still of no use.

        Raises:
            CorruptBlockError: If the file is not that block, whole and unchanged.
            OSError: If it cannot be read.
        """
        found = read_encoded(
            self._files, fd, nbytes, key, into, self._namespace, self._template, self._codec, deadline
        )
        if found is not None:
            return found
        header = read_header(self._files, fd)
        require_identity(header, self._namespace, key)
        if nbytes != header.file_nbytes:
            raise CorruptBlockError(f"the file has {nbytes} bytes, its header speaks of {header.file_nbytes}")
        got = read_parts(self._files, fd, [into], header.header_nbytes)
        if got != len(into):
            raise CorruptBlockError(f"the data ends after {got} of {len(into)} bytes")
        require_checksum(xxhash.xxh3_64_intdigest(into), header.checksum)
        if not self._codec.takes(lossy=header.lossy):
            return Decoded(ReadOutcome.MISS, LOSSY_REASON, lossy=True)
        return Stored(header.parent, header.position, header.checksum, header.encoding)
