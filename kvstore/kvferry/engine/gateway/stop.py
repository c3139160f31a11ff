"""Stop strings: where a text ends, and what must be held back until that is certain."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopText"]


class StopText:
    """Cuts a text before the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What of ``text``, and of what was held back, can be given out."""
        if self.stopped:
            return ""
        pending = self._held + text
        found = [i for s in self._stop if (i := pending.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return pending[: min(found)]
        keep = self._beginning_of_stop(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def finish(self) -> str:
        """What was held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        return "" if self.stopped else held

    def _beginning_of_stop(self, text: str) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
