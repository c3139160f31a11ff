"""Reading the parameters of a stage, with errors that name it."""

from __future__ import annotations

from typing import Any, Final

from kvferry.codecs.base import CodecConfig
from kvferry.core.errors import CodecError
from kvferry.core.nearest import did_you_mean, shown

__all__ = ["Parameters"]

_LONGEST: Final = 100


class Parameters:
    """The parameters of one stage; each is asked for once, :meth:`check` refuses the rest."""

    def __init__(self, codec_id: str, config: CodecConfig) -> None:
        self._codec_id = codec_id
        self._config = config
        self._known: list[str] = []

    def integer(self, name: str, default: int, lowest: int, highest: int) -> int:
        """A whole number in a range.

        Raises:
            CodecError: If it is none or outside.
        """
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise self._wrong(name, value, f"a whole number from {lowest} to {highest}")
        return value

    def fraction(self, name: str) -> float | None:
        """A number above 0, up to 1, or ``None`` if it is not given; errors as :meth:`integer`."""
        if name not in self._config:
            self._known.append(name)
            return None
        value = self._take(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise self._wrong(name, value, "a number above 0, up to 1")
        return float(value)

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        """One of some words; errors as :meth:`integer`."""
        value = self._take(name, default)
        if value not in allowed:
            raise self._wrong(name, value, " or ".join(allowed))
        return str(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """``true`` or ``false``; errors as :meth:`integer`."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Any text."""
        return str(self._take(name, default))

    def plain(self, *names: str) -> dict[str, Any]:
        """Those of ``names`` that were given, unchecked; raises for others as :meth:`check`."""
        self._known += names
        self.check()
        return dict(self._config)

    def check(self) -> None:
        """Every parameter was asked for.

        Raises:
            CodecError: If one was not; with the nearest name.
        """
        for name in self._config:
            if name not in self._known:
                existing = f"it has {', '.join(self._known)}" if self._known else "it has none"
                near = did_you_mean(name[:_LONGEST], self._known)
                raise CodecError(
                    f"codec {self._codec_id!r} has no parameter {shown(name)}{near} ({existing})"
                )

    def _take(self, name: str, default: str | float | bool) -> str | int | float | bool:
        self._known.append(name)
        return self._config.get(name, default)

    def _wrong(self, name: str, value: object, allowed: str) -> CodecError:
        return CodecError(f"codec {self._codec_id!r}: {name} is {shown(value)}; write {allowed}")
