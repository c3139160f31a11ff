"""The text form of pipelines: ``shuffle|zstd(level=3)``, ``dedup(inner=int8(k=channel))``."""

from __future__ import annotations

import math
import re
from typing import Final

from kvferry.codecs.base import CodecConfig
from kvferry.codecs.frame import StageId
from kvferry.core.errors import CodecError
from kvferry.core.nearest import shown

__all__ = ["parse_stages", "stage_text"]

_STAGE: Final = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:\((.*)\))?", re.ASCII | re.DOTALL)


def parse_stages(text: str) -> list[StageId]:
    """Names and parameters of the stages in ``text``, unchecked.

    Raises:
        CodecError: If it is malformed.
    """
    if not isinstance(text, str):
        raise CodecError(f"a codec is {type(text).__name__}, must be text such as ebp or shuffle|zstd")
    return [_parse(text, part) for part in _cut(text, text, "|")]


def stage_text(name: str, config: CodecConfig) -> str:
    """One stage as :func:`parse_stages` reads it."""
    values = ", ".join(f"{key}={_written(value)}" for key, value in config.items())
    return f"{name}({values})" if values else name


def _written(value: str | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse(text: str, part: str) -> StageId:
    found = _STAGE.fullmatch(part)
    if found is None:
        raise CodecError(
            f"codec {shown(text)}: {shown(part)} is no stage; write name or name(parameter=value, ...)"
        )
    config: dict[str, str | int | float | bool] = {}
    for item in _cut(text, found[2] or "", ","):
        name, equals, value = map(str.strip, item.partition("="))
        if not item:
            continue
        if not name or not equals or not value or name in config:
            raise CodecError(
                f"codec {shown(text)}: {shown(item)} is not of the form parameter=value, or given twice"
            )
        config[name] = _value(value)
    return found[1], config


def _cut(text: str, part: str, at: str) -> list[str]:
    """``part`` cut at a sign that stands outside all parentheses, without spaces around the pieces."""
    found, depth, start = [], 0, 0
    for place, sign in enumerate(part):
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            break
        if sign == at and not depth:
            found.append(part[start:place].strip())
            start = place + 1
    if depth:
        raise CodecError(f"codec {shown(text)}: the parentheses do not match")
    return [*found, part[start:].strip()]


def _value(text: str) -> str | int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    return text
