"""Conformance suite of the codec contract; see :class:`CodecSuite`."""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.codecs.base import Codec
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CodecError
from kvferry.core.spec import DType, LayerSpec, TensorSpec

__all__ = ["FILLS", "LENGTHS", "CodecSuite", "assert_guard", "fill_of", "guarded", "kv_layer", "mutations"]

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
"""Bytes of tests; ``values`` (bfloat16 as in KV) is a further one, which codecs do make smaller."""
LENGTHS = (0, 1, 7, 8, 9, 7240, 65537)
"""Sizes at which loops over several values at a time, and counts of 16 bits, have their ends."""


def fill_of(kind: str, nbytes: int) -> bytes:
    """Bytes of one of :data:`FILLS`."""
    if kind == "zeros":
        return bytes(nbytes)
    if kind == "ones":
        return b"\x01" * nbytes
    rng = np.random.default_rng(7)
    if kind == "nan":  # of bfloat16, with payloads and signs
        payloads = rng.integers(1, 128, nbytes // 2 + 1, np.uint16)
        signs = rng.integers(0, 2, nbytes // 2 + 1, np.uint16) << 15
        return bytes((payloads | signs | 0x7F80).astype("<u2").tobytes()[:nbytes])
    if kind == "values":
        normal = rng.standard_normal(nbytes // 2 + 1).astype(np.float32)
        return (normal.view(np.uint32) >> 16).astype("<u2").tobytes()[:nbytes]
    return rng.integers(0, 256, nbytes, np.uint8).tobytes()


def _long(length: int) -> LayerSpec:
    """Tensors of ``length`` elements: in one channel, and of one token."""
    shapes = {"k": (length, 1), "v": (1, length)}
    return LayerSpec(tuple(TensorSpec(n, shape, DType.BFLOAT16) for n, shape in shapes.items()))


def mutations(encoded: bytes, number: int, seed: int = 11) -> Iterator[bytearray]:
    """``encoded`` damaged in ``number`` ways: a bit, a length of all ones, a byte at the start, a cut."""
    rng = random.Random(seed)
    for _ in range(number):
        mutated = bytearray(encoded)
        at = rng.randrange(len(mutated))
        kind = rng.randrange(4)
        if kind == 0:
            mutated[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            mutated[at : at + 8] = b"\xff" * len(mutated[at : at + 8])
        elif kind == 2:
            mutated[rng.randrange(min(64, len(mutated)))] = rng.randrange(256)
        else:
            del mutated[at:]
        yield mutated


def guarded(nbytes: int) -> tuple[memoryview, memoryview]:
    """A page-aligned view of ``nbytes`` with guard bytes behind it, and the whole."""
    whole = page_aligned(nbytes + _GUARD_NBYTES)
    whole[:] = bytes([_GUARD]) * len(whole)
    return whole[:nbytes], whole


def assert_guard(whole: memoryview, nbytes: int) -> None:
    """Nothing was written behind the first ``nbytes`` of what :func:`guarded` gave."""
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
        dst, whole = guarded(codec.max_encoded_nbytes(layer, count))
        used = codec.encode_into(memoryview(data), layer, dst)
        assert 0 <= used <= len(dst)
        assert_guard(whole, len(dst))
        return bytes(dst[:used])

    @pytest.mark.parametrize("count", [0, 1, 7])
    @pytest.mark.parametrize("fill", FILLS)
    @pytest.mark.parametrize("name", sorted(LAYERS))
    def test_round_trip(self, name: str, fill: str, count: int) -> None:
        """What was encoded decodes: to the same bytes if the codec is lossless."""
        codec, layer = self.make_codec(), LAYERS[name]
        data = fill_of(fill, layer.nbytes * count)
        try:
            encoded = self._encoded(codec, layer, data, count)
        except CodecError:
            assert name not in self.must_encode
            return
        out, whole = guarded(len(data))
        codec.decode_into(memoryview(encoded), layer, out)
        assert_guard(whole, len(out))
        if codec.lossless:
            assert bytes(out) == data

    @pytest.mark.parametrize("fill", FILLS)
    @pytest.mark.parametrize("length", LENGTHS)
    def test_lengths(self, length: int, fill: str) -> None:
        """Any number of elements, along tokens and along channels."""
        codec, layer = self.make_codec(), _long(length)
        data = fill_of(fill, layer.data_nbytes).ljust(layer.nbytes, b"\0")
        encoded = self._encoded(codec, layer, data, 1 if length else 0)
        out, whole = guarded(len(data))
        codec.decode_into(memoryview(encoded), layer, out)
        assert_guard(whole, len(out))
        if codec.lossless:
            assert bytes(out) == data

    def test_output_one_byte_too_small_is_an_error(self) -> None:
        """A short output buffer is refused, and nothing behind it is touched."""
        codec, layer = self.make_codec(), LAYERS["kv_bf16"]
        data = fill_of("values", layer.nbytes)
        needed = len(self._encoded(codec, layer, data, 1))
        dst, whole = guarded(needed - 1)
        with pytest.raises(CodecError):
            codec.encode_into(memoryview(data), layer, dst)
        assert_guard(whole, len(dst))

    def test_part_of_a_slice_is_an_error(self) -> None:
        """Only whole slices are encoded or decoded."""
        codec, layer = self.make_codec(), LAYERS["kv_bf16"]
        dst = page_aligned(2 * codec.max_encoded_nbytes(layer))
        with pytest.raises(CodecError):
            codec.encode_into(memoryview(bytes(layer.nbytes - 1)), layer, dst)
        encoded = self._encoded(codec, layer, fill_of("values", layer.nbytes), 1)
        with pytest.raises(CodecError):
            codec.decode_into(memoryview(encoded), layer, page_aligned(layer.nbytes + 1))

    def test_another_length_than_was_encoded_is_an_error(self) -> None:
        """A frame of one slice does not decode into two, cut or doubled frames not into one."""
        codec, layer = self.make_codec(), LAYERS["kv_bf16"]
        encoded = self._encoded(codec, layer, fill_of("values", layer.nbytes), 1)
        with pytest.raises(CodecError):
            codec.decode_into(memoryview(encoded), layer, page_aligned(2 * layer.nbytes))
        for wrong in (encoded[:-1], encoded + encoded, b""):
            with pytest.raises(CodecError):
                codec.decode_into(memoryview(wrong), layer, page_aligned(layer.nbytes))

    def test_mutations_never_crash_or_write_outside(self) -> None:
        """Mutated bytes give a codec error or some values of the right length, nothing else."""
        codec, layer = self.make_codec(), LAYERS["kv_bf16"]
        encoded = self._encoded(codec, layer, fill_of("values", layer.nbytes), 1)
        for mutated in mutations(encoded, 1000):
            out, whole = guarded(layer.nbytes)
            with contextlib.suppress(CodecError):
                codec.decode_into(memoryview(mutated), layer, out)
            assert_guard(whole, len(out))

    def test_config_rebuilds_an_equal_codec(self) -> None:
        """``from_config(config())`` writes the same bytes."""
        codec, layer = self.make_codec(), LAYERS["kv_bf16"]
        again = type(codec).from_config(codec.config())
        assert isinstance(again, Codec)
        data = fill_of("values", layer.nbytes)
        assert self._encoded(again, layer, data, 1) == self._encoded(codec, layer, data, 1)
        with pytest.raises(CodecError):
            type(codec).from_config({**codec.config(), "no_such_parameter": 1})
