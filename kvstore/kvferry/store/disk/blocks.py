"""One block from and to its file: straight between the caller's memory and the device, checked on the way."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import xxhash

from kvferry.core.buffers import copy_into, page_aligned
from kvferry.core.errors import CorruptBlockError
from kvferry.core.keys import BlockKey
from kvferry.store.disk.files import DIRECT, Files, read_parts, write_parts
from kvferry.store.disk.header import (
    ALIGNMENT,
    BlockHeader,
    HeaderTemplate,
    header_length,
    parse_header,
    readable,
)
from kvferry.store.tier import TierNamespace

__all__ = ["BlockReader", "Stored", "is_aligned", "read_header", "require_identity", "write_block"]

_EMPTY: Final = memoryview(b"")
_SHORT: Final = 8


class Stored(NamedTuple):
    """What the header of a block says beside its identity, which was compared."""

    parent: BlockKey | None
    position: int
    checksum: int


class _Scratch(threading.local):
    """Page-aligned memory of each thread for a header and the last, partial page of data."""

    def __init__(self) -> None:
        self._memory = _EMPTY

    def take(self, header_nbytes: int) -> tuple[memoryview, memoryview]:
        if len(self._memory) < header_nbytes + ALIGNMENT:
            self._memory = page_aligned(header_nbytes + ALIGNMENT)
        return self._memory[:header_nbytes], self._memory[header_nbytes : header_nbytes + ALIGNMENT]


_scratch = _Scratch()


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT takes ``view``, but for its length."""
    if not len(view):
        return True
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return int(address) % ALIGNMENT == 0


def write_block(
    files: Files, fd: int, template: HeaderTemplate, header: bytes, data: memoryview, *, direct: bool
) -> None:
    """Write a whole file.

    Args:
        files: System calls.
        fd: The new file.
        template: Of the namespace.
        header: As it makes it.
        data: The block; with ``direct`` it must be aligned.
        direct: Whether the file was opened with O_DIRECT.

    Raises:
        OSError: If it could not be written whole.
    """
    whole = template.data_nbytes // ALIGNMENT * ALIGNMENT
    rest = template.data_nbytes - whole
    page, last = _scratch.take(template.header_nbytes)
    if rest:
        last[:rest] = data[whole:]
        last[rest:] = bytes(ALIGNMENT - rest)
    if direct:
        page[:] = header
    parts = [page if direct else memoryview(header), data[:whole], last if rest else _EMPTY]
    write_parts(files, fd, parts)


def read_header(files: Files, fd: int) -> BlockHeader:
    """Read and parse the header of an open file.

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
    return parse_header(bytes(header[:got]))


class BlockReader:
    """Reads and checks blocks of one namespace.

    Args:
        files: System calls.
        namespace: Whose blocks, and of what shape.
        template: What their headers look like.
    """

    def __init__(self, files: Files, namespace: TierNamespace, template: HeaderTemplate) -> None:
        self._files = files
        self._namespace = namespace
        self._template = template

    def read(self, fd: int, nbytes: int, key: BlockKey, into: memoryview, *, direct: bool) -> Stored:
        """Read a block into ``into`` and compare everything.

        Args:
            fd: Its file.
            nbytes: Size of that.
            key: What it has to be.
            into: As long as a block; aligned with ``direct``.
            direct: Whether the file was opened with O_DIRECT.

        Raises:
            CorruptBlockError: If the file is not that block, whole and unchanged.
            OSError: If it cannot be read.
        """
        stored = self._read_known(fd, nbytes, key, into, direct=direct)
        if stored is None:
            if direct:  # what follows has odd lengths
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~DIRECT)
            stored = self._read_any(fd, nbytes, key, into)
        found = xxhash.xxh3_64_intdigest(into)
        if found != stored.checksum:
            raise CorruptBlockError(f"the data's checksum is {found:016x}, stored {stored.checksum:016x}")
        return stored

    def _read_known(
        self, fd: int, nbytes: int, key: BlockKey, into: memoryview, *, direct: bool
    ) -> Stored | None:
        """In one call, header and data: for files just as the template makes them."""
        template = self._template
        if nbytes != template.file_nbytes:
            return None
        whole = template.data_nbytes // ALIGNMENT * ALIGNMENT
        rest = template.data_nbytes - whole
        page, last = _scratch.take(template.header_nbytes)
        views = [page, into[:whole], last if rest else _EMPTY] if direct else [page, into]
        wanted = template.file_nbytes if direct else template.header_nbytes + template.data_nbytes
        got = read_parts(self._files, fd, views)
        if got != wanted:
            raise CorruptBlockError(f"the file ends after {got} of {wanted} bytes")
        if direct and rest:
            copy_into(into[whole:], last[:rest])
        found = template.check(bytes(page), key)
        return None if found is None else Stored(*found)

    def _read_any(self, fd: int, nbytes: int, key: BlockKey, into: memoryview) -> Stored:
        header = read_header(self._files, fd)
        require_identity(header, self._namespace, key)
        if nbytes != header.file_nbytes:
            raise CorruptBlockError(f"the file has {nbytes} bytes, its header speaks of {header.file_nbytes}")
        got = read_parts(self._files, fd, [into], header.header_nbytes)
        if got != len(into):
            raise CorruptBlockError(f"the data ends after {got} of {len(into)} bytes")
        return Stored(header.parent, header.position, header.checksum)


def require_identity(header: BlockHeader, namespace: TierNamespace, key: BlockKey) -> None:
    """Compare who a header says it is with who it has to be.

    Raises:
        CorruptBlockError: If they differ.
    """
    pairs: Sequence[tuple[str, object, object]] = (
        ("key", header.key, key),
        ("namespace", header.namespace_id, namespace.namespace_id),
        ("fingerprint", header.fingerprint, namespace.spec.fingerprint()),
        ("tenant", header.tenant, readable(namespace.tenant)),
    )
    for what, found, wanted in pairs:
        if found != wanted:
            raise CorruptBlockError(f"the {what} in the header is {_show(found)}, not {_show(wanted)}")


def _show(value: object) -> str:
    return value.hex()[:16] + "…" if isinstance(value, bytes) else repr(value)
