"""What goes wrong, said once: one log line a kind until it is over, repeats counted and summed."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Final

from kvferry.core.cause import Cause

__all__ = ["Problems"]

_SUM_S: Final = 10.0


class Problems:
    """Problems of one tier. Thread safe; no lock is held while a line is written.

    *Conditions* last (a full device): logged when they begin, when they are over, and when there is another
    kind of reason for them. *Incidents* happen (a corrupt block): each kind at most one line in 10 s, with
    the number that it stands for.
    """

    def __init__(self, tier: str, log: logging.Logger) -> None:
        self._tier = tier
        self._log = log
        self._lock = threading.Lock()
        self._conditions: dict[tuple[str, str], Cause] = {}
        self._said_at: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def begin(self, where: str, kind: str, text: str) -> None:
        """A condition is there; logged unless it was already, for that kind of reason."""
        with self._lock:
            known = self._conditions.get((where, kind))
            if known is None:
                self._conditions[where, kind] = Cause(text)
            due = known is not None and known.now(text)
        if known is None:
            self._log.warning("tier %s: %s: %s; going on without it", self._tier, where, text)
        elif due:
            self._log.warning("tier %s: %s: the reason is another now: %s", self._tier, where, text)

    def end(self, where: str, kind: str) -> None:
        """A condition is over; cheap when it was not there."""
        if (where, kind) not in self._conditions:
            return
        with self._lock:
            over = self._conditions.pop((where, kind), None)
        if over is not None:
            self._log.info("tier %s: %s: works again, after: %s", self._tier, where, over.reason)

    def has(self, where: str, kind: str) -> bool:
        """Whether a condition is there."""
        return (where, kind) in self._conditions

    def incident(self, kind: str, text: str) -> None:
        """Something happened once."""
        now = time.monotonic()
        with self._lock:
            if now < self._said_at.get(kind, -_SUM_S) + _SUM_S:
                self._unsaid[kind] += 1
                return
            self._said_at[kind] = now
            more = self._unsaid.pop(kind, 0)
        self._log.warning(
            "tier %s: %s: %s%s",
            self._tier,
            kind,
            text,
            f" (and {more} more since the last line)" if more else "",
        )

    def conditions(self) -> dict[str, str]:
        """The conditions that are there now, by where and kind."""
        with self._lock:
            return {f"{where}: {kind}": cause.reason for (where, kind), cause in self._conditions.items()}
