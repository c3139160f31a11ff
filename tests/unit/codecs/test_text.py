from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.codecs import ByteStage, CodecConfig, CodecPipeline, decode_frame, registry
from kvferry.codecs.frame import header_bytes, stage_bytes
from kvferry.codecs.text import parse_stages, stage_text
from kvferry.core.errors import CodecError, PluginUnavailableError, UnknownPluginError
from kvferry.core.spec import DType, LayerSpec, TensorSpec

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63), st.floats(allow_nan=False, allow_infinity=False), st.booleans()
)


@pytest.mark.parametrize(
    "text",
    [
        "raw",
        "ebp",
        "ebp(bits=4)",
        "int8(k=channel, group=32, bound=0.5)",
        "fp8(scaled=false)",
        "shuffle|zstd(level=3)",
        "int4(group=64)|lz4(acceleration=9)|zstd(level=-7)",
    ],
)
def test_text_to_pipeline_and_back(text: str) -> None:
    pipeline = CodecPipeline.parse(text)
    assert pipeline.text == text
    assert repr(pipeline) == f"<CodecPipeline {text}>"
    assert CodecPipeline.parse(pipeline.text).text == text


def test_spaces_and_defaults_are_left_out() -> None:
    assert CodecPipeline.parse(" int8( k = token,group=64 ) | zstd( level = 1 ) ").text == "int8|zstd"
    assert CodecPipeline.parse("ebp()").text == "ebp"
    assert CodecPipeline([]).text == "raw"


@given(NAMES, st.dictionaries(NAMES, NUMBERS, max_size=4))
def test_parameters_come_back_with_their_types(name: str, config: dict[str, float]) -> None:
    assert parse_stages(stage_text(name, config)) == [(name, config)]
    again = parse_stages(stage_text(name, config))[0][1]
    assert [type(value) for value in again.values()] == [type(value) for value in config.values()]


def test_parentheses_within_parameters() -> None:
    found = parse_stages("dedup(inner=int8(k=channel, group=32), rows=4)|lz4")
    assert found == [("dedup", {"inner": "int8(k=channel, group=32)", "rows": 4}), ("lz4", {})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no stage"),
        ("ebp||lz4", "is no stage"),
        ("ebp|", "is no stage"),
        ("ebp(bits=4", "parentheses"),
        ("ebp)bits=4(", "parentheses"),
        ("ebp(bits=4)x", "is no stage"),
        ("ebp(bits)", "parameter=value"),
        ("ebp(=4)", "parameter=value"),
        ("ebp(bits=)", "parameter=value"),
        ("ebp(bits=3, bits=3)", "given twice"),
        ("ebp(bitz=4)", "did you mean bits"),
        ("lz4|ebp", "array stages come first"),
        ("ebp|int8", "array stages come first"),
        ("ebp|shuffle", "array stages come first"),
        ("raw|raw", "array stages come first"),
        ("ebp(bits=5)", "3 or 4"),
        ("ebp(bits=2)", "3 or 4"),
        ("ebp(bits=3.0)", "3 or 4"),
        ("ebp(bits=true)", "3 or 4"),
        ("int8(k=chanel)", "token or channel"),
        ("int8(group=0)", "from 1 to 65535"),
        ("int8(bound=nan)", "a number above 0, up to 1"),
        ("int8(bound=0)", "a number above 0, up to 1"),
        ("int4(group=128)", "from 1 to 127"),
        ("int4(bound=2)", "a number above 0, up to 1"),
        ("fp8(scaled=1)", "true or false"),
        ("zstd(level=20)", "from -7 to 19"),
        ("lz4(acceleration=0)", "from 1 to 65537"),
        ("shuffle(size=2)", "no parameters"),
        ("raw(size=2)", "no parameters"),
    ],
)
def test_texts_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        CodecPipeline.parse(text)


def test_a_stage_that_does_not_exist_has_the_nearest_name() -> None:
    with pytest.raises(UnknownPluginError, match="did you mean shuffle"):
        CodecPipeline.parse("shufle|zstd")


class _Strict(ByteStage):
    """A stage of others, which knows nothing of our errors."""

    codec_id = "strict"

    @classmethod
    def from_config(cls, config: CodecConfig) -> _Strict:
        int(config["level"])
        return cls()

    def max_encoded_nbytes(self, nbytes: int) -> int:
        return nbytes

    def encode_into(self, src: memoryview, dst: memoryview) -> int:
        raise NotImplementedError

    def decode_into(self, src: memoryview, dst: memoryview) -> int:
        raise NotImplementedError


def test_what_stages_of_others_raise_is_an_error_of_codecs() -> None:
    registry.register("strict", _Strict)
    registry.register("number", 3)  # type: ignore[arg-type]
    registry.register("other", _Strict)
    try:
        for text in ("strict", "strict(level=x)"):
            with pytest.raises(CodecError, match="codec 'strict' does not take"):
                CodecPipeline.parse(text)
        with pytest.raises(PluginUnavailableError, match="'number' is 3, must be a subclass of"):
            CodecPipeline.parse("number")
        with pytest.raises(PluginUnavailableError, match="'other' calls itself 'strict'; tell its authors"):
            CodecPipeline.parse("other")
        layer = LayerSpec((TensorSpec("k", (4, 8), DType.BFLOAT16),))
        stages = stage_bytes((("strict", {"level": "x"}),))
        found = header_bytes(stages, layer.nbytes, 1, lossy=False) + b"\0"
        with pytest.raises(CodecError, match="codec 'strict' does not take"):
            decode_frame(memoryview(found), layer, memoryview(bytearray(layer.nbytes)))
    finally:
        registry.unregister("strict")
        registry.unregister("number")
        registry.unregister("other")
