"""A namespace of the store in memory: keys, and calls passed on to :class:`MemoryStore`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.core import keys as _keys
from kvferry.core import saving
from kvferry.core.blockstore import Hit
from kvferry.core.buffers import Buf, as_bytes_view
from kvferry.core.clock import checked_deadline
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey, Media, Tokens, require_key, require_keys
from kvferry.core.leases import SlotReadLease
from kvferry.core.segments import Slot
from kvferry.core.sessions import Session
from kvferry.core.spec import KeyScope, KVSpec, namespace_id
from kvferry.core.write_leases import SlotWriteLease

if TYPE_CHECKING:
    from kvferry.core.memory import MemoryStore

__all__ = ["MemoryNamespace"]


def _require_parent(parent: BlockKey | None) -> None:
    if parent is not None:
        require_key(parent, "the parent")


def _pairs(blocks: Sequence[tuple[BlockKey, Buf]]) -> Sequence[tuple[BlockKey, Buf]]:
    try:
        found = list(blocks)
        wrong = next((i for i, pair in enumerate(found) if len(pair) != 2), None)
    except TypeError as error:
        raise ConfigError(
            f"blocks are {type(blocks).__name__}, must be pairs of a key and its bytes"
        ) from error
    if wrong is not None:
        raise ConfigError(f"block {wrong} of {len(found)} is no pair of a key and its bytes")
    return found


class MemoryNamespace:
    """See :class:`kvferry.core.blockstore.Namespace`. Cheap: holds no blocks itself.

    Attributes:
        local_only: It answers another daemon: tiers that are daemons are neither asked nor given what is
            saved here, and ``load`` takes keys that are no run of a chain.
        takes_lossy: See :class:`kvferry.core.blockstore.Namespace`.

    Every verb that takes keys raises :class:`ConfigError` if one of them is not 32 bytes.
    """

    def __init__(self, store: MemoryStore, session: Session, spec: KVSpec, scope: KeyScope) -> None:
        if not isinstance(spec, KVSpec):
            raise ConfigError(f"the spec of a namespace is {type(spec).__name__}, must be a KVSpec")
        if not isinstance(scope, KeyScope):
            raise ConfigError(f"the scope of a namespace is {type(scope).__name__}, must be a KeyScope")
        self._store = store
        self.session = session
        self.spec = spec
        self.scope = scope
        self.namespace_id = namespace_id(spec, scope)
        self.block_nbytes = spec.block_nbytes
        self.slot_nbytes = Slot(0, 0, spec.block_nbytes, 0).slot_nbytes
        self.local_only = False
        self.takes_lossy = False

    def keys(self, tokens: Tokens, *, media: Sequence[Media] = ()) -> list[BlockKey]:
        """Keys of the full blocks of ``tokens``."""
        return _keys.block_keys(self.namespace_id, tokens, self.spec.block_tokens, media=media)

    def foreign_keys(self, engine_hashes: Iterable[bytes]) -> list[BlockKey]:
        """An engine's own 32-byte hash chain as keys."""
        return _keys.foreign_keys(engine_hashes)

    def lookup(self, keys: Sequence[BlockKey]) -> Hit:
        """Which keys are stored; no side effect but on the counters of lookups."""
        return self._store._lookup(self, require_keys(keys))

    def load(
        self,
        keys: Sequence[BlockKey],
        *,
        deadline: float,
        before_fetch: Callable[[], object] | None = None,
    ) -> SlotReadLease:
        """Lease the longest stored prefix of ``keys``; waits only for slower tiers, until the deadline.

        ``before_fetch`` is called, under no lock, before slower tiers are asked, whose blocks need room.
        """
        return self._store._load(self, require_keys(keys), checked_deadline(deadline), before_fetch)

    def reserve(
        self, keys: Sequence[BlockKey], *, parent: BlockKey | None, deadline: float
    ) -> SlotWriteLease:
        """Reserve slots for those of ``keys`` that are not stored; several may fill the same key.

        When nothing may be evicted it waits for leases and pins of other chains to end; if none could
        make room, it raises at once.

        Raises:
            CapacityError: If there is no room by the deadline, or the session's write quota is used up;
                nothing stays reserved.
            ConfigError: If a key is not 32 bytes long.
            StoreError: If the store is closed or the session has ended.
        """
        keys = require_keys(keys)
        _require_parent(parent)
        return self._store._reserve(self, keys, parent, checked_deadline(deadline))

    def reserve_each(
        self,
        parents: Mapping[BlockKey, BlockKey | None],
        *,
        facts: Mapping[BlockKey, tuple[int, bool]],
        deadline: float,
    ) -> SlotWriteLease:
        """As :meth:`reserve`, for blocks of any chains.

        Args:
            parents: The keys with the key before each, heads before tails.
            facts: Position of each (-1: not known) and whether it has lost something.
            deadline: By when room must be found.

        Raises:
            CapacityError: As :meth:`reserve`.
        """
        require_keys(list(parents))
        for parent in parents.values():
            _require_parent(parent)
        return self._store._reserve_each(self, dict(parents), checked_deadline(deadline), facts)

    def facts(self, lease: SlotReadLease) -> list[tuple[BlockKey | None, int, bool]]:
        """Of each block of a lease: its parent, position (-1: not known), and whether it lost something."""
        with self._store._lock:
            return [(b.parent, b.find_position(), b.lossy) for b in self._store._pool.leased(lease)]

    def save(
        self, blocks: Sequence[tuple[BlockKey, Buf]], *, parent: BlockKey | None, deadline: float
    ) -> int:
        """Reserve, copy and commit; returns the blocks newly stored.

        Nobody sees a block before all of them are copied, and an error leaves none behind.

        Raises:
            CapacityError: As :meth:`reserve`.
            ConfigError: If a buffer is not ``spec.block_nbytes`` contiguous bytes; nothing is stored.
            LeaseExpiredError: If the session or the store ended meanwhile; nothing is stored.
        """
        deadline = checked_deadline(deadline)
        sources: dict[BlockKey, memoryview] = {}
        parents: dict[BlockKey, BlockKey | None] = {}
        above = parent
        _require_parent(parent)
        for key, buf in _pairs(blocks):
            require_key(key)
            try:
                source = as_bytes_view(buf)
            except (TypeError, ValueError, BufferError) as error:
                raise ConfigError(
                    f"block {key[:8].hex()}… is of type {type(buf).__name__} and gives no contiguous bytes "
                    f"({error}); give {self.block_nbytes} bytes, such as bytes, memoryview or a C-contiguous "
                    "numpy array (numpy.ascontiguousarray makes one)"
                ) from error
            if len(source) != self.block_nbytes:
                raise ConfigError(
                    f"block {key[:8].hex()}… has {len(source)} bytes, a block of this spec has "
                    f"{self.block_nbytes}"
                )
            if key not in sources:
                sources[key] = source
            parents[key] = above
            above = key

        def copy(missing: Iterable[BlockKey], slots: Sequence[Slot]) -> None:
            self._store.arena.write(slots, map(sources.__getitem__, missing))

        return saving.save(self._store, self, parents, deadline, copy)

    def save_by(
        self,
        keys: Sequence[BlockKey],
        fill: Callable[[dict[BlockKey, memoryview]], None],
        *,
        parent: BlockKey | None,
        deadline: float,
    ) -> int:
        """As :meth:`save`, of what somebody else writes into the slots; returns the blocks newly stored.

        Args:
            keys: From head to tail; they differ.
            fill: Given writable memory for each key that is not stored, fills all of it before it returns,
                and keeps none. Not called if all are stored.
            parent: The key before the first.
            deadline: By when there must be room; what ``fill`` takes is its own.

        Raises:
            CapacityError: As :meth:`reserve`.
            LeaseExpiredError: As :meth:`save`. Whatever ``fill`` raises goes on; nothing is stored then.
        """
        keys = require_keys(keys)
        _require_parent(parent)
        view = self._store.arena.view

        def filled(missing: Iterable[BlockKey], slots: Sequence[Slot]) -> None:
            fill(dict(zip(missing, map(view, slots), strict=True)))

        parents = dict(zip(keys, [parent, *keys], strict=False))
        return saving.save(self._store, self, parents, checked_deadline(deadline), filled)

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Bring blocks up from slower tiers in the background, if there are any."""
        self._store._prefetch(self, require_keys(keys))

    def pin(self, keys: Sequence[BlockKey], *, ttl: float) -> int:
        """Keep stored blocks from eviction for ``ttl`` seconds; returns how many are stored.

        Raises:
            ConfigError: If ``ttl`` is not above 0.
        """
        until = checked_deadline(ttl) + time.monotonic()
        if not ttl > 0:
            raise ConfigError(f"a pin of {ttl} seconds; ttl must be above 0")
        return self._store._pin(self, require_keys(keys), until)

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """End :meth:`pin` early."""
        self._store._unpin(self, require_keys(keys))

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Forget blocks, also pinned ones; leased slots are used again only after the lease."""
        return self._store._remove(self, require_keys(keys))

    def clear(self) -> int:
        """Forget all blocks of the namespace; returns how many."""
        return self._store._remove(self, None)
