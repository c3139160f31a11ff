"""Conformance suite of the codec contract; see :class:`CodecSuite`."""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod

import numpy as np
import pytest

from kvferry.codecs.base import Codec
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CodecError
from kvferry.core.spec import DType, LayerSpec, TensorSpec

__all__ = ["CodecSuite", "kv_layer"]

_GUARD = 0xA5
_GUARD_NBYTES = 64


def kv_layer(tokens: int, heads: int, head_dim: int, dtype: DType = DType.BFLOAT16) -> LayerSpec:
    """A plain K and V layer of one block."""
    shape = (tokens, heads, head_dim)
    return LayerSpec((TensorSpec("k", shape, dtype), TensorSpec("v", shape, dtype)))


LAYERS = {
    "kv_bf16": kv_layer(16, 3, 64),
    "kv_fp16": kv_layer(16, 2, 80, DType.FLOAT16),
    "kv_fp32": kv_layer(16, 1, 112, DType.FLOAT32),
    "mla": LayerSpec((TensorSpec("latent", (16, 576), DType.BFLOAT16),)),
    "padded": kv_layer(1, 1, 7),
    "uint8": kv_layer(8, 1, 96, DType.UINT8),
    "scalar": LayerSpec((TensorSpec("state", (), DType.FLOAT32),)),
    "empty": LayerSpec((TensorSpec("k", (0, 8, 128), DType.BFLOAT16),)),
}
FILLS = ("zeros", "ones", "random", "nan")


def _fill(kind: str, nbytes: int) -> bytes:
    if kind == "zeros":
        return bytes(nbytes)
    if kind == "ones":
        return b"\x01" * nbytes
    if kind == "nan":
        return b"\xff" * nbytes
    return np.random.default_rng(7).integers(0, 256, nbytes, np.uint8).tobytes()


def _guarded(nbytes: int) -> tuple[memoryview, memoryview]:
    """A page-aligned view of ``nbytes`` with guard bytes behind it, and the whole."""
    whole = page_aligned(nbytes + _GUARD_NBYTES)
    whole[:] = bytes([_GUARD]) * len(whole)
    return whole[:nbytes], whole


def _assert_guard(whole: memoryview, nbytes: int) -> None:
    assert bytes(whole[nbytes:]) == bytes([_GUARD]) * _GUARD_NBYTES, "wrote past its buffer"


class CodecSuite(ABC):
    """What every codec must do. Inherit it in a test class and give :meth:`make_codec`.

    A codec that does not apply to a layer raises :class:`CodecError` at encode; the suite accepts that
    for the layers not named in :attr:`must_encode`.
    """

    must_encode: tuple[str, ...] = ("kv_bf16",)

    @abstractmethod
    def make_codec(self) -> Codec:
        """A codec under test."""

    def _encoded(self, codec: Codec, layer: LayerSpec, data: bytes, count: int) -> bytes:
        dst, whole = _guarded(codec.max_encoded_nbytes(layer, count))
        used = codec.encode_into(memoryview(data), layer, dst)
        assert 0 <= used <= len(dst)
        _assert_guard(whole, len(dst))
        return bytes(dst[:used])

    @pytest.mark.parametrize("count", [0, 1, 7])
    @pytest.mark.parametrize("fill", FILLS)
    @pytest.mark.parametrize("name", sorted(LAYERS))
    def test_round_trip(self, name: str, fill: str, count: int) -> None:
        """What was encoded decodes: to the same bytes if the codec is lossless."""
        codec, layer = self.make_codec(), LAYERS[name]
        data = _fill(fill, layer.nbytes * count)
        try:
            encoded = self._encoded(codec, layer, data, count)
        except CodecError:
            assert name not in self.must_encode
            return
        out, whole = _guarded(len(data))
        codec.decode_into(memoryview(encoded), layer, out)
        _assert_guard(whole, len(out))
        if codec.lossless:
            assert bytes(out) == data

    def test_output_one_byte_too_small_is_an_error(self) -> None:
        """A short output buffer is refused, and nothing behind it is touched."""
        codec, layer = self.make_codec(), LAYERS["kv_bf16"]
        data = _fill("random", layer.nbytes)
        needed = len(self._encoded(codec, layer, data, 1))
        dst, whole = _guarded(needed - 1)
        with pytest.raises(CodecError):
            codec.encode_into(memoryview(data), layer, dst)
        _assert_guard(whole, len(dst))

    def test_part_of_a_slice_is_an_error(self) -> None:
        """Only whole slices are encoded or decoded."""
        codec, layer = self.make_codec(), LAYERS["kv_bf16"]
        dst = page_aligned(2 * codec.max_encoded_nbytes(layer))
        with pytest.raises(CodecError):
            codec.encode_into(memoryview(bytes(layer.nbytes - 1)), layer, dst)
        encoded = self._encoded(codec, layer, _fill("random", layer.nbytes), 1)
        with pytest.raises(CodecError):
            codec.decode_into(memoryview(encoded), layer, page_aligned(layer.nbytes + 1))

    def test_another_length_than_was_encoded_is_an_error(self) -> None:
        """A frame of one slice does not decode into two, cut or doubled frames not into one."""
        codec, layer = self.make_codec(), LAYERS["kv_bf16"]
        encoded = self._encoded(codec, layer, _fill("random", layer.nbytes), 1)
        with pytest.raises(CodecError):
            codec.decode_into(memoryview(encoded), layer, page_aligned(2 * layer.nbytes))
        for wrong in (encoded[:-1], encoded + encoded, b""):
            with pytest.raises(CodecError):
                codec.decode_into(memoryview(wrong), layer, page_aligned(layer.nbytes))

    def test_mutations_never_crash_or_write_outside(self) -> None:
        """Mutated bytes give a codec error or some values of the right length, nothing else."""
        codec, layer = self.make_codec(), LAYERS["kv_bf16"]
        encoded = self._encoded(codec, layer, _fill("random", layer.nbytes), 1)
        rng = random.Random(11)
        for _ in range(1000):
            mutated = bytearray(encoded)
            kind = rng.randrange(3)
            at = rng.randrange(len(mutated))
            if kind == 0:
                mutated[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                mutated[at : at + 8] = b"\xff" * len(mutated[at : at + 8])
            else:
                del mutated[at:]
            out, whole = _guarded(layer.nbytes)
            with contextlib.suppress(CodecError):
                codec.decode_into(memoryview(mutated), layer, out)
            _assert_guard(whole, len(out))

    def test_config_rebuilds_an_equal_codec(self) -> None:
        """``from_config(config())`` writes the same bytes."""
        codec, layer = self.make_codec(), LAYERS["kv_bf16"]
        again = type(codec).from_config(codec.config())
        assert isinstance(again, Codec)
        data = _fill("random", layer.nbytes)
        assert self._encoded(again, layer, data, 1) == self._encoded(codec, layer, data, 1)
        with pytest.raises(CodecError):
            type(codec).from_config({**codec.config(), "no_such_parameter": 1})
