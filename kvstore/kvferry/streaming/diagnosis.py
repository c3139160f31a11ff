"""Whether the codec that a configuration names for streams can be had."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvferry.core.diagnosis import Finding, Probe
from kvferry.core.errors import ConfigError
from kvferry.streaming.codec import StreamCodec

__all__ = ["codec_probe"]

_NAME = "stream.codec"
_WHY = "the configuration asks for it (stream.codec)"


def codec_probe(text: str, *, allow_lossy: bool) -> tuple[str, str, Probe]:
    """A probe of ``stream.codec``."""
    return "codecs", _NAME, partial(_look, text, allow_lossy)


def _look(text: str, allow_lossy: bool) -> Iterator[Finding]:
    try:
        codec = StreamCodec(text, allow_lossy=allow_lossy)
    except ConfigError as error:
        yield Finding("codecs", _NAME, str(error), "fail", _WHY, "do what it says, or set stream.codec=raw")
    else:
        yield Finding("codecs", _NAME, codec.describe(), why=_WHY)
