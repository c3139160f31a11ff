"""``dedup``: rows that occur more than once are encoded once; with another codec inside.

V of the first layer depends on the token alone, so that a text has as many different rows as different
tokens. Everywhere else rows differ, which a sample of them shows.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.codecs.base import Codec, CodecConfig, checked_nbytes, slice_count
from kvferry.codecs.parameters import Parameters
from kvferry.codecs.stages import load_stage
from kvferry.codecs.text import parse_stages, stage_text
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.core.spec import DType, LayerSpec, TensorSpec

__all__ = ["DedupCodec"]

_INNER: Final = "ebp"
_HEAD: Final = struct.Struct("<BB6x")  # mode, tensors
_PLAIN, _UNIQUE = 0, 1
_SAMPLES: Final = 64
_KEY_NBYTES: Final = 8
_WORTH: Final = 0.9
_MOST_TENSORS: Final = 255
_MOST_NBYTES: Final = (1 << 63) - 1 - _HEAD.size
_Kinds: TypeAlias = "npt.NDArray[np.uint16 | np.uint32]"
_Index: TypeAlias = "npt.NDArray[np.int64]"


class _Rows(NamedTuple):
    """Which row of a tensor is the first of its kind, and for each row the number of its kind."""

    first: _Index
    kind: _Index


class DedupCodec(Codec):
    """Encodes each different row of a tensor once, by the codec inside; lossless if that is.

    A section begins with mode u8, tensors u8 and six zeros. Mode 0: slices as the inner codec writes them.
    Mode 1: for each tensor the number of different rows, u32, or 0 if all rows follow; for each of those
    with a number the kinds of its rows, u16 each, or u32 if there are more than 65536 kinds; then what the
    inner codec writes of one slice with those rows, all slices of the call together, and the padding of the
    slices as a last tensor of bytes.

    Args:
        inner: Text of a codec, as ``int8(k=channel)``.

    Raises:
        CodecError: If it is none.
        UnknownPluginError: If it does not exist; with the nearest name.
    """

    codec_id: ClassVar[str] = "dedup"

    def __init__(self, inner: str = _INNER) -> None:
        named = parse_stages(inner)
        nested = any(name == self.codec_id for name, _ in named)  # not loaded: a peer may nest them deep
        stages = [] if nested else [load_stage(stage) for stage in named]
        if len(stages) != 1 or not isinstance(stages[0], Codec):
            raise CodecError(f"codec 'dedup': inner is {inner[:80]!r}; write one other codec, as ebp or int8")
        self.inner: Final = stages[0]
        self.lossless = self.inner.lossless

    def config(self) -> CodecConfig:
        """``inner``, if it is not ``ebp``."""
        text = stage_text(self.inner.codec_id, self.inner.config())
        return {"inner": text} if text != _INNER else {}

    @classmethod
    def from_config(cls, config: CodecConfig) -> DedupCodec:
        """Build it from :meth:`config`."""
        given = Parameters(cls.codec_id, config)
        inner = given.text("inner", _INNER)
        given.check()
        return cls(inner)

    def unsupported(self, layer: LayerSpec) -> str:
        """What the inner codec says."""
        return self.inner.unsupported(layer)

    def error_bound(self, tensor: TensorSpec) -> float:
        """That of the inner codec."""
        return self.inner.error_bound(tensor)

    def max_encoded_nbytes(self, layer: LayerSpec, count: int = 1) -> int:
        """A header more than the inner codec."""
        inner = self.inner.max_encoded_nbytes(layer, count)
        return _HEAD.size + checked_nbytes(inner, _MOST_NBYTES, self.inner)

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        """See :meth:`Codec.encode_into`."""
        count = slice_count(len(src), layer, self.codec_id)
        needed = self.max_encoded_nbytes(layer, count)
        if len(dst) < needed:
            raise CodecError(f"codec 'dedup': {needed} bytes are needed, the output has {len(dst)}")
        data = np.frombuffer(src, np.uint8).reshape(count, layer.nbytes) if count else None
        if data is not None and len(layer.tensors) <= _MOST_TENSORS:
            found = [_repeated(data, t, at) for t, at in layer.slots()]
            if any(found) and (used := self._encode_unique(data, layer, found, dst[:needed])):
                return used
        _HEAD.pack_into(dst, 0, _PLAIN, 0)
        return _HEAD.size + self._encode_inner(src, layer, dst[_HEAD.size : needed])

    def _encode_inner(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        return checked_nbytes(self.inner.encode_into(src, layer, dst), len(dst), self.inner)

    def _encode_unique(
        self, data: ByteArray, layer: LayerSpec, found: list[_Rows | None], dst: memoryview
    ) -> int:
        """Bytes written, or 0 if they might not fit."""
        numbers = [len(rows.first) if rows else 0 for rows in found]
        joined = _joined(layer, numbers, len(data))
        kinds = [_as_written(rows) for rows in found if rows]
        head = _HEAD.pack(_UNIQUE, len(numbers)) + struct.pack(f"<{len(numbers)}I", *numbers)
        start = len(head) + sum(len(kind) for kind in kinds)
        if start + self.inner.max_encoded_nbytes(joined) > len(dst):
            return 0
        slices = np.zeros(joined.nbytes, np.uint8)
        for (tensor, at), (_, place), rows in zip(layer.slots(), joined.slots(), found, strict=False):
            whole = data[:, at : at + tensor.nbytes]
            if rows:
                whole = whole.reshape(-1, _row_nbytes(tensor))[rows.first]
            slices[place : place + whole.size] = whole.reshape(-1)
        padding = data[:, layer.data_nbytes :]
        slices[joined.data_nbytes - padding.size : joined.data_nbytes] = padding.reshape(-1)
        dst[:start] = b"".join((head, *kinds))
        return start + self._encode_inner(slices.data, joined, dst[start:])

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """See :meth:`Codec.decode_into`."""
        count = slice_count(len(dst), layer, self.codec_id)
        if len(src) < _HEAD.size:
            raise CorruptBlockError(f"codec 'dedup': {len(src)} bytes are too few")
        mode, tensors = _HEAD.unpack_from(src)
        if mode == _PLAIN:
            self.inner.decode_into(src[_HEAD.size :], layer, dst)
        elif mode == _UNIQUE and count and tensors == len(layer.tensors):
            self._decode_unique(src, layer, np.frombuffer(dst, np.uint8).reshape(count, layer.nbytes))
        else:
            raise CorruptBlockError("codec 'dedup': the header is damaged")

    def _decode_unique(self, src: memoryview, layer: LayerSpec, data: ByteArray) -> None:
        number = len(layer.tensors)
        at = _HEAD.size + 4 * number
        if len(src) < at:
            raise CorruptBlockError("codec 'dedup': the header is cut")
        numbers = struct.unpack_from(f"<{number}I", src, _HEAD.size)
        kinds: list[_Kinds] = []
        for tensor, distinct in zip(layer.tensors, numbers, strict=True):
            rows = len(data) * tensor.shape[0] if _eligible(tensor) else 0
            if distinct > rows:
                raise CorruptBlockError(f"codec 'dedup': {distinct} different rows of {rows}")
            size = np.dtype(_kind_type(distinct)).itemsize * rows if distinct else 0
            if len(src) - at < size:
                raise CorruptBlockError("codec 'dedup': the kinds of rows are cut")
            kind: _Kinds = np.frombuffer(bytes(src[at : at + size]), _kind_type(distinct))
            if distinct and int(kind.max()) >= distinct:
                raise CorruptBlockError("codec 'dedup': a row is of a kind that there is not")
            kinds.append(kind)
            at += size
        joined = _joined(layer, numbers, len(data))
        slices = np.zeros(joined.nbytes, np.uint8)
        self.inner.decode_into(src[at:], joined, slices.data)
        for (tensor, offset), (part, place), kind in zip(layer.slots(), joined.slots(), kinds, strict=False):
            whole = slices[place : place + part.nbytes]
            if kind.size:
                whole = whole.reshape(-1, _row_nbytes(tensor))[kind]
            data[:, offset : offset + tensor.nbytes] = whole.reshape(len(data), -1)
        padding = data[:, layer.data_nbytes :]
        padding[:] = slices[joined.data_nbytes - padding.size : joined.data_nbytes].reshape(padding.shape)


def _row_nbytes(tensor: TensorSpec) -> int:
    return tensor.nbytes // tensor.shape[0]


def _eligible(tensor: TensorSpec) -> bool:
    return len(tensor.shape) > 1 and tensor.nbytes > 0 and _row_nbytes(tensor) >= _KEY_NBYTES


def _repeated(data: ByteArray, tensor: TensorSpec, at: int) -> _Rows | None:
    """The different rows of a tensor, if it is worth it: by their first eight bytes, then compared."""
    if not _eligible(tensor):
        return None
    nbytes = _row_nbytes(tensor)
    # the first eight bytes of each row, in place
    heads = np.ndarray((len(data), tensor.shape[0]), np.uint64, data, at, (data.strides[0], nbytes))
    total = heads.size
    sample = heads[_sampled(*heads.shape)].tolist()
    if len(set(sample)) == len(sample):
        return None
    keys = heads.reshape(-1)
    _, first, kind = np.unique(keys, return_index=True, return_inverse=True)
    kind = kind.reshape(-1)
    if len(first) * nbytes + kind.size * _kind_type(len(first))().itemsize >= _WORTH * total * nbytes:
        return None
    rows = data[:, at : at + tensor.nbytes].reshape(-1, nbytes)
    return _Rows(first, kind) if np.array_equal(rows, rows[first[kind]]) else None


@lru_cache(64)
def _sampled(count: int, rows: int) -> tuple[_Index, _Index]:
    numbers = np.linspace(0, count * rows - 1, min(count * rows, _SAMPLES)).astype(np.int64)
    return numbers // rows, numbers % rows


def _kind_type(distinct: int) -> type[np.uint16 | np.uint32]:
    return np.uint16 if distinct <= 1 << 16 else np.uint32


def _as_written(rows: _Rows) -> bytes:
    return rows.kind.astype(_kind_type(len(rows.first))).tobytes()


def _joined(layer: LayerSpec, numbers: tuple[int, ...] | list[int], count: int) -> LayerSpec:
    """One slice with the different rows of each tensor, or all of ``count`` slices, and their padding."""
    found = []
    for tensor, distinct in zip(layer.tensors, numbers, strict=True):
        if distinct:
            shape = (distinct, *tensor.shape[1:])
        elif tensor.shape:
            shape = (count * tensor.shape[0], *tensor.shape[1:])
        else:
            shape = (count,)
        found.append(TensorSpec(tensor.name, shape, tensor.dtype))
    padding = count * (layer.nbytes - layer.data_nbytes)
    return LayerSpec((*found, TensorSpec("\0padding", (padding,), DType.UINT8)))
