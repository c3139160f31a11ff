"""Blocking batches for engines that keep pages by address, as SGLang's host pools do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from kvferry.client.leases import ClientWriteLease
from kvferry.core.blockstore import Namespace, WriteLease
from kvferry.core.clock import checked_deadline, is_past
from kvferry.core.errors import ConfigError, OverloadedError, StoreError, TransportError
from kvferry.core.keys import BlockKey, require_key, require_keys
from kvferry.core.raw_copy import Segments, checked_segments, copy_segments

__all__ = ["RawBlocks"]

_PIECE_NBYTES: Final = (
    32 << 20
)  # reserved at a time, so that a large batch does not need all of the room at once
_GRACE_S: Final = 0.1
_FAILED: Final = (StoreError, TransportError, OverloadedError)


class RawBlocks:
    """Blocks of a namespace to and from memory named by address. Thread safe.

    All calls block, and say for each key whether it is done. They raise where something is wrong that does
    not mend itself (keys, segments, the spec, a right), and for nothing else: a miss, a full store, a daemon
    that is away or does not answer by the deadline are ``False``. What is copied is copied with the GIL
    released. The memory is the caller's, who keeps it in place until the call returns.

    ``segments`` are, for each key, the (address, bytes) of the pieces that make up its block, in the order in
    which they are stored; together they have ``spec.block_nbytes``.

    Args:
        namespace: Whose blocks; of a client, or of a store in this process.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace

    def __repr__(self) -> str:
        return f"<RawBlocks of {self.namespace!r}>"

    def exists_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first ``keys`` are stored; 0 while the daemon is away.

        Raises:
            ConfigError: If a key is not 32 bytes long.
        """
        return self.namespace.lookup(keys).prefix

    def get_batch(
        self, keys: Sequence[BlockKey], segments: Sequence[Segments], *, deadline: float
    ) -> list[bool]:
        """Copy blocks into the caller's memory.

        Args:
            keys: A run of a key chain, in order. One that misses does not hide those behind it.
            segments: Where each block goes.
            deadline: By when it returns, save for 0.1 s that a question takes at any rate.

        Returns:
            For each key whether its block is in place, whole and right. Where it is not, what is in its
            segments is not defined.

        Raises:
            ConfigError: If a key is none, or its segments are not as long as a block; nothing is copied.
        """
        keys, segments = self._checked(keys, segments)
        checked_deadline(deadline)
        done = [False] * len(keys)
        runs = deque([range(len(keys))] if keys else [])
        try:
            while runs:
                run = runs.popleft()
                behind = run[self._load(keys, segments, run, done, deadline) + 1 :]
                if is_past(deadline):
                    break
                if behind:
                    found = self.namespace.lookup([keys[index] for index in behind]).tiers
                    held = [tier is not None for tier in found]
                    runs.extendleft(reversed([behind[at:to] for at, to in _runs(held)]))
        except _FAILED:
            pass  # what was done before is done
        return done

    def _load(
        self, keys: Sequence[BlockKey], segments: Sequence[Segments], run: range, done: list[bool],
        deadline: float,
    ) -> int:  # fmt: skip
        """Load the first of a run; how many were stored."""
        with self.namespace.load([keys[index] for index in run], deadline=deadline) as lease:
            taken = run[: len(lease)]
            views = [lease.view(index) for index in range(len(taken))]
            copy_segments(views, [segments[index] for index in taken], to_segments=True)
            lease.check()  # else what was copied may be another block's by now
            for index in taken:
                done[index] = True
            return len(taken)

    def put_batch(
        self, keys: Sequence[BlockKey], segments: Sequence[Segments], *, deadline: float,
        parent: BlockKey | None,
    ) -> list[bool]:  # fmt: skip
        """Copy blocks out of the caller's memory into the store.

        Args:
            keys: A run of a key chain, in order. One that comes twice is stored from its first segments.
            segments: Where each block is.
            deadline: By when it returns, save for 0.1 s that a question takes at any rate.
            parent: Key of the block before ``keys[0]``, ``None`` if that is the first of its chain: a block
                that says otherwise than its chain is taken for damaged when it is read from a slower tier.

        Returns:
            For each key whether its block is stored, by this call or before it. They are published in pieces
            of 32 MiB, each whole or not at all: of a piece that failed, or of which nobody knows, no block
            counts as stored, and no other is tried after it.

        Raises:
            ConfigError: If a key is none, or its segments are not as long as a block; nothing is stored.
        """
        keys, segments = self._checked(keys, segments)
        if parent is not None:
            require_key(parent, "the parent")
        checked_deadline(deadline)
        sources: dict[BlockKey, Segments] = {}
        for key, pieces in zip(keys, segments, strict=True):
            sources.setdefault(key, pieces)
        order = list(sources)
        step = max(1, _PIECE_NBYTES // max(1, self.namespace.spec.block_nbytes))
        stored: set[BlockKey] = set()
        try:
            for start in range(0, len(order), step):
                piece = order[start : start + step]
                self._save(piece, sources, order[start - 1] if start else parent, deadline)
                stored.update(piece)
        except _FAILED:
            pass  # nothing of this piece is known to be stored
        return [key in stored for key in keys]

    def _save(
        self,
        keys: list[BlockKey],
        sources: dict[BlockKey, Segments],
        parent: BlockKey | None,
        deadline: float,
    ) -> None:
        with self.namespace.reserve(keys, parent=parent, deadline=deadline) as lease:
            views = [lease.view(index) for index in range(len(lease))]
            copy_segments(views, [sources[key] for key in lease.keys], to_segments=False)
            _commit(lease, deadline)

    def _checked(
        self, keys: Sequence[BlockKey], segments: Sequence[Segments]
    ) -> tuple[Sequence[BlockKey], Sequence[Segments]]:
        found = require_keys(keys)
        if len(found) != len(segments):
            raise ConfigError(f"{len(found)} keys, and segments of {len(segments)} blocks")
        return found, checked_segments(segments, self.namespace.spec.block_nbytes)


def _commit(lease: WriteLease, deadline: float) -> None:
    if isinstance(lease, ClientWriteLease):
        lease.commit(max(deadline, time.monotonic() + _GRACE_S))
    else:
        lease.commit()


def _runs(held: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Where runs of those that are held begin and end."""
    at = 0
    for is_held, group in groupby(held):
        to = at + sum(1 for _ in group)
        if is_held:
            yield at, to
        at = to
