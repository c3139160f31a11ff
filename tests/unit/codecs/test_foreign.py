"""Stages of others that break the contract: refused, or an error that names them; never wrong bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvferry.codecs import ArrayStage, Codec, CodecConfig, CodecPipeline, decode_frame, registry
from kvferry.core.errors import CodecError, PluginUnavailableError, UnknownPluginError
from kvferry.core.spec import KVSpec, LayerSpec
from kvferry.store.encoded_block import BlockCodec
from kvferry.testing.codecs import fill_of, kv_layer

LAYER = kv_layer(16, 2, 64)
SPEC = KVSpec(model="m", revision="r", layers=(LAYER,) * 2, block_tokens=16)


class Odd(Codec):
    """Knows slices whose halves are equal; tests replace what it does."""

    codec_id: ClassVar[str] = "odd"

    def config(self) -> CodecConfig:
        return {}

    def max_encoded_nbytes(self, layer: LayerSpec, count: int = 1) -> int:
        return layer.nbytes * count

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        half = len(src) // 2
        dst[:half] = src[:half]
        return half

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        dst[: len(src)] = dst[len(src) :] = src


class Arranging(ArrayStage):
    """Keeps the arrangement, and spoils what it is given."""

    codec_id: ClassVar[str] = "arranging"

    def encoded_layer(self, layer: LayerSpec) -> LayerSpec:
        return layer

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        dst[:] = src
        src[:] = bytes(len(src))

    decode_into = encode_into


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    registry.register("odd", Odd)
    registry.register("arranging", Arranging)
    yield
    registry.unregister("odd")
    registry.unregister("arranging")


def encode(text: str, data: memoryview) -> memoryview:
    pipeline = CodecPipeline.parse(text)
    room = memoryview(bytearray(pipeline.max_encoded_nbytes(LAYER)))
    return room[: pipeline.encode_into(data, LAYER, room)]


def halves() -> memoryview:
    return memoryview(bytearray(2 * fill_of("values", LAYER.nbytes // 2)))


def raises(*_: object) -> Any:
    raise RuntimeError("a bug of others")


CONFIGS: list[Callable[..., Any]] = [
    lambda _: None,
    lambda _: {"x": object()},
    lambda _: {"x": 1},  # which from_config does not take
    lambda _: {"x": "a, b"},  # which is no text that can be read back
    lambda _: [("x", 1)],
    raises,
]


@pytest.mark.parametrize("config", CONFIGS, ids=["none", "object", "unknown", "comma", "list", "raises"])
def test_parameters_from_which_a_stage_cannot_be_built_again(
    monkeypatch: pytest.MonkeyPatch, config: Callable[..., Any]
) -> None:
    """Frames name them, and nobody could decode those."""
    monkeypatch.setattr(Odd, "config", config)
    with pytest.raises((PluginUnavailableError, CodecError), match="'odd'"):
        CodecPipeline.parse("odd")


def test_parameters_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(9))
    monkeypatch.setattr(Odd, "config", lambda _: {"x": next(numbers)})
    monkeypatch.setattr(Odd, "from_config", classmethod(lambda cls, _: cls()))
    with pytest.raises(PluginUnavailableError, match=r"no equal stage.*tell its authors"):
        CodecPipeline.parse("odd")
    monkeypatch.setattr(Odd, "from_config", classmethod(lambda *_: None))
    with pytest.raises(PluginUnavailableError, match="makes None of its parameters"):
        CodecPipeline.parse("odd")


@pytest.mark.parametrize("bound", [float("nan"), "0.1", None, -0.5, True])
def test_a_bound_that_cannot_be_is_told_before_anything_is_encoded(
    monkeypatch: pytest.MonkeyPatch, bound: object
) -> None:
    monkeypatch.setattr(Odd, "error_bound", lambda *_: bound)
    monkeypatch.setattr(Odd, "lossless", False)
    pipeline = CodecPipeline.parse("odd")
    assert "for the bound of its error, must be a number from 0 on" in pipeline.unsupported(SPEC)
    assert "odd is not used" in BlockCodec(SPEC, {"odd": pipeline}).unused


def test_a_bound_may_be_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "error_bound", lambda *_: np.float32(0.5))
    assert CodecPipeline.parse("odd").error_bound(LAYER.tensors[0]) == 0.5


@pytest.mark.parametrize("text", ["odd", "dedup(inner=odd)", "odd|lz4"])
def test_what_says_that_it_is_lossless_is_held_to_it(text: str) -> None:
    """Not of every slice: the first ones, some of the next, and all while one was wrong."""
    data = halves()
    out = memoryview(bytearray(len(data)))
    decode_frame(encode(text, data), LAYER, out)
    assert out == data
    pipeline = CodecPipeline.parse(text)
    pipeline.checks.counted(5)  # of other threads, which began at the same time
    room = memoryview(bytearray(pipeline.max_encoded_nbytes(LAYER)))
    wrong = memoryview(fill_of("values", LAYER.nbytes))
    for _ in range(40):
        with pytest.raises(CodecError, match="says that it is lossless, and is not; tell its authors"):
            pipeline.encode_into(wrong, LAYER, room)


@pytest.mark.parametrize("text", ["arranging", "arranging|ebp", "shuffle|arranging|lz4", "dedup(inner=odd)"])
def test_what_is_encoded_is_not_theirs_to_write(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def spoiling(_: Odd, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        src[:] = bytes(len(src))
        return 0

    monkeypatch.setattr(Odd, "encode_into", spoiling)
    data = halves()
    before = bytes(data)
    if text.startswith("shuffle"):  # what is between two stages is nobody's
        encode(text, data)
    else:
        with pytest.raises(TypeError, match="read-only"):
            encode(text, data)
    assert data == before


@pytest.mark.parametrize("text", ["odd", "odd|lz4", "dedup(inner=odd)"])
@pytest.mark.parametrize("verb", ["encode_into", "decode_into"])
def test_no_stage_ends_a_thread(monkeypatch: pytest.MonkeyPatch, text: str, verb: str) -> None:
    frame = encode(text, halves())
    monkeypatch.setattr(Odd, verb, lambda *_: sys.exit(3))
    with pytest.raises(CodecError, match=r"called sys.exit\(3\); tell its authors"):
        encode(text, halves())
    if verb == "decode_into":
        with pytest.raises(CodecError, match=r"called sys\.exit"):
            decode_frame(frame, LAYER, memoryview(bytearray(LAYER.nbytes)))


@pytest.mark.parametrize("text", ["odd", "dedup(inner=odd)"])
@pytest.mark.parametrize("size", [-5, 1.5, True, None, 1 << 40])
def test_sizes_that_cannot_be(monkeypatch: pytest.MonkeyPatch, text: str, size: object) -> None:
    monkeypatch.setattr(Odd, "encode_into", lambda *_: size)
    with pytest.raises(CodecError, match=r"'odd' gave back .* for a size"):
        encode(text, halves())


def test_a_size_may_be_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Odd.encode_into
    monkeypatch.setattr(Odd, "encode_into", lambda *given: np.int64(plain(*given)))
    out = memoryview(bytearray(LAYER.nbytes))
    decode_frame(encode("odd", halves()), LAYER, out)
    assert out == halves()


def test_names_in_other_letters_are_found() -> None:
    """And told as what they are: a name that does not exist."""
    with pytest.raises(UnknownPluginError, match="no plug-in 'EBP', did you mean ebp"):
        CodecPipeline.parse("EBP")


def test_ours_are_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = CodecPipeline.parse("ebp|lz4")
    monkeypatch.setattr(pipeline, "_spoilt", raises)
    room = memoryview(bytearray(pipeline.max_encoded_nbytes(LAYER)))
    for _ in range(40):
        pipeline.encode_into(halves(), LAYER, room)
