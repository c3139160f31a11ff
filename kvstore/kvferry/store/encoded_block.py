"""Encoded blocks, the frames of a block's layer slices in a row: see :mod:`kvferry.store.encoding`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from kvferry.codecs import CodecPipeline
from kvferry.codecs.choice import RAW
from kvferry.codecs.frame import FLAGS_AT, LOSSY, MAX_HEADER_NBYTES, aligned
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import is_past
from kvferry.core.errors import CorruptBlockError, TierError
from kvferry.core.spec import KVSpec

__all__ = ["SLICES_A_CALL", "BlockCodec", "EncodedBlock", "Encoding", "Memory", "most_encoded_nbytes"]

_KEPT_NBYTES: Final = 64 << 20
SLICES_A_CALL: Final = 16
"""Layer slices that are encoded, or decoded, between two looks at the deadline."""


class Encoding(NamedTuple):
    """How a block is encoded, as it stands beside its bytes in the medium.

    Attributes:
        codec: Text form of the pipeline.
        lossy: Whether decoding gives other values than were saved.
        bound: Stated bound of the relative error of its tensors; 0 if nothing is lost.
    """

    codec: str
    lossy: bool = False
    bound: float = 0.0

    def dump(self) -> bytes:
        """As bytes for a medium that has no words of its own for it; :meth:`load` reads them."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def load(cls, raw: bytes) -> Encoding:
        """What :meth:`dump` wrote.

        Raises:
            CorruptBlockError: If it is none.
        """
        try:
            return _encodings.decode(raw)
        except msgspec.MsgspecError as error:
            raise CorruptBlockError(f"how a block is encoded cannot be read: {error}") from error


class EncodedBlock(NamedTuple):
    """One encoded block.

    Attributes:
        data: Its bytes, page-aligned memory of the thread that encoded it: valid until that encodes the next.
        sizes: Of the frame of each layer, without the zeros behind it.
        encoding: How it was encoded.
    """

    data: memoryview
    sizes: tuple[int, ...]
    encoding: Encoding


def most_encoded_nbytes(spec: KVSpec) -> int:
    """The largest that an encoded block of ``spec`` may be, whichever codec made it."""
    return sum(aligned(layer.nbytes + MAX_HEADER_NBYTES) for layer in spec.layers)


class Memory(threading.local):
    """What a thread encodes into: grown to the largest block, and kept up to 64 MiB."""

    def __init__(self) -> None:
        self._held = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """``nbytes`` of it, page-aligned; what was taken before is no longer valid."""
        found = self._held
        if len(found) < nbytes:
            self._held = memoryview(b"")
            found = page_aligned(nbytes)
            if nbytes <= _KEPT_NBYTES:
                self._held = found
        return found[:nbytes]


_encoded = Memory()
_encodings: Final = msgspec.msgpack.Decoder(Encoding)


class BlockCodec:
    """Encodes the blocks of one spec. Thread safe.

    Args:
        spec: What the blocks are.
        pipelines: That may be used, by their text.

    Attributes:
        spec: What the blocks are.
        pipelines: That of each layer, by the text of the pipeline asked for: a layer that it does not know
            goes as it is.
        unused: Why a pipeline is not used, for people.
        most_nbytes: The largest that an encoded block may be on its way out of a pipeline.
    """

    def __init__(self, spec: KVSpec, pipelines: Mapping[str, CodecPipeline]) -> None:
        raw = CodecPipeline.parse(RAW)
        self.spec: Final = spec
        self.pipelines: dict[str, tuple[CodecPipeline, ...]] = {}
        self.unused = ""
        self._raw: Final = (raw,) * len(spec.layers)
        self._encodings = {(RAW, False): Encoding(RAW)}
        for name, pipeline in pipelines.items():
            why = {layer: pipeline.unsupported(replace(spec, layers=(layer,))) for layer in set(spec.layers)}
            if why and not all(why.values()):
                self.pipelines[name] = tuple(raw if why[layer] else pipeline for layer in spec.layers)
                self._encodings[name, False] = Encoding(name)
                self._encodings[name, True] = Encoding(name, True, _stated_bound(pipeline, spec))
            else:
                reason = next(iter(why.values()), "they have no layers")
                self.unused = f"stored as they are, {name} is not used: {reason}"
        self.most_nbytes: Final = max(
            sum(aligned(p.max_encoded_nbytes(layer)) for p, layer in zip(each, spec.layers, strict=True))
            for each in (self._raw, *self.pipelines.values())
        )

    def encode(self, data: memoryview, name: str, deadline: float) -> EncodedBlock:
        """Encode a block by the pipeline ``name``, or as it is.

        Raises:
            TierError: At the deadline.
        """
        memory = _encoded.take(self.most_nbytes)
        sizes: list[int] = []
        at, lossy = 0, False
        pipelines = self.pipelines.get(name, self._raw)
        for start, stop in self._runs(pipelines):
            if is_past(deadline):
                raise TierError("not encoded by the deadline")
            slices = [data[self.spec.layer_slice(number)] for number in range(start, stop)]
            pipeline = pipelines[start]
            for nbytes in pipeline.encode_row(slices, self.spec.layers[start:stop], memory[at:]):
                lossy |= not pipeline.lossless and bool(memory[at + FLAGS_AT] & LOSSY)
                sizes.append(nbytes)
                at += aligned(nbytes)
        return EncodedBlock(memory[:at], tuple(sizes), self._encodings[name, lossy])

    def _runs(self, pipelines: tuple[CodecPipeline, ...]) -> Iterator[tuple[int, int]]:
        """Layers that are encoded in one call: some neighbours with the same pipeline."""
        start = 0
        for stop in range(1, len(pipelines) + 1):
            ends = stop == len(pipelines) or pipelines[stop] is not pipelines[start]
            if ends or stop - start == SLICES_A_CALL:
                yield start, stop
                start = stop


def _stated_bound(pipeline: CodecPipeline, spec: KVSpec) -> float:
    """The largest of any tensor."""
    tensors = {tensor for layer in spec.layers for tensor in layer.tensors}
    return max(map(pipeline.error_bound, tensors), default=0.0)
