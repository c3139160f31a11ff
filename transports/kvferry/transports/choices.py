"""What ``auto`` chose, and why: for who asks a connection, for logs, and for the status of a process."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from kvferry.transports.base import Connection

__all__ = [
    "Choice",
    "Rejected",
    "announce_region",
    "announced_regions",
    "explain",
    "recent_choices",
    "record_choice",
    "record_use",
    "uses",
    "withdraw_region",
]

_log = logging.getLogger(__name__)
_MAX_RECENT: Final = 64
_MAX_SAID: Final = 1024


@dataclass(frozen=True, slots=True)
class Rejected:
    """A transport that was not taken, and the reason."""

    scheme: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Over which transport a connection runs.

    Attributes:
        scheme: The transport: ``unix``, ``ucx`` or ``tcp``.
        reason: Why this one.
        rejected: The others, best first.
        fell_back: Whether something better was wanted and the address allowed to go on without it.
        regions: Region transports that both processes have announced; who moves blocks may use one beside
            the connection.
    """

    scheme: str
    reason: str
    rejected: tuple[Rejected, ...] = ()
    fell_back: bool = False
    regions: tuple[str, ...] = ()

    def __str__(self) -> str:
        others = "".join(f"; not {one.scheme}: {one.reason}" for one in self.rejected)
        regions = f"; beside it: {', '.join(self.regions)}" if self.regions else ""
        return f"{self.scheme}, {self.reason}{others}{regions}"


def explain(connection: Connection) -> Choice | None:
    """The choice behind ``connection``; ``None`` if its address named the transport itself."""
    found = getattr(connection, "choice", None)
    return found if isinstance(found, Choice) else None


_lock: Final = threading.Lock()
_recent: Final[OrderedDict[str, Choice]] = OrderedDict()
_uses: dict[str, str] = {}
_said: Final[OrderedDict[Hashable, None]] = OrderedDict()
_regions: Final[dict[str, int]] = {}


def record_choice(url: str, choice: Choice) -> None:
    """Keep ``choice`` as the last one for ``url``; says it in the log if it is a new one."""
    with _lock:
        known = _recent.get(url) == choice
        _recent[url] = choice
        _recent.move_to_end(url)
        while len(_recent) > _MAX_RECENT:
            _recent.popitem(last=False)
    if choice.fell_back and is_first(("fallback", url, choice)):
        _log.warning("%s: fell back to %s", url, choice)
    else:
        _log.log(logging.DEBUG if known else logging.INFO, "%s: %s", url, choice)


def is_first(key: Hashable) -> bool:
    """Whether ``key`` was not asked about before: for what is said once a process."""
    with _lock:
        if key in _said:
            return False
        _said[key] = None
        while len(_said) > _MAX_SAID:
            _said.popitem(last=False)
        return True


def recent_choices() -> dict[str, Choice]:
    """The last choice for each address that this process dialled or listens on, at most 64; oldest first."""
    with _lock:
        return dict(_recent)


def record_use(what: str, how: str) -> None:
    """This process uses a library with settings of its own, which its status tells from now on."""
    with _lock:
        _uses[what] = how


def uses() -> dict[str, str]:
    """Libraries with settings that this process uses: which of them took effect, and who decided."""
    with _lock:
        return dict(_uses)


def announce_region(name: str) -> None:
    """This process has an endpoint of the region transport ``name``, which its peers are told from now on.

    Each call needs its :func:`withdraw_region`.
    """
    with _lock:
        _regions[name] = _regions.get(name, 0) + 1


def withdraw_region(name: str) -> None:
    """The endpoint was closed."""
    with _lock:
        _regions[name] = _regions.get(name, 0) - 1
        if _regions[name] <= 0:
            del _regions[name]


def announced_regions() -> tuple[str, ...]:
    """The region transports of this process, by name."""
    with _lock:
        return tuple(sorted(_regions))
