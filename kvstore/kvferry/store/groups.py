"""Groups of layers that are restored by different rules: the prefix lengths that all of them allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvferry.core.blockstore import Hit
from kvferry.core.spec import KVSpec

__all__ = ["restorable"]


def restorable(hits: Mapping[KVSpec, Hit]) -> list[int]:
    """Lengths in tokens, ascending, at which every group can be restored from what is held.

    Full attention needs all blocks of the prefix; a window of W tokens its last ``ceil(W / block_tokens)``
    blocks, or all if there are fewer; a state layer the snapshot at exactly that length. Several ranks are
    several specs: the prefix must be there on all of them. Length 0, which always can, is not named.

    Args:
        hits: What is held of the same prompt, a group (and rank) each, from the first block on. For a
            group of snapshots, a hit at block i is the state after block i. Make it from
            :meth:`Namespace.lookup`, or from what a lease really holds.

    Returns:
        The lengths; none if a group allows none or there is no group. The caller still computes the last
        token of its prompt itself (:func:`kvferry.core.keys.usable_prefix`).
    """
    allowed: set[int] | None = None
    for spec, hit in hits.items():
        lengths = {blocks * spec.block_tokens for blocks in _lengths(spec, hit)}
        allowed = lengths if allowed is None else allowed & lengths
    return sorted(allowed or ())


def _lengths(spec: KVSpec, hit: Hit) -> Iterable[int]:
    """Prefix lengths in blocks that the rule of one group allows."""
    restore = spec.restore
    if restore.kind == "all_blocks":
        return range(1, hit.prefix + 1)
    if restore.kind == "snapshot":
        return [block + 1 for block, tier in enumerate(hit.tiers) if tier is not None]
    window = -(-(restore.window_tokens or 1) // spec.block_tokens)
    run, found = 0, []
    for block, tier in enumerate(hit.tiers):
        run = 0 if tier is None else run + 1
        if run >= min(window, block + 1):
            found.append(block + 1)
    return found
