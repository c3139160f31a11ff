"""Which codecs are configured, and which of them two ends agree on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.codecs import registry
from kvferry.core import DType
from kvferry.core.errors import ConfigError
from kvferry.streaming import StreamCodec, codec_capabilities
from kvferry.testing.prompt_kv import kv_spec

SPEC = kv_spec(4, kv_heads=2, head_dim=32, dtype=DType.BFLOAT16)


def test_what_is_configured() -> None:
    assert StreamCodec().lossy_line() == ""
    assert StreamCodec("int8").lossy_line().startswith("lossy: int8 encodes")
    assert StreamCodec("int8").accepts_lossy
    assert not StreamCodec("ebp").accepts_lossy
    assert "int8" not in StreamCodec("auto").pipelines
    assert "int8(k=range)" in StreamCodec("auto", allow_lossy=True).pipelines
    assert "may be chosen" in StreamCodec("auto", allow_lossy=True).lossy_line()
    with pytest.raises(ConfigError, match="needs allow_lossy=true"):
        StreamCodec("auto", candidates=["int8"])
    with pytest.raises(ConfigError, match=r"'ebb'.*write raw, auto or a pipeline"):
        StreamCodec("ebb")
    assert "codec.ebp.1" in codec_capabilities()


def test_what_an_end_cannot_decode_is_not_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry.describe()
    lz4 = next(info for info in found if info.name == "lz4")
    found[found.index(lz4)] = replace(lz4, ok=False, problem="it cannot be imported")
    monkeypatch.setattr(registry, "describe", lambda: found)
    assert "codec.lz4.1" not in codec_capabilities()
    link = StreamCodec("shuffle|lz4").link("x")
    assert link is not None
    assert link.agree(codec_capabilities(), SPEC) == ()
    assert "the other end cannot decode 'lz4'" in link.status().line()

    inside = StreamCodec("dedup(inner=split)").link("x")
    assert inside is not None
    assert inside.agree(["codec.dedup.1"], SPEC) == ()
    assert "the other end cannot decode 'split'" in inside.status().line()
    assert inside.agree(codec_capabilities(), SPEC) == ("dedup(inner=split)",)
