"""Which pipeline a link should use, from what encoding, decoding and the link itself were seen to cost.

All costs are seconds a byte of KV (before encoding). While encoding, sending and decoding overlap, a pipeline
that makes KV ``r`` times smaller costs ``max(encode, link / r, decode)``, and KV as it is costs ``link``; on
one core encoding and sending take turns: ``max(encode + link / r, decode)``. A pipeline therefore pays below
``min(e, d)`` bytes a second and is of no use above. What was predicted for a pipeline is corrected by what it
was then seen to cost, since threads, checksums and the other end share cores.

Pure: no threads, no I/O; the clock is given.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["RAW", "AdaptiveChoice", "CandidateStatus", "ChoiceStatus"]

RAW: Final = "raw"
_MEMORY_S: Final = 0.15
"""Busy seconds after which a measurement counts for 1/e of what is new."""
_GAIN: Final = 0.95
"""Another pipeline is taken when it is predicted to take less than this share of the time."""
_PROBE_EVERY_S: Final = 1.0
_FIRST_PROBES: Final = 5
_FIRST_PROBE_EVERY_S: Final = 0.1
_RECENT: Final = 9
_PROBE_LINK_CALLS: Final = 6
_FADED_NBYTES: Final = 1 << 19
_STALE_S: Final = 3.0
_OLD_S: Final = 30.0
_HOPELESS: Final = 3.0
_FORGIVEN_S: Final = 5.0
_WORST: Final = 4.0
_LINK_BOUND: Final = 2.0
"""A pipeline that takes so many times what encoding and decoding take is limited by the link alone."""
_SAME_LINK: Final = 1.25


@dataclass(slots=True)
class _Cost:
    """A moving average of seconds a byte; old samples fade with the busy time of new ones."""

    seconds: float = 0.0
    nbytes: float = 0.0
    at: float = -math.inf

    def add(self, nbytes: float, seconds: float, now: float) -> None:
        if nbytes <= 0 or seconds < 0:
            return
        kept = math.exp(-seconds / _MEMORY_S)
        self.seconds = self.seconds * kept + seconds
        self.nbytes = self.nbytes * kept + nbytes
        self.at = now

    def lower_to(self, cost: float) -> None:
        self.seconds = min(self.seconds, cost * self.nbytes)

    def fade(self) -> None:
        """Keep the value, and let a few new samples outweigh it."""
        kept = min(1.0, _FADED_NBYTES / self.nbytes) if self.nbytes else 1.0
        self.seconds, self.nbytes = self.seconds * kept, self.nbytes * kept

    @property
    def known(self) -> bool:
        return self.nbytes > 0

    @property
    def value(self) -> float:
        return self.seconds / self.nbytes if self.nbytes else 0.0


class _Recent:
    """The median of the last seconds a byte: one piece may wait for a core as long as twenty take."""

    __slots__ = ("_costs", "at", "value")

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self.value = 0.0
        self.at = -math.inf

    def add(self, nbytes: float, seconds: float, now: float) -> None:
        if nbytes <= 0 or seconds < 0:
            return
        self._costs.append(seconds / nbytes)
        self.value = statistics.median(self._costs)
        self.at = now

    @property
    def count(self) -> int:
        return len(self._costs)


@dataclass(slots=True)
class _Candidate:
    name: str
    encode: _Recent = field(default_factory=_Recent)
    decode: _Recent = field(default_factory=_Recent)
    steady: _Cost = field(default_factory=_Cost)  # of the whole way, while it is in use
    size: float = 0.0  # encoded bytes a byte
    correction: float = 1.0
    corrected_at: float = -math.inf
    corrected_link: float = 0.0
    probed_at: float = -math.inf

    @property
    def known(self) -> bool:
        return self.encode.count > 0 and self.decode.count > 0


@dataclass(frozen=True, slots=True)
class CandidateStatus:
    """What is known of one pipeline. Rates are bytes of KV a second, 0 while unknown.

    Attributes:
        name: Its text form, or ``raw``.
        ratio: Bytes before over bytes after encoding.
        encode_rate: Of one encoding thread.
        decode_rate: Of one decoding thread at the other end.
        predicted_s_per_gb: Seconds that 1e9 bytes of KV are predicted to take; 0 while unknown.
    """

    name: str
    ratio: float
    encode_rate: float
    decode_rate: float
    predicted_s_per_gb: float


@dataclass(frozen=True, slots=True)
class ChoiceStatus:
    """What is used, and why.

    Attributes:
        chosen: The pipeline in use.
        reason: For people.
        link_rate: Bytes a second that the link carries; 0 while unknown.
        candidates: ``raw`` first.
        switches: How often the choice changed.
    """

    chosen: str
    reason: str
    link_rate: float
    candidates: tuple[CandidateStatus, ...]
    switches: int

    def line(self) -> str:
        """All of it in one line."""
        if not self.candidates:
            return f"{self.chosen}: {self.reason}"
        parts = [
            f"{c.name} {c.predicted_s_per_gb:.3g} s/GB"
            + (
                f" (x{c.ratio:.2f}, encode {c.encode_rate / 1e9:.2f}, decode {c.decode_rate / 1e9:.2f} GB/s)"
                if c.encode_rate
                else ""
            )
            for c in self.candidates
            if c.predicted_s_per_gb
        ]
        link = f"link {self.link_rate / 1e9:.3g} GB/s" if self.link_rate else "link not measured"
        return f"{self.chosen}: {self.reason}; {link}; {', '.join(parts) or 'nothing predicted'}"


class AdaptiveChoice:
    """Chooses among raw and ``candidates``. Thread safe.

    Whoever sends asks :meth:`choose` before each piece and reports what came of it. A pipeline that is new is
    tried with five pieces, one in 0.1 s; later with one every 3 s if it might pay, else every 30 s. While a
    pipeline's own speed is what limits, a few pieces a second go raw, so that a link that became faster is
    noticed.

    Args:
        candidates: Text forms of pipelines, without ``raw``.
        clock: Monotonic seconds.
        cores: That this end may use; with one, encoding and sending take turns.
    """

    def __init__(self, candidates: Sequence[str], *, clock: Callable[[], float], cores: int) -> None:
        self._clock = clock
        self._cores = cores
        self._lock = threading.Lock()
        self._candidates = {name: _Candidate(name) for name in candidates if name != RAW}
        self._link = _Cost()  # seconds a byte on the link
        self._link_exact_at = -math.inf
        self._chosen = RAW
        self._reason = "nothing was measured yet"
        self._switches = 0
        self._probe_left = 0
        self._probed_link_at = -math.inf

    # ---- choosing -------------------------------------------------------------------------------

    def choose(self) -> str:
        """The pipeline for the next piece: a candidate, or ``raw``."""
        now = self._clock()
        with self._lock:
            if self._probe_left > 0:
                self._probe_left -= 1
                return RAW
            self._decide(now)
            if (probe := self._due(now)) is not None:
                probe.probed_at = now
                return probe.name
            if self._link_due(now):
                self._probed_link_at = now
                self._link.fade()
                self._probe_left = _PROBE_LINK_CALLS - 1
                return RAW
            return self._chosen

    def _decide(self, now: float) -> None:
        if not self._link.known:
            return
        predicted = {RAW: self._link.value}
        predicted.update({c.name: self._predicted(c, now) for c in self._candidates.values() if c.known})
        best = min(predicted, key=lambda name: predicted[name])
        current = self._chosen if self._chosen in predicted else RAW
        if predicted[RAW] < predicted[current]:  # never what is predicted slower than raw
            current = RAW
        if predicted[best] < _GAIN * predicted[current]:
            current = best
        if current != self._chosen:
            self._chosen = current
            self._switches += 1
        runner_up = min((n for n in predicted if n != current), key=lambda n: predicted[n], default=None)
        if runner_up is None:
            self._reason = "no candidate is measured yet"
        else:
            self._reason = (
                f"predicted {predicted[current] * 1e9:.3g} s/GB, {runner_up} {predicted[runner_up] * 1e9:.3g}"
            )

    def _predicted(self, candidate: _Candidate, now: float) -> float:
        return self._formula(candidate) * self._correction(candidate, now)

    def _formula(self, candidate: _Candidate) -> float:
        sending = self._link.value * candidate.size
        encode, decode = candidate.encode.value, candidate.decode.value
        return max(encode + sending, decode) if self._cores < 2 else max(encode, sending, decode)

    def _correction(self, candidate: _Candidate, now: float) -> float:
        """Fades to 1, so that what was slow once is tried again; nothing holds for another link."""
        before, link = candidate.corrected_link, self._link.value
        if candidate.correction <= 1 or not before / _SAME_LINK <= link <= before * _SAME_LINK:
            return 1.0
        age = max(0.0, now - candidate.corrected_at)
        return 1 + (candidate.correction - 1) * math.exp(-age / _FORGIVEN_S)

    def _due(self, now: float) -> _Candidate | None:
        """A candidate to be tried with the next piece."""
        for candidate in self._candidates.values():
            since = now - candidate.probed_at
            if candidate.decode.count < _FIRST_PROBES:
                if since >= _FIRST_PROBE_EVERY_S:
                    return candidate
                continue
            age = now - candidate.encode.at
            may_pay = self._link.known and candidate.encode.value < _HOPELESS * self._link.value
            if age > (_STALE_S if may_pay else _OLD_S) and since >= _PROBE_EVERY_S:
                return candidate
        return None

    def _link_due(self, now: float) -> bool:
        """Whether the link has to be looked at without a codec in its way."""
        if self._chosen == RAW:
            return False
        return now - max(self._link_exact_at, self._probed_link_at) >= _PROBE_EVERY_S

    # ---- learning -------------------------------------------------------------------------------

    def encoded(self, name: str, nbytes: int, encoded_nbytes: int, seconds: float) -> None:
        """``nbytes`` of KV became ``encoded_nbytes`` in ``seconds`` of one thread."""
        with self._lock:
            candidate = self._candidates.get(name)
            if candidate is not None:
                now = self._clock()
                candidate.encode.add(nbytes, seconds, now)
                size = encoded_nbytes / nbytes if nbytes else 1.0
                candidate.size = 0.75 * candidate.size + 0.25 * size if candidate.size else size

    def decoded(self, name: str, nbytes: int, seconds: float) -> None:
        """The other end took ``seconds`` of one thread to decode ``nbytes`` of KV."""
        with self._lock:
            candidate = self._candidates.get(name)
            if candidate is not None:
                candidate.decode.add(nbytes, seconds, self._clock())

    def moved(self, name: str, nbytes: int, seconds: float) -> None:
        """``nbytes`` of KV were in place ``seconds`` after the piece before, of the same pipeline.

        Only for pieces that were ready before the piece before was in place, so that nothing but encoding,
        sending and decoding is in ``seconds``.
        """
        with self._lock:
            now = self._clock()
            if name == RAW:
                self._link.add(nbytes, seconds, now)
                self._link_exact_at = now
                return
            candidate = self._candidates.get(name)
            if candidate is None or not candidate.known:
                return
            candidate.steady.add(nbytes, seconds, now)
            cost, size = candidate.steady.value, candidate.size
            if cost > _LINK_BOUND * max(candidate.encode.value, candidate.decode.value):
                taking_turns = nbytes * candidate.encode.value if self._cores < 2 else 0.0
                self._link.add(nbytes * size, max(seconds - taking_turns, 0.0), now)
                self._link_exact_at = now
            elif self._link.known:
                self._link.lower_to(cost / size)  # it carried as much, so it is no slower
                self._correct(candidate, cost, now)

    def _correct(self, candidate: _Candidate, cost: float, now: float) -> None:
        formula = self._formula(candidate)
        seen = min(max(cost / formula, 1.0), _WORST) if formula > 0 else 1.0
        candidate.correction = 0.7 * self._correction(candidate, now) + 0.3 * seen
        candidate.corrected_at = now
        candidate.corrected_link = self._link.value

    # ---- telling --------------------------------------------------------------------------------

    def status(self) -> ChoiceStatus:
        """What is used, what is known, and why."""
        with self._lock:
            now = self._clock()
            link = self._link.value
            found = [CandidateStatus(RAW, 1.0, 0.0, 0.0, link * 1e9)]
            for c in self._candidates.values():
                predicted = self._predicted(c, now) if c.known and self._link.known else 0.0
                found.append(
                    CandidateStatus(
                        c.name,
                        1 / c.size if c.size else 0.0,
                        1 / c.encode.value if c.encode.value else 0.0,
                        1 / c.decode.value if c.decode.value else 0.0,
                        predicted * 1e9,
                    )
                )
            return ChoiceStatus(
                self._chosen, self._reason, 1 / link if link else 0.0, tuple(found), self._switches
            )
