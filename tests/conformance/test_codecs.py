from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import ClassVar

import pytest

from kvferry.codecs.base import ArrayStage, ByteStage, Codec, CodecConfig
from kvferry.codecs.cast import CastStage
from kvferry.codecs.compressed import Lz4Stage, ZstdStage
from kvferry.codecs.dedup import DedupCodec
from kvferry.codecs.ebp import EbpCodec
from kvferry.codecs.kernels import use_kernels
from kvferry.codecs.native import native
from kvferry.codecs.quantised import Fp8Codec, Int4Codec, Int8Codec
from kvferry.codecs.raw import RawCodec
from kvferry.codecs.shuffle import ShuffleStage
from kvferry.codecs.split import SplitCodec
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.core.spec import LayerSpec
from kvferry.testing.codec_stages import ArrayStageSuite, ByteStageSuite
from kvferry.testing.codecs import CodecSuite, fill_of

EVERY_LAYER = ("kv_bf16", "mla", "padded", "scalar", "uint8", "empty")
FLOAT_LAYERS = ("kv_bf16", "kv_fp16", "mla", "padded", "empty")


class TestRawCodec(CodecSuite):
    must_encode = EVERY_LAYER

    def make_codec(self) -> Codec:
        return RawCodec()


class OnBothKernels(CodecSuite):
    """Runs the suite on the native kernels and in numpy."""

    must_encode = FLOAT_LAYERS

    @pytest.fixture(autouse=True, params=["native", "numpy"])
    def _kernels(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if request.param == "native" and native().library is None:
            pytest.skip(f"no native kernels: {native().reason}")
        with use_kernels(request.param):
            yield


class TestEbpCodec(OnBothKernels):
    def make_codec(self) -> Codec:
        return EbpCodec()


class TestEbpCodecOfFourBits(OnBothKernels):
    def make_codec(self) -> Codec:
        return EbpCodec(bits=4)


class TestSplitCodec(OnBothKernels):
    def make_codec(self) -> Codec:
        return SplitCodec()


class TestInt8Codec(OnBothKernels):
    def make_codec(self) -> Codec:
        return Int8Codec()


class TestInt8CodecByChannel(OnBothKernels):
    def make_codec(self) -> Codec:
        return Int8Codec(k="channel", group=32)


class TestInt8CodecOverARange(OnBothKernels):
    def make_codec(self) -> Codec:
        return Int8Codec(k="range", group=7)


class TestInt8CodecOfValuesAlone(OnBothKernels):
    def make_codec(self) -> Codec:
        return Int8Codec(k="keep")


class TestInt4Codec(OnBothKernels):
    def make_codec(self) -> Codec:
        return Int4Codec()


class TestInt4CodecOfOddGroups(OnBothKernels):
    def make_codec(self) -> Codec:
        return Int4Codec(group=7)


class TestFp8Codec(OnBothKernels):
    def make_codec(self) -> Codec:
        return Fp8Codec()


class TestFp8CodecWithoutScale(OnBothKernels):
    def make_codec(self) -> Codec:
        return Fp8Codec(scaled=False)


class TestDedupCodec(OnBothKernels):
    def make_codec(self) -> Codec:
        return DedupCodec()


class TestDedupCodecOfRepeatedRows(OnBothKernels):
    """The same over rows that do repeat."""

    def make_codec(self) -> Codec:
        return DedupCodec("split")

    @pytest.fixture(autouse=True)
    def _rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def repeated(kind: str, nbytes: int) -> bytes:
            return (fill_of(kind, min(nbytes, 2048)) * (nbytes // 2048 + 1))[:nbytes]

        monkeypatch.setattr("kvferry.testing.codecs.fill_of", repeated)


class TestDedupCodecOfRaw(CodecSuite):
    must_encode = EVERY_LAYER

    def make_codec(self) -> Codec:
        return DedupCodec("raw")


class TestDedupCodecOfInt8(OnBothKernels):
    def make_codec(self) -> Codec:
        return DedupCodec("int8(k=channel)")


class TestLz4Stage(ByteStageSuite):
    def make_stage(self) -> ByteStage:
        return Lz4Stage()


class TestLz4StageInPieces(ByteStageSuite):
    def make_stage(self) -> ByteStage:
        stage = Lz4Stage(acceleration=2)
        stage.piece_nbytes = 4000
        return stage

    def test_config_rebuilds_an_equal_stage(self) -> None:
        assert self.make_stage().config() == {"acceleration": 2}


class TestZstdStage(ByteStageSuite):
    def make_stage(self) -> ByteStage:
        return ZstdStage()


class TestZstdStageOfLevel3(ByteStageSuite):
    def make_stage(self) -> ByteStage:
        return ZstdStage(level=3)


class TestShuffleStage(ArrayStageSuite):
    def make_stage(self) -> ArrayStage:
        return ShuffleStage()


class TestCastStage(ArrayStageSuite):
    def make_stage(self) -> ArrayStage:
        return CastStage()


class TestCastStageToFloat16(ArrayStageSuite):
    def make_stage(self) -> ArrayStage:
        return CastStage(to="float16")


class ZlibCodec(Codec):
    """A codec with a variable encoded size and a parameter, to try the suite itself."""

    codec_id: ClassVar[str] = "zlib"

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def max_encoded_nbytes(self, layer: LayerSpec, count: int = 1) -> int:
        return layer.nbytes * count + (layer.nbytes * count >> 8) + 64

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        if layer.nbytes and len(src) % layer.nbytes:
            raise CodecError("part of a slice")
        data = zlib.compress(src, self.level)
        if len(data) > len(dst):
            raise CodecError("output too small")
        dst[: len(data)] = data
        return len(data)

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        reader = zlib.decompressobj()
        try:
            data = reader.decompress(src, len(dst) + 1)
        except zlib.error as exc:
            raise CorruptBlockError(str(exc)) from exc
        if len(data) != len(dst) or not reader.eof or reader.unused_data:
            raise CorruptBlockError("not as long as what was encoded")
        dst[:] = data

    def config(self) -> CodecConfig:
        return {"level": self.level}

    @classmethod
    def from_config(cls, config: CodecConfig) -> Codec:
        if set(config) - {"level"}:
            raise CodecError(f"unknown parameters {sorted(config)}")
        return cls(int(config.get("level", 1)))


class TestZlibCodec(CodecSuite):
    def make_codec(self) -> Codec:
        return ZlibCodec(6)


class LyingCodec(ZlibCodec):
    """Loses one bit; the suite must notice."""

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        super().decode_into(src, layer, dst)
        if len(dst):
            dst[0] ^= 1


class LyingSuite(CodecSuite):
    def make_codec(self) -> Codec:
        return LyingCodec()


def test_the_suite_catches_a_codec_that_loses_a_bit() -> None:
    with pytest.raises(AssertionError):
        LyingSuite().test_round_trip("kv_bf16", "random", 1)


class RoughCast(CastStage):
    """Reads what it wrote as another value; the suite must notice."""

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        super().decode_into(src, layer, dst)
        if len(dst):
            dst[2] ^= 0x7F


class RoughSuite(ArrayStageSuite):
    def make_stage(self) -> ArrayStage:
        return RoughCast()


def test_the_suite_catches_a_stage_outside_its_bound() -> None:
    with pytest.raises(AssertionError):
        RoughSuite().test_round_trip("scalar", "values", 1)
