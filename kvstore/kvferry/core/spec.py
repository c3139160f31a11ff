"""Shapes and identity of KV blocks: :class:`KVSpec` and what it is made of.

A **block** is the KV of ``block_tokens`` consecutive tokens, all layers of one group, for one rank.
In memory and on the wire it is the concatenation of its **layer slices**; a layer slice is the
concatenation of the layer's tensors, padded with zeros to a multiple of 64 bytes, so that each slice
starts on a 64-byte boundary.
"""

from __future__ import annotations

import enum
import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from kvferry.core import canonical
from kvferry.core.errors import ConfigError

__all__ = [
    "SLICE_ALIGNMENT",
    "DType",
    "KVSpec",
    "KeyScope",
    "LayerSpec",
    "Restore",
    "TensorSpec",
    "namespace_id",
]

SLICE_ALIGNMENT = 64
RestoreKind: TypeAlias = Literal["all_blocks", "last_window", "snapshot"]
_RESTORE_KINDS: Final[tuple[str, ...]] = get_args(RestoreKind)
_SPEC_FORMAT = 1
_NAMESPACE_FORMAT = 1


class DType(str, enum.Enum):
    """Element types of KV tensors, by their safetensors-like lower-case torch names."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layer slice, row-major.

    Attributes:
        name: ``k``, ``v``, ``latent``, …; unique in its layer.
        shape: For tensors with a token axis that axis comes first and equals ``block_tokens``.
        dtype: Element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a tensor of a layer needs a name")
        if any(n < 0 for n in self.shape):
            raise ConfigError(f"tensor {self.name!r}: negative size in shape {self.shape}")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSlot(NamedTuple):
    """Where a tensor lies inside its layer slice."""

    spec: TensorSpec
    offset: int


# No slots: sizes are asked for with every layer that moves, so they are computed once and cached.
@dataclass(frozen=True)
class LayerSpec:
    """The tensors of one layer of one block: K and V, an MLA latent, or state tensors."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            raise ConfigError(f"tensors of a layer need different names, got {names}")

    def __hash__(self) -> int:
        return self._hash  # what is derived from a layer is kept by layer, and looked up with every slice

    @cached_property
    def _hash(self) -> int:
        return hash(self.tensors)

    @cached_property
    def data_nbytes(self) -> int:
        """Bytes of the tensors, without padding."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the layer slice: the tensors, padded to a multiple of 64."""
        return -(-self.data_nbytes // SLICE_ALIGNMENT) * SLICE_ALIGNMENT

    def slots(self) -> tuple[TensorSlot, ...]:
        """The tensors with their byte offsets inside the layer slice."""
        found, offset = [], 0
        for tensor in self.tensors:
            found.append(TensorSlot(tensor, offset))
            offset += tensor.nbytes
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Restore:
    """How the layers of a group are restored at a prefix of ``n`` tokens.

    ``all_blocks`` needs every block of the prefix, ``last_window`` the last
    ``ceil(window_tokens / block_tokens)``, ``snapshot`` the state stored at exactly that length.
    """

    kind: RestoreKind = "all_blocks"
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _RESTORE_KINDS:  # types are not checked where it comes from a file or a peer
            raise ConfigError(f"restore rule {self.kind!r} is none of {', '.join(_RESTORE_KINDS)}")
        windowed = self.kind == "last_window"
        if windowed != (self.window_tokens is not None):
            raise ConfigError(
                f"restore rule {self.kind!r} with window_tokens={self.window_tokens}: "
                "window_tokens belongs to 'last_window' and only to it"
            )
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ConfigError(f"window_tokens is {self.window_tokens}, must be at least 1")


# No slots: fingerprint and offsets are computed once and cached on the instance.
@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """Shape and identity of the blocks of one group of one model on one rank.

    Every field is part of the identity: two specs that differ anywhere never share a block.

    Attributes:
        model: Name of the model.
        revision: Revision of its weights; empty means *not given* (entries are keyed by name only).
        layers: One :class:`LayerSpec` a layer.
        block_tokens: Tokens in a block.
        group: Layers restored by the same rule.
        restore: That rule.
        layout: ``kvferry``, or an engine's own opaque layout, moved as whole bytes.
        tp_rank: Tensor-parallel rank; KV that is the same on all ranks (MLA) is described with
            ``tp_rank=0, tp_size=1`` on every rank, so that they share one key on purpose.
        tp_size: Tensor-parallel size.
        pp_rank: Pipeline-parallel rank.
        pp_size: Pipeline-parallel size.
        cp_rank: Context-parallel rank.
        cp_size: Context-parallel size.
    """

    model: str
    revision: str
    layers: tuple[LayerSpec, ...]
    block_tokens: int
    group: str = "full"
    restore: Restore = Restore()
    layout: str = "kvferry"
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens is {self.block_tokens}, must be at least 1")
        if not self.model:
            raise ConfigError("a KVSpec needs the name of its model")
        for axis in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ConfigError(f"{axis}_rank {rank} is outside 0..{size - 1} ({axis}_size {size})")

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        offsets = [0]
        for layer in self.layers:
            offsets.append(offsets[-1] + layer.nbytes)
        return tuple(offsets)

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block: the sum of its layer slices."""
        return self._offsets[-1]

    def layer_slice(self, layer: int) -> slice:
        """Where the slice of ``layer`` lies inside a block, in bytes."""
        if not 0 <= layer < len(self.layers):
            raise IndexError(f"layer {layer} is outside 0..{len(self.layers) - 1}")
        return slice(self._offsets[layer], self._offsets[layer + 1])

    def fingerprint(self) -> bytes:
        """32 bytes over every field, versioned and length-prefixed."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> bytes:
        fields: list[canonical.Canonical] = [
            _SPEC_FORMAT,
            self.model,
            self.revision,
            [[[t.name, t.shape, t.dtype.value] for t in la.tensors] for la in self.layers],
            self.block_tokens,
            self.group,
            [self.restore.kind, self.restore.window_tokens],
            self.layout,
            [self.tp_rank, self.tp_size],
            [self.pp_rank, self.pp_size],
            [self.cp_rank, self.cp_size],
        ]
        return hashlib.blake2b(canonical.encode(fields), digest_size=32, person=b"kvferry.spec").digest()

    def describe(self) -> str:
        """One line for people, with everything two peers may differ in."""
        first = self.layers[0].tensors if self.layers else ()
        tensors = ", ".join(f"{t.name}{list(t.shape)}:{t.dtype.value}" for t in first)
        ranks = f"tp {self.tp_rank}/{self.tp_size} pp {self.pp_rank}/{self.pp_size}"
        if self.cp_size > 1:
            ranks += f" cp {self.cp_rank}/{self.cp_size}"
        return (
            f"{self.model}@{self.revision or '(no revision)'} group={self.group} "
            f"layout={self.layout} layers={len(self.layers)} [{tensors}] "
            f"block={self.block_tokens} tokens, {self.block_nbytes} bytes, {ranks} "
            f"fingerprint={self.fingerprint().hex()[:12]}"
        )


@dataclass(frozen=True, slots=True)
class KeyScope:
    """What else separates keys of the same tokens: an adapter and a salt; ``None`` differs from empty."""

    adapter: str | None = None
    adapter_revision: str | None = None
    salt: bytes | None = None


def namespace_id(spec: KVSpec, scope: KeyScope) -> bytes:
    """The 32 bytes that start every key chain of ``spec`` and ``scope``."""
    fields: list[canonical.Canonical] = [
        _NAMESPACE_FORMAT,
        spec.fingerprint(),
        scope.adapter,
        scope.adapter_revision,
        scope.salt,
    ]
    return hashlib.blake2b(canonical.encode(fields), digest_size=32, person=b"kvferry.ns").digest()
