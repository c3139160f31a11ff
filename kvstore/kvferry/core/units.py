"""Sizes, times and rates as people write them.

``GB`` is 10**9 bytes and ``GiB`` 2**30. A letter alone (``8G``) is refused, since nothing says which of
the two it is, and so is ``Gb``, which some read as bits.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

from kvferry.core.errors import ConfigError

__all__ = [
    "format_nbytes",
    "format_rate",
    "format_seconds",
    "parse_nbytes",
    "parse_rate",
    "parse_seconds",
]

_NUMBER: Final = re.compile(r"\s*(\d{1,24}(?:\.\d{0,12})?|\.\d{1,12})\s*([^\d\s.]\S*)?\s*", re.ASCII)
_LIMIT: Final = 2**63

_SIZE_UNITS: Final = {
    "": 1, "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip
_BIT_UNITS: Final = {"bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_TIME_UNITS: Final = {
    "": Decimal(1), "ns": Decimal("1e-9"), "us": Decimal("1e-6"), "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"), "s": Decimal(1), "m": Decimal(60), "min": Decimal(60),
    "h": Decimal(3600), "d": Decimal(86400),
}  # fmt: skip

_SIZE_FORMS: Final = (
    "a number of bytes, or one with B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, as in 8GiB or 1.5GB"
)
_TIME_FORMS: Final = "a number of seconds, or one with us, ms, s, m, h or d, as in 5s, 200ms or 2m"
_RATE_FORMS: Final = "a number of bytes a second, or one as in 10Gbit, 100MB/s or 1GiB/s"


def _either_case(units: dict[str, Decimal]) -> dict[str, Decimal]:
    """``units`` also all in lower and all in upper case; mixed spellings such as ``Gb`` stay unknown."""
    return {
        spelling: scale for name, scale in units.items() for spelling in (name, name.lower(), name.upper())
    }


_SIZES: Final = _either_case({name: Decimal(scale) for name, scale in _SIZE_UNITS.items()})
_RATES: Final = _either_case(
    {name + "/s": Decimal(scale) for name, scale in _SIZE_UNITS.items() if name}
    | {name + per: Decimal(scale) / 8 for name, scale in _BIT_UNITS.items() for per in ("", "/s")}
    | {"bps": Decimal(1) / 8, "kbps": Decimal(125), "Mbps": Decimal(125_000), "Gbps": Decimal(125_000_000)}
    | {"": Decimal(1)}
)


def _scaled(value: str | float, units: dict[str, Decimal], what: str, forms: str) -> tuple[Decimal, str]:
    """The number that ``value`` stands for, in the base unit, and the unit that it was written in."""
    refused = f"{value!r} is not a {what}: write {forms}"
    if isinstance(value, bool):
        raise ConfigError(refused)
    if isinstance(value, int | float):
        if not math.isfinite(value) or value < 0:
            raise ConfigError(refused)
        number, unit = Decimal(value), ""
    else:
        match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
        if match is None or (match[2] or "") not in units:
            raise ConfigError(refused)
        unit = match[2] or ""
        number = Decimal(match[1]) * units[unit]
    if number >= _LIMIT:
        raise ConfigError(f"{value!r} is too large for a {what}: the limit is 2**63 - 1")
    return number, unit


def parse_nbytes(value: str | float) -> int:
    """A size in bytes; fractions of a unit are rounded to whole bytes.

    Args:
        value: ``"8GiB"``, ``"1.5GB"``, ``"512 MiB"``, ``"4096"`` or a number of bytes.

    Raises:
        ConfigError: If it is none of these, negative, not a whole number of bytes, or over 2**63 - 1.
    """
    number, unit = _scaled(value, _SIZES, "size", _SIZE_FORMS)
    if unit in ("", "B", "b") and number != number.to_integral_value():
        raise ConfigError(f"{value!r} is not a size: bytes come whole; write {_SIZE_FORMS}")
    return round(number)


def parse_seconds(value: str | float) -> float:
    """A time in seconds.

    Args:
        value: ``"5s"``, ``"200ms"``, ``"2m"``, ``"1.5"`` or a number of seconds.

    Raises:
        ConfigError: If it is none of these, negative or not finite.
    """
    return float(_scaled(value, _TIME_UNITS, "time", _TIME_FORMS)[0])


def parse_rate(value: str | float) -> float:
    """A rate in bytes a second.

    Args:
        value: ``"10Gbit"`` (also ``Gbit/s``, ``Gbps``), ``"100MB/s"``, ``"1GiB/s"`` or a number of bytes
            a second.

    Raises:
        ConfigError: If it is none of these, negative, not finite, or zero.
    """
    number, _ = _scaled(value, _RATES, "rate", _RATE_FORMS)
    if number == 0:
        raise ConfigError(f"{value!r} is not a rate: nothing would ever be sent; write {_RATE_FORMS}")
    return float(number)


def _significant(value: float) -> str:
    """Three significant digits, without an exponent and without trailing zeros behind a point."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _in_steps(value: float, base: int, names: tuple[str, ...]) -> str:
    for name in names[:-1]:
        # What would be rounded up to the next step is written in it.
        if value < base - 0.5:
            return f"{_significant(value)} {name}"
        value /= base
    return f"{_significant(value)} {names[-1]}"


def format_nbytes(nbytes: float) -> str:
    """``nbytes`` for people, in binary units: ``"512 B"``, ``"1.5 GiB"``."""
    sign = "-" if nbytes < 0 else ""
    return sign + _in_steps(abs(nbytes), 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_rate(nbytes_per_s: float) -> str:
    """A rate for people, in decimal units: ``"1.25 GB/s"``."""
    return _in_steps(nbytes_per_s, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def format_seconds(seconds: float) -> str:
    """A time for people: ``"85 µs"``, ``"1.25 s"``, ``"2 m 5 s"``, ``"3 h 0 m"``."""
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 59.95:
        for scale, name in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
            if seconds * scale < 999.5:
                return f"{sign}{_significant(seconds * scale)} {name}" if seconds else "0 s"
        return f"{sign}{_significant(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{sign}{whole // 60} m {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{sign}{minutes // 60} h {minutes % 60} m"
