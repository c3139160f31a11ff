"""The nearest of several names, for messages about an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest", "shown"]

_SHOWN = 80


def shown(value: object) -> str:
    """``repr`` of something for a message, cut where it is long: whoever wrote it knows how it goes on."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or ``None`` if none is near."""
    by_lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``", did you mean X?"``, or an empty string if no known name is near."""
    found = nearest(name, known)
    return f", did you mean {found}?" if found is not None else ""
