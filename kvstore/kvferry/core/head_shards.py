"""Which KV heads each rank of a tensor-parallel group has, for blocks that another size of group stored.

Ranks share the KV heads out in order. Where there are more ranks than KV heads, each head is on several ranks
in a row. How many heads there are in all cannot be seen in the spec of one rank, for one head may be the only
one, or a copy: it has to be said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from kvferry.core.errors import ConfigError
from kvferry.core.spec import KVSpec, TensorSpec

__all__ = ["HeadShard", "SharedHeads"]

_NATIVE: Final = "kvferry"


@dataclass(frozen=True)
class SharedHeads:
    """The heads that a rank's pages and a rank's blocks both have.

    Attributes:
        count: How many, in a row.
        in_pages: All heads of the pages.
        in_blocks: All heads of the blocks.
        first_in_pages: Number, among those of the pages, of the first that both have.
        first_in_blocks: Its number among those of the blocks.
    """

    count: int
    in_pages: int
    in_blocks: int
    first_in_pages: int
    first_in_blocks: int


@dataclass(frozen=True, kw_only=True)
class HeadShard:
    """The KV heads of one tensor-parallel rank.

    Attributes:
        kv_heads: KV heads of the model, those of all ranks together, each counted once.
        tp_rank: The rank.
        tp_size: Ranks. It divides ``kv_heads``, or is a multiple of it; heads are replicated then.

    Raises:
        ConfigError: If there is no such rank, or heads cannot be shared out evenly.
    """

    kv_heads: int
    tp_rank: int
    tp_size: int

    def __post_init__(self) -> None:
        if self.kv_heads < 1:
            raise ConfigError(f"kv_heads is {self.kv_heads}, must be at least 1")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(
                f"tp_rank {self.tp_rank} is outside 0..{self.tp_size - 1} (tp_size {self.tp_size})"
            )
        if self.kv_heads % self.tp_size and self.tp_size % self.kv_heads:
            raise ConfigError(
                f"{self.kv_heads} KV heads cannot be shared out to {self.tp_size} ranks: one number must be "
                "a multiple of the other"
            )

    @property
    def copies(self) -> int:
        """On how many ranks each head is."""
        return max(1, self.tp_size // self.kv_heads)

    @property
    def heads(self) -> range:
        """Numbers of its heads, among those of the model."""
        count = max(1, self.kv_heads // self.tp_size)
        first = self.tp_rank // self.copies * count
        return range(first, first + count)

    def describe(self) -> str:
        """For messages."""
        heads = self.heads
        which = f"head {heads[0]}" if len(heads) == 1 else f"heads {heads[0]} to {heads[-1]}"
        return f"rank {self.tp_rank} of {self.tp_size} has {which} of {self.kv_heads}"

    def spec_of(self, spec: KVSpec) -> KVSpec:
        """What this rank's blocks are, by the spec of any rank, of any size of group.

        Tensors ``[block_tokens, heads, dim]`` get as many heads as the rank has. Those without heads,
        ``[block_tokens, dim]`` as an MLA latent, are the same on every rank; where a spec has no others, the
        result is that of rank 0 of 1, which all ranks share.

        Raises:
            ConfigError: If the spec's layout is opaque, a tensor is neither, or has other heads than
                ``kv_heads`` and the spec's own rank and size say.
        """
        with_heads = set(self._tensors_with_heads(spec))
        if not with_heads:
            return replace(spec, tp_rank=0, tp_size=1)
        layers = tuple(
            replace(layer, tensors=tuple(self._resized(t) if t in with_heads else t for t in layer.tensors))
            for layer in spec.layers
        )
        return replace(spec, layers=layers, tp_rank=self.tp_rank, tp_size=self.tp_size)

    def _resized(self, tensor: TensorSpec) -> TensorSpec:
        tokens, _, dim = tensor.shape
        return replace(tensor, shape=(tokens, len(self.heads), dim))

    def sources(self, spec: KVSpec, tp_size: int) -> tuple[KVSpec, ...]:
        """The specs of those ranks of another group whose blocks together have this rank's heads, each once.

        Where heads are replicated there, ranks that hold the same head here take it from different ranks, as
        far as there are some.

        Args:
            spec: Of any rank, of any size of group.
            tp_size: Ranks that stored the blocks.

        Raises:
            ConfigError: As :meth:`spec_of`, and if the heads cannot be shared out to so many ranks.
        """
        theirs = HeadShard(kv_heads=self.kv_heads, tp_rank=0, tp_size=tp_size)
        replica = self.tp_rank % self.copies * theirs.copies // self.copies
        ranks = dict.fromkeys(head // len(theirs.heads) * theirs.copies + replica for head in self.heads)
        return tuple(dict.fromkeys(replace(theirs, tp_rank=rank).spec_of(spec) for rank in ranks))

    def shared(self, stored: KVSpec) -> SharedHeads | None:
        """The heads that this rank has of blocks that a rank of any group stored.

        Args:
            stored: Of the blocks.

        Returns:
            ``None`` if the blocks have no heads: they are the same on every rank.

        Raises:
            ConfigError: As :meth:`spec_of`, and if they have no head in common.
        """
        if not any(self._tensors_with_heads(stored)):
            return None
        theirs = self._owner(stored)
        mine, held = self.heads, theirs.heads
        first, end = max(mine.start, held.start), min(mine.stop, held.stop)
        if first >= end:
            raise ConfigError(
                f"no head in common: {self.describe()}, the blocks' {theirs.describe()}; "
                "sources(…) says which ranks' blocks are needed"
            )
        return SharedHeads(end - first, len(mine), len(held), first - mine.start, first - held.start)

    def _owner(self, spec: KVSpec) -> HeadShard:
        return HeadShard(kv_heads=self.kv_heads, tp_rank=spec.tp_rank, tp_size=spec.tp_size)

    def _tensors_with_heads(self, spec: KVSpec) -> Iterator[TensorSpec]:
        """All of a spec, checked."""
        if spec.layout != _NATIVE:
            raise ConfigError(
                f"blocks of the layout {spec.layout!r} are opaque: which of their bytes are which head's is "
                "not known, so they are only moved as a whole"
            )
        for number, layer in enumerate(spec.layers):
            for tensor in layer.tensors:
                named = f"tensor {tensor.name!r} of layer {number}"
                if len(tensor.shape) not in (2, 3) or tensor.shape[0] != spec.block_tokens:
                    raise ConfigError(
                        f"{named} has the shape {list(tensor.shape)}, neither [{spec.block_tokens}, heads, "
                        f"dim] nor [{spec.block_tokens}, dim]: which heads it holds is not known"
                    )
                if len(tensor.shape) == 3:
                    owner = self._owner(spec)
                    if tensor.shape[1] != len(owner.heads):
                        raise ConfigError(f"{named} has {tensor.shape[1]} heads, but {owner.describe()}")
                    yield tensor
