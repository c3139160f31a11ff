"""The codec contract: layer slices into fewer bytes and back.

A pipeline (:class:`kvferry.codecs.CodecPipeline`) is built from stages of three kinds, in this order: any
number of :class:`ArrayStage` (array to array: the same values arranged or cast for the next stage), at most
one :class:`Codec` (array to bytes: it knows tensors and element types), any number of :class:`ByteStage`
(bytes to bytes). All of them work on whole layer slices of one :class:`~kvferry.core.spec.LayerSpec` and may
be given several at once (one a block): small slices cost more a byte.

The caller owns every buffer. Stages hold no state between calls and are thread safe. Checksums are not
theirs: they cover the encoded bytes and belong to the tier or the link.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, SupportsFloat, SupportsIndex, TypeAlias

from kvferry.core.buffers import addresses_of
from kvferry.core.errors import CodecError
from kvferry.core.nearest import shown
from kvferry.core.spec import LayerSpec, TensorSpec

__all__ = [
    "ArrayStage",
    "ByteStage",
    "Codec",
    "CodecConfig",
    "Stage",
    "UnfitValuesError",
    "check_apart",
    "check_bytes",
    "check_writable",
    "checked_bound",
    "checked_nbytes",
    "slice_count",
]

CodecConfig: TypeAlias = "Mapping[str, str | int | float | bool]"


class UnfitValuesError(CodecError):
    """The values are none that a stage can encode; a pipeline stores such slices as they are."""


class Stage(ABC):
    """One step of a pipeline.

    Attributes:
        codec_id: Stable name, the one it is registered under; stored with every entry that it wrote.
        lossless: Whether ``decode(encode(x)) == x`` bit for bit, NaN payloads and padding included.
    """

    codec_id: ClassVar[str]
    lossless: bool = True

    def config(self) -> CodecConfig:
        """The parameters from which :meth:`from_config` builds an equal stage; empty by default."""
        return {}

    @classmethod
    def from_config(cls, config: CodecConfig) -> Stage:
        """Build a stage from its parameters.

        Raises:
            CodecError: For a parameter that it does not have, or a value outside its range.
        """
        if config:
            raise CodecError(f"codec {cls.codec_id!r} has no parameters, got {sorted(config)}")
        return cls()


class Codec(Stage):
    """Array to bytes: encodes and decodes layer slices."""

    def unsupported(self, layer: LayerSpec) -> str:
        """Why it does not apply to ``layer``, for people; empty if it does."""
        del layer
        return ""

    def error_bound(self, tensor: TensorSpec) -> float:
        """The stated bound of the relative L2 error of ``tensor`` in the slices of one call.

        That is ``|x - decoded| / |x|``, in which channels that stick out do not count as much
        (:attr:`kvferry.codecs.error.SliceError.bounded`). 0 for a lossless codec. A pipeline checks it and
        stores what is outside as it is. From 1 on any error is taken, as long as finite values stay so.
        """
        del tensor
        return 0.0

    @abstractmethod
    def max_encoded_nbytes(self, layer: LayerSpec, count: int = 1) -> int:
        """Exact upper bound of the encoded size of ``count`` slices of ``layer``."""

    @abstractmethod
    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        """Encode ``src``, any number of whole slices of ``layer``, to the start of ``dst``.

        Returns:
            Bytes written to ``dst``.

        Raises:
            CodecError: If ``src`` is no whole number of slices, the codec does not apply to ``layer``, or
                ``dst`` is too small; what ``dst`` holds is then undefined, but nothing outside it was
                touched.
        """

    @abstractmethod
    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """Decode ``src`` into ``dst``, which is exactly as long as what was encoded.

        No length found in ``src`` is trusted before it is checked against ``dst``.

        Raises:
            CorruptBlockError: If ``src`` was not made by this codec from as many bytes as ``dst``.
            CodecError: If ``dst`` is no whole number of slices.
        """


class ArrayStage(Stage):
    """Array to array: as many slices, of another layout (:meth:`encoded_layer`)."""

    def unsupported(self, layer: LayerSpec) -> str:
        """Why it does not apply to ``layer``, for people; empty if it does."""
        del layer
        return ""

    def error_bound(self, tensor: TensorSpec) -> float:
        """Its share of the relative L2 error, as :meth:`Codec.error_bound`; 0 if it is lossless."""
        del tensor
        return 0.0

    @abstractmethod
    def encoded_layer(self, layer: LayerSpec) -> LayerSpec:
        """What slices of ``layer`` are after encoding."""

    @abstractmethod
    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """Encode whole slices; ``dst`` has exactly as many of :meth:`encoded_layer`.

        Raises:
            CodecError: If the sizes do not fit each other.
            UnfitValuesError: If these values cannot be encoded.
        """

    @abstractmethod
    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """The reverse: ``src`` are slices of :meth:`encoded_layer`, ``dst`` as many of ``layer``.

        Raises:
            CodecError: If the sizes do not fit each other.
        """


class ByteStage(Stage):
    """Bytes to bytes: knows nothing of tensors, so it also takes opaque layouts."""

    @abstractmethod
    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Exact upper bound of the encoded size of ``nbytes``."""

    @abstractmethod
    def encode_into(self, src: memoryview, dst: memoryview) -> int:
        """Encode ``src`` to the start of ``dst``.

        Returns:
            Bytes written to ``dst``.

        Raises:
            CodecError: If ``dst`` is too small; nothing outside it was touched.
        """

    @abstractmethod
    def decode_into(self, src: memoryview, dst: memoryview) -> int:
        """Decode ``src`` to the start of ``dst``.

        Returns:
            Bytes written to ``dst``.

        Raises:
            CorruptBlockError: If ``src`` was not made by this stage, is cut or too long, or does not fit
                into ``dst``.
        """


def check_bytes(views: Iterable[memoryview], what: str, who: str) -> None:
    """Whether buffers are flat bytes: kernels in C get an address and a length.

    Raises:
        CodecError: If one is anything else.
    """
    for view in views:
        if not isinstance(view, memoryview):
            kind = type(view).__name__
            raise CodecError(f"{who}: the {what} is {kind}, must be a memoryview of bytes")
        if view.ndim != 1 or view.itemsize != 1 or not view.c_contiguous:
            raise CodecError(
                f"{who}: the {what} is a memoryview of {view.ndim} dimensions of {view.format!r} with "
                f"strides {view.strides}, must be one of contiguous bytes; "
                + (".cast('B') makes one" if view.c_contiguous else "copy it first")
            )


def check_apart(srcs: Iterable[memoryview], dsts: Iterable[memoryview], who: str) -> None:
    """Whether no output has a byte in common with an input or another output: it would be written over.

    Whatever objects they are views of; inputs may overlap each other.

    Raises:
        CodecError: If one has.
    """
    read, written = ([view for view in views if len(view)] for views in (srcs, dsts))
    starts = addresses_of([*read, *written])
    sizes = list(map(len, [*read, *written]))
    if _disjoint(starts, sizes):
        return
    spans = sorted(zip(starts, sizes, [False] * len(read) + [True] * len(written), strict=True))
    read_end = written_end = 0
    for start, nbytes, is_output in spans:
        common = max(written_end, read_end if is_output else 0) - start
        if common > 0:
            what = "two outputs" if is_output and written_end > start else "input and output"
            raise CodecError(
                f"{who}: {what} overlap, by {common} bytes or less; give them memory of their own"
            )
        if is_output:
            written_end = start + nbytes
        else:
            read_end = max(read_end, start + nbytes)


def _disjoint(starts: Sequence[int], sizes: Iterable[int]) -> bool:
    """Whether no two spans have a byte in common: when one begins, all that began before it have ended."""
    ends = sorted(map(operator.add, starts, sizes))
    return all(map(operator.le, ends, sorted(starts)[1:]))


def check_writable(dst: memoryview, codec_id: str) -> None:
    """Whether an output may be written: kernels in C, which get an address, would not notice.

    Raises:
        CodecError: If it is read-only.
    """
    if dst.readonly:
        raise CodecError(f"codec {codec_id!r}: the output is read-only; give it a writable buffer")


def checked_nbytes(found: object, most: int, stage: Stage) -> int:
    """A size that a stage gave back, if it can be one: with a wrong one stale memory would pass for data.

    Raises:
        CodecError: If it is no whole number from 0 to ``most``.
    """
    nbytes = -1
    if isinstance(found, SupportsIndex) and not isinstance(found, bool):
        nbytes = operator.index(found)
    if not 0 <= nbytes <= most:
        raise CodecError(
            f"codec {stage.codec_id!r} gave back {shown(found)} for a size, must be a whole number from 0 to "
            f"{most}; tell its authors"
        )
    return nbytes


def checked_bound(found: object, stage: Stage) -> float:
    """A bound that a stage states, if it can be one.

    Raises:
        CodecError: If it is no number from 0 on.
    """
    bound = math.nan
    if isinstance(found, SupportsFloat) and not isinstance(found, bool):
        bound = float(found)
    if not bound >= 0:  # also for NaN
        raise CodecError(
            f"codec {stage.codec_id!r} states {shown(found)} for the bound of its error, must be a number "
            "from 0 on; tell its authors"
        )
    return bound


def slice_count(nbytes: int, layer: LayerSpec, codec_id: str) -> int:
    """How many slices of ``layer`` are ``nbytes``.

    Raises:
        CodecError: If that is no whole number.
    """
    if not isinstance(layer, LayerSpec):
        raise CodecError(f"codec {codec_id!r}: the layer is {type(layer).__name__}, must be a LayerSpec")
    if layer.nbytes == 0:
        if nbytes:
            raise CodecError(f"codec {codec_id!r}: {nbytes} bytes for a layer of none")
        return 0
    count, rest = divmod(nbytes, layer.nbytes)
    if rest:
        raise CodecError(
            f"codec {codec_id!r}: {nbytes} bytes are no whole number of layer slices of {layer.nbytes} bytes"
        )
    return count
