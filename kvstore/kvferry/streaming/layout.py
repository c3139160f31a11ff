"""What travels in one stream: which blocks, and how many bytes of each layer.

Blocks are numbered along the key chain. Block ``full_blocks``, if there is one, is the **tail**: the
last, partial block of ``tail_tokens`` tokens. It has no key and is never published.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from functools import cached_property

from kvferry.core.errors import ProtocolError
from kvferry.core.keys import BlockKey, split_keys
from kvferry.core.spec import SLICE_ALIGNMENT, KeyScope, KVSpec, LayerSpec, TensorSpec
from kvferry.wire.messages import BeginStream, StreamReady

__all__ = ["MAX_NAME", "StreamLayout", "checked_keys", "checked_missing", "clean_error", "describe_mismatch"]

MAX_NAME = 256
"""Characters of a stream's name, at most."""


def _tail_nbytes(tensor: TensorSpec, spec: KVSpec, tail_tokens: int) -> int:
    """Bytes of the first ``tail_tokens`` rows; a tensor without a token axis goes whole."""
    if spec.layout == "kvferry" and tensor.shape and tensor.shape[0] == spec.block_tokens:
        return tensor.nbytes // spec.block_tokens * tail_tokens
    return tensor.nbytes


# No slots: sizes are computed once and cached on the instance.
@dataclass(frozen=True)
class StreamLayout:
    """Sizes of the parts of one stream, the same on both sides.

    Attributes:
        spec: Shape of the blocks.
        full_blocks: Number of full blocks, stored and received together.
        tail_tokens: Tokens of the tail block; 0 if there is none.
    """

    spec: KVSpec
    full_blocks: int
    tail_tokens: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.spec.layers)

    @property
    def blocks(self) -> int:
        """Number of blocks, the tail included."""
        return self.full_blocks + (self.tail_tokens > 0)

    def is_tail(self, block: int) -> bool:
        """Whether ``block`` is the tail block."""
        return block == self.full_blocks

    @cached_property
    def _whole(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(t.nbytes for t in layer.tensors) for layer in self.spec.layers)

    @cached_property
    def _tail(self) -> tuple[tuple[int, ...], ...]:
        spec, tail = self.spec, self.tail_tokens
        return tuple(tuple(_tail_nbytes(t, spec, tail) for t in layer.tensors) for layer in spec.layers)

    @cached_property
    def _tail_offsets(self) -> tuple[int, ...]:
        offsets = [0]
        for sizes in self._tail:
            offsets.append(offsets[-1] + -(-sum(sizes) // SLICE_ALIGNMENT) * SLICE_ALIGNMENT)
        return tuple(offsets)

    def tensor_nbytes(self, layer: int, block: int) -> tuple[int, ...]:
        """Bytes that ``block`` sends of each tensor of ``layer``."""
        return self._tail[layer] if self.is_tail(block) else self._whole[layer]

    def pad_nbytes(self, layer: int, block: int) -> int:
        """Zero bytes that follow the tensors; a tail block is not padded."""
        spec: LayerSpec = self.spec.layers[layer]
        return 0 if self.is_tail(block) else spec.nbytes - spec.data_nbytes

    def payload_nbytes(self, layer: int, block: int) -> int:
        """All bytes that ``block`` sends of ``layer``."""
        return sum(self._tail[layer]) if self.is_tail(block) else self.spec.layers[layer].nbytes

    @property
    def tail_buffer_nbytes(self) -> int:
        """Size of the private buffer of the tail block; each layer starts on a 64-byte boundary."""
        return self._tail_offsets[-1] if self.tail_tokens else 0

    def tail_layer(self, layer: int) -> LayerSpec:
        """What the rows of the tail block are for a codec; as a slice they are padded to 64 bytes."""
        spec, found = self.spec.layers[layer], []
        for tensor in spec.tensors:
            rows = self.spec.layout == "kvferry" and tensor.shape[:1] == (self.spec.block_tokens,)
            shape = (self.tail_tokens, *tensor.shape[1:]) if rows else tensor.shape
            found.append(TensorSpec(tensor.name, shape, tensor.dtype))
        return LayerSpec(tuple(found))

    def tail_slice(self, layer: int) -> slice:
        """Where ``layer`` lies in the buffer of the tail block: its rows of each tensor, end to end."""
        start = self._tail_offsets[layer]
        return slice(start, start + sum(self._tail[layer]))


def checked_keys(begin: BeginStream, who: str) -> list[BlockKey]:
    """The keys of the full blocks of a stream; ``who`` is the stream, for messages.

    Raises:
        ProtocolError: If the opening message makes no sense.
    """
    if len(begin.stream) > MAX_NAME:
        raise ProtocolError(f"{who}: name of {len(begin.stream)} characters, at most {MAX_NAME}", remote=True)
    if begin.timeout_s <= 0:
        raise ProtocolError(f"{who}: timeout_s is {begin.timeout_s}, must be positive", remote=True)
    keys = split_keys(begin.keys)
    if len(set(keys)) != len(keys):
        raise ProtocolError(f"{who}: {len(keys) - len(set(keys))} keys are named twice", remote=True)
    return keys


def checked_missing(ready: StreamReady, layout: StreamLayout, who: str) -> frozenset[int]:
    """The full blocks that a receiver asks for; ``who`` is the stream, for messages.

    Raises:
        ProtocolError: If its answer makes no sense.
    """
    missing = frozenset(ready.missing)
    wrong = [b for b in missing if not 0 <= b < layout.full_blocks]
    if wrong or ready.ring < 1:
        raise ProtocolError(
            f"{who}: the receiver asks for blocks {wrong[:8]} of 0..{layout.full_blocks - 1} "
            f"and grants a ring of {ready.ring}; it must name blocks of this stream and grant at least 1"
        )
    return missing


def _field_differences(left: object, right: object, names: tuple[str, ...]) -> list[str]:
    found = []
    for name in names:
        a, b = getattr(left, name), getattr(right, name)
        if a != b:
            found.append(f"{name} {a!r} against {b!r}")
    return found


def _layer_text(layer: LayerSpec) -> str:
    return ", ".join(f"{t.name}{list(t.shape)}:{t.dtype.value}" for t in layer.tensors) or "(no tensor)"


def describe_mismatch(theirs: KVSpec, ours: KVSpec, their_scope: KeyScope, our_scope: KeyScope) -> str:
    """What the sender's spec and scope are, what the receiver's are, and where they differ."""
    names = tuple(f.name for f in fields(KVSpec) if f.name != "layers")
    found = _field_differences(theirs, ours, names)
    if len(theirs.layers) != len(ours.layers):
        found.append(f"{len(theirs.layers)} layers against {len(ours.layers)}")
    for index, (a, b) in enumerate(zip(theirs.layers, ours.layers, strict=False)):
        if a != b:
            found.append(f"layer {index} [{_layer_text(a)}] against [{_layer_text(b)}]")
            break
    # A salt separates tenants of one model: that it differs may be said, its bytes may not.
    found += _field_differences(their_scope, our_scope, ("adapter", "adapter_revision"))
    if their_scope.salt != our_scope.salt:
        found.append("another salt")
    return (
        f"sender: {theirs.describe()}; receiver: {ours.describe()}; they differ in: {'; '.join(found)}. "
        "Start both with the same model, settings and scope"
    )


def clean_error(error: BaseException) -> Exception:
    """A copy of ``error``, without its traceback, that can be kept and raised later.

    A traceback holds the frames, and with them the buffers, of the thread that failed: a kept error
    would keep the model's memory.
    """
    if not isinstance(error, Exception):  # an interrupt ends its own thread; others learn that it ended
        return RuntimeError(f"{type(error).__name__} in the thread of the stream")
    try:
        return copy.copy(error)
    except TypeError:  # a foreign class whose constructor does not take its args
        return RuntimeError(f"{type(error).__name__}: {error}")
