"""Which pipeline a tier should use: where one thread encodes and writes, or reads and decodes, in turn.

There nothing overlaps, so the costs are added: a pipeline that makes KV ``r`` times smaller costs
``encode + medium / r + decode`` seconds a byte of KV, and KV as it is ``medium``, all that the medium
needs to take and to give a byte. That is seen with every block, however it goes, since a tier sees it apart
from the codec; a link is not (:mod:`kvferry.codecs.adaptive`).

Pure: no threads, no I/O; the clock is given.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvferry.codecs.choice import RAW, CandidateStatus, ChoiceStatus
from kvferry.codecs.costs import CallCost, FlowCost

__all__ = ["SerialChoice"]

_GAIN: Final = 0.97
"""Another pipeline is taken when it is predicted to take less than this share of the time."""
_TRIALS: Final = 3
_TRIAL_EVERY_S: Final = 0.02
_AGAIN_EVERY_S: Final = 1.0
_STALE_S: Final = 3.0
_OLD_S: Final = 30.0


@dataclass(slots=True)
class _Candidate:
    name: str
    encode: CallCost = field(default_factory=CallCost)
    decode: CallCost = field(default_factory=CallCost)
    size: float = 0.0  # encoded bytes a byte
    tried_at: float = -math.inf

    @property
    def known(self) -> bool:
        return self.encode.count > 0 and self.decode.count > 0

    def cost(self, medium: float) -> float:
        return self.encode.value + medium * self.size + self.decode.value


class SerialChoice:
    """Chooses among raw and ``candidates``. Thread safe.

    A pipeline that is new is tried with three blocks; later with one every 3 s if it might pay, else every
    30 s. One that is predicted to gain 3 % is taken.

    Args:
        candidates: Text forms of pipelines, without ``raw``.
        clock: Monotonic seconds.
    """

    def __init__(self, candidates: Sequence[str], *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._candidates = {name: _Candidate(name) for name in candidates}
        self._ways: dict[str, FlowCost] = {}
        self._chosen = RAW
        self._reason = "nothing was measured yet"
        self._switches = 0

    def choose(self) -> str:
        """The pipeline for the next block: a candidate, or ``raw``."""
        with self._lock:
            now, medium = self._clock(), self._medium()
            predicted = self._decide(medium)
            for candidate in self._candidates.values():
                if candidate.name != self._chosen and self._due(candidate, now, predicted):
                    candidate.tried_at = now
                    return candidate.name
            return self._chosen

    def _due(self, candidate: _Candidate, now: float, predicted: dict[str, float]) -> bool:
        """Whether a block should go by a candidate that is not in use, to see what that takes now."""
        since = now - candidate.tried_at
        if min(candidate.encode.count, candidate.decode.count) < _TRIALS:
            return since >= _TRIAL_EVERY_S
        may_pay = predicted and predicted[candidate.name] < predicted[RAW]
        old = now - candidate.encode.at > (_STALE_S if may_pay else _OLD_S)
        return old and since >= _AGAIN_EVERY_S

    def _decide(self, medium: float) -> dict[str, float]:
        """Choose; returns what each is predicted to cost, nothing while the medium is not known."""
        if not medium:
            return {}
        predicted = {RAW: medium}
        predicted.update({c.name: c.cost(medium) for c in self._candidates.values() if c.known})
        best = min(predicted, key=lambda name: predicted[name])
        current = self._chosen if predicted.get(self._chosen, math.inf) < medium else RAW
        if predicted[best] < _GAIN * predicted[current]:
            current = best
        self._switches += current != self._chosen
        self._chosen = current
        self._reason = f"predicted {predicted[current] * 1e9:.3g} s/GB to write and read"
        return predicted

    def _medium(self) -> float:
        return sum(way.value for way in self._ways.values())

    # ---- learning -------------------------------------------------------------------------------

    def encoded(self, name: str, nbytes: int, encoded_nbytes: int, seconds: float) -> None:
        """``nbytes`` of KV became ``encoded_nbytes`` in ``seconds`` of one thread."""
        candidate = self._candidates.get(name)
        if candidate is None or not nbytes:
            return
        with self._lock:
            candidate.encode.add(nbytes, seconds, self._clock())
            size = encoded_nbytes / nbytes
            candidate.size = 0.75 * candidate.size + 0.25 * size if candidate.size else size

    def decoded(self, name: str, nbytes: int, seconds: float) -> None:
        """``nbytes`` of KV were decoded in ``seconds`` of one thread."""
        candidate = self._candidates.get(name)
        if candidate is not None:
            with self._lock:
                candidate.decode.add(nbytes, seconds, self._clock())

    def carried(self, way: str, nbytes: int, seconds: float) -> None:
        """The medium took ``seconds`` of one thread for ``nbytes``, encoded or not, on one of a byte's ways.

        A byte takes all ways that were ever named: it is written, and read.
        """
        with self._lock:
            self._ways.setdefault(way, FlowCost()).add(nbytes, seconds)

    # ---- telling --------------------------------------------------------------------------------

    def status(self) -> ChoiceStatus:
        """What is used, what is known, and why. The link is the medium, both ways together."""
        with self._lock:
            medium = self._medium()
            found = [CandidateStatus(RAW, 1.0, 0.0, 0.0, medium * 1e9)]
            for c in self._candidates.values():
                cost = c.cost(medium) * 1e9 if c.known and medium else 0.0
                rates = _inverse(c.encode.value), _inverse(c.decode.value)
                found.append(CandidateStatus(c.name, _inverse(c.size), *rates, cost))
            return ChoiceStatus(self._chosen, self._reason, _inverse(medium), tuple(found), self._switches)


def _inverse(value: float) -> float:
    return 1 / value if value else 0.0
