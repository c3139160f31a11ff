from __future__ import annotations

import pytest

from kvferry.codecs.compressed import Lz4Stage, ZstdStage
from kvferry.codecs.ebp import EbpCodec
from kvferry.codecs.parameters import Parameters
from kvferry.codecs.quantised import Fp8Codec, Int4Codec, Int8Codec
from kvferry.core.errors import CodecError


def test_values_and_defaults() -> None:
    given = Parameters("x", {"size": 3, "share": 1, "word": "a", "on": False, "name": "n"})
    assert given.integer("size", 1, 0, 9) == 3
    assert given.integer("other", 7, 0, 9) == 7
    assert given.fraction("share") == 1.0
    assert given.fraction("part") is None
    assert given.choice("word", "b", ("a", "b")) == "a"
    assert given.flag("on", default=True) is False
    assert given.text("name", "") == "n"
    given.check()


def test_what_was_not_asked_for_is_refused_with_the_nearest_name() -> None:
    given = Parameters("x", {"sise": 3})
    given.integer("size", 1, 0, 9)
    with pytest.raises(CodecError, match="'x' has no parameter 'sise', did you mean size"):
        given.check()
    with pytest.raises(CodecError, match="it has none"):
        Parameters("x", {"size": 3}).check()
    with pytest.raises(CodecError, match="did you mean size"):
        Parameters("x", {"sise": 3}).plain("size")


@pytest.mark.parametrize("value", [True, "3", 3.0, -1, 10])
def test_no_whole_number(value: str | float) -> None:
    with pytest.raises(CodecError, match="a whole number from 0 to 9"):
        Parameters("x", {"size": value}).integer("size", 1, 0, 9)


@pytest.mark.parametrize("value", [True, "0.5", float("nan"), float("inf"), -0.1, 0, 0.0, 1.1])
def test_no_fraction(value: str | float) -> None:
    with pytest.raises(CodecError, match="a number above 0, up to 1"):
        Parameters("x", {"share": value}).fraction("share")


def test_no_word_and_no_flag() -> None:
    with pytest.raises(CodecError, match="a or b"):
        Parameters("x", {"word": "c"}).choice("word", "b", ("a", "b"))
    with pytest.raises(CodecError, match="true or false"):
        Parameters("x", {"on": 1}).flag("on", default=True)


def test_constructors_check_what_they_are_given() -> None:
    with pytest.raises(CodecError):
        EbpCodec(bits=2)
    with pytest.raises(CodecError):
        Int8Codec(k="chanel")
    with pytest.raises(CodecError):
        Int8Codec(bound=-1)
    with pytest.raises(CodecError):
        Int4Codec(group=128)
    with pytest.raises(CodecError):
        Fp8Codec(group=0)
    with pytest.raises(CodecError):
        ZstdStage(level=30)
    with pytest.raises(CodecError):
        Lz4Stage(acceleration=-1)
