"""Checks of plain values that callers give: the message names the field, its value and what it may be."""

from __future__ import annotations

import math

from kvferry.core.errors import ConfigError

__all__ = ["require_bool", "require_number", "require_text", "require_whole"]


def require_whole(name: str, value: object, *, least: int | None = None, most: int | None = None) -> None:
    """Refuse what is no ``int`` from ``least`` to ``most``; ``True`` is none.

    Raises:
        ConfigError: With the name of the field.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, must be a whole number")
    if least is not None and most is not None and not least <= value <= most:
        raise ConfigError(f"{name} is {value}, must lie in {least}..{most}")
    if least is not None and value < least:
        wanted = "must not be negative" if least == 0 else f"must be at least {least}"
        raise ConfigError(f"{name} is {value}, {wanted}")


def require_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> None:
    """Refuse what is no finite ``int`` or ``float`` within the bounds.

    Raises:
        ConfigError: With the name of the field.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, must be a number")
    if not math.isfinite(value):
        raise ConfigError(f"{name} is {value}, must be a finite number")
    bounds = [
        f"{word} {bound:g}"
        for word, bound, holds in (
            ("at least", least, least is None or value >= least),
            ("above", above, above is None or value > above),
            ("at most", most, most is None or value <= most),
        )
        if bound is not None and not holds
    ]
    if bounds:
        raise ConfigError(f"{name} is {value}, must be {' and '.join(bounds)}")


def require_bool(name: str, value: object) -> None:
    """Refuse what is neither ``True`` nor ``False``.

    Raises:
        ConfigError: With the name of the field.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, must be true or false")


def require_text(name: str, value: object) -> None:
    """Refuse what is no ``str``.

    Raises:
        ConfigError: With the name of the field.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}, must be text")
