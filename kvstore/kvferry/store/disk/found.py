"""Which namespaces lie on disk; headers tell of those that nobody has used since the start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from kvferry.core.errors import CorruptBlockError
from kvferry.store.disk import names
from kvferry.store.disk.blocks import read_header
from kvferry.store.disk.entries import DiskEntry, NamespaceIndex
from kvferry.store.disk.files import open_quietly
from kvferry.store.disk.header import BlockHeader
from kvferry.store.disk.state import DiskState
from kvferry.store.tier import TierNamespace

__all__ = ["found_namespaces"]

_TRIES: Final = 8  # blocks of a namespace whose headers cannot be read, until it is given up


def found_namespaces(state: DiskState) -> list[TierNamespace]:
    """One for each namespace with blocks, if the tier was told of it or a header can be read."""
    found: list[TierNamespace] = []
    for home in state.index.namespaces():
        if not home.entries:
            continue
        if home.told is not None:
            found.append(home.told)
        else:
            header = next(_headers(state, home), None)
            if header is not None:
                found.append(replace(header.namespace(), tenant=home.tenant))
    return found


def _headers(state: DiskState, home: NamespaceIndex) -> Iterator[BlockHeader]:
    with state.index.lock:
        entries = list(islice(home.entries.values(), _TRIES))
    for entry in entries:
        header = _header(state, entry)
        if header is not None and header.namespace_id == home.namespace_id:
            yield header


def _header(state: DiskState, entry: DiskEntry) -> BlockHeader | None:
    try:
        folder = state.roots[entry.root].folder(entry.index.tenant, entry.index.namespace_id, entry.key)
        fd, _ = open_quietly(state.files, names.block_name(entry.key), folder.fd)
    except OSError:  # gone meanwhile, or the medium fails: another one may tell
        return None
    try:
        return read_header(state.files, fd)
    except (OSError, CorruptBlockError):
        return None
    finally:
        state.files.close(fd)
