"""What lies in a remote store: told by its names, and counted once at the start for the bound of a tier."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Final

from kvferry.core.clock import deadline_in, time_left
from kvferry.core.errors import KVFerryError, TierError
from kvferry.core.keys import BlockKey
from kvferry.store.remote.backend import Backend, Done
from kvferry.store.remote.index import NAME_NBYTES, Held, RemoteIndex
from kvferry.store.remote.names import Names
from kvferry.store.remote.removal import remove_blocks
from kvferry.store.tier import UNKNOWN_PARENT, TierEntry

__all__ = ["Finder", "block_of", "entries_of", "known_entries"]

_log = logging.getLogger(__name__)

_LISTING_S: Final = 30.0
_FIND_S: Final = 300.0
_RETRY_S: Final = 5.0
_JOIN_S: Final = 5.0
_EVICT_AT_ONCE: Final = 256


def entries_of(
    names: Names, backend: Backend, tenants: Mapping[str, str], index: RemoteIndex
) -> Iterator[TierEntry]:
    """Every block of some tenants, each once; ``tenants`` by their part of a name.

    Raises:
        TierError: If the store cannot tell within 30 s.
    """
    seen: set[str] = set()
    for values in backend.listing(names.root, deadline_in(_LISTING_S)):
        for value in values:
            name = names.parse(value.name)
            if name is None or name.part or name.tenant not in tenants or name.base in seen:
                continue
            seen.add(name.base)
            nbytes = index.nbytes_of(name.base) or value.nbytes
            tenant = tenants[name.tenant]
            yield TierEntry(tenant, name.namespace_id, name.key, nbytes, UNKNOWN_PARENT, -1, verified=False)


def known_entries(names: Names, tenants: Mapping[str, str], index: RemoteIndex) -> Iterator[TierEntry]:
    """The blocks of some tenants that this process knows of, for stores that do not list what they hold."""
    for held in index.all():
        name = names.parse(held.name)
        if name is not None and name.tenant in tenants:
            tenant = tenants[name.tenant]
            yield TierEntry(
                tenant, name.namespace_id, name.key, held.nbytes, UNKNOWN_PARENT, -1, verified=False
            )


def block_of(names: Names, tenant: str, name: str) -> tuple[bytes, BlockKey] | None:
    """Namespace and key of a block by its manifest's name, if that has this tenant's part."""
    found = names.parse(name)
    if found is None or found.part or found.tenant != tenant:
        return None
    return found.namespace_id, found.key


class Finder:
    """Counts, in a thread of its own, what lies there at the start, and evicts what is above the bound.

    Args:
        tier: Name of the tier.
        names: Of the tier.
        backend: Where to look.
        index: Where to enter it.
    """

    def __init__(self, tier: str, names: Names, backend: Backend, index: RemoteIndex) -> None:
        self._tier = tier
        self._names = names
        self._backend = backend
        self._index = index
        self._closing = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-find-{tier}", daemon=True)
        self._thread.start()

    def wait(self, deadline: float) -> bool:
        """Wait until all is counted; ``False`` at the deadline."""
        return self._done.wait(time_left(deadline))

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    self._find()
                    self._evict()
                    self._done.set()
                    return
                except KVFerryError:  # it is told as a problem of the store
                    self._closing.wait(_RETRY_S)
        except Exception:  # noqa: BLE001  thread root
            _log.exception(
                "tier %s: what lies there could not be counted; only what is written counts", self._tier
            )

    def _find(self) -> None:
        sizes: dict[str, int] = {}
        parts: dict[str, list[str]] = {}
        for values in self._backend.listing(self._names.root, deadline_in(_FIND_S)):
            if self._closing.is_set():
                return
            for value in values:
                name = self._names.parse(value.name)
                if name is None or value.name in sizes:
                    continue
                sizes[value.name] = value.nbytes
                parts.setdefault(name.base, [])
                if name.part:
                    parts[name.base].append(value.name)
        for base, own in parts.items():
            if base not in sizes:
                continue  # parts of a write under way, or of one that did not end; they go by themselves
            nbytes = sum(sizes[name] + NAME_NBYTES for name in (base, *own))
            self._index.found(Held(base, nbytes, tuple(own)))

    def _evict(self) -> None:
        while victims := self._index.excess(_EVICT_AT_ONCE):
            answers = remove_blocks(self._backend, self._names, victims, deadline_in(_LISTING_S))
            left = [held for held, a in zip(victims, answers, strict=True) if a.done is Done.FAILED]
            if left:
                self._index.put_back(left)
                raise TierError(f"{len(left)} blocks could not be evicted")
