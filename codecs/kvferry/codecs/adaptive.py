"""Which pipeline a link should use, from what encoding, decoding and the link itself were seen to cost.

All costs are seconds a byte of KV (before encoding). While encoding, sending and decoding overlap, a pipeline
that makes KV ``r`` times smaller costs ``max(encode, link / r, decode)``, and KV as it is costs ``link``; on
one core encoding and sending take turns: ``max(encode + link / r, decode)``. A pipeline therefore pays below
``min(e, d)`` bytes a second and is of no use above. That is what makes a pipeline worth a trial: what it
costs in use, where threads, checksums and the other end share cores, is measured, and decides.

Pure: no threads, no I/O; the clock is given.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvferry.codecs.candidate import Candidate
from kvferry.codecs.choice import RAW, CandidateStatus, ChoiceStatus
from kvferry.codecs.costs import FlowCost

__all__ = ["RAW", "AdaptiveChoice", "CandidateStatus", "ChoiceStatus"]

_GAIN: Final = 0.97
"""Another pipeline is taken when it is predicted to take less than this share of the time."""
_TRY_GAIN: Final = 0.99
"""The same for one that was never in use: only that tells what it costs."""
_STRAIN: Final = 1.25
"""Seconds that one which was never in use is expected to take for each second of encoding and decoding, as
where both ends share the cores. It decides which is tried first, and rules out none."""
_NO_WORSE: Final = 0.98
"""Raw is taken again when it is predicted to take less than this share: what is as fast may stay."""
_FIRST_PROBES: Final = 3
_FIRST_PROBE_EVERY_S: Final = 0.02
_FIRST_PROBE_S: Final = 0.2
_PROBE_EVERY_S: Final = 1.0
_STALE_S: Final = 3.0
_OLD_S: Final = 30.0
_FIRST_LOOK_S: Final = 0.2
_LOOK_EVERY_S: Final = 1.0
_LOOK_SELDOM_S: Final = 5.0
_LOOK_CALLS: Final = 500
"""After so many pieces a look without an answer ends: the link is faster than what has to be sent."""
_LOOK_WINDOWS: Final = 5
"""The median forgets the first, in which a link that was not full gives what it saved up (a token bucket)."""
_LOOK_SAME_WINDOWS: Final = 3
"""Enough for a look that finds about what is known."""
_SAME: Final = 1.1
"""A first window no further from it is enough: what a look sends raw is slow where a pipeline pays."""
_LOOK_LONG_WINDOWS: Final = 2
_LONG_WINDOWS_S: Final = 0.05
_TRIAL_WINDOWS: Final = 3
"""The median forgets one: the first, for which threads start and memory is new, or one without the cores."""
_KEPT_WINDOWS: Final = 3
"""Of trials before: something may have had the cores then, and what is seen now has to count."""
_SURE_WINDOWS: Final = 5
_DOUBTS: Final = 2.0
"""By how many standard errors a pipeline may be better than what was measured of it in use."""
_DOUBTS_GROW_S: Final = 1.0
"""Traffic behind which they are twice as many, since things change: what was slow once is tried again."""
_DISTURBED_S: Final = 1.0
_TRIALS_SHARE: Final = 0.005
"""Of the time, which trials that fail may cost."""
_TRIAL_ENDS_S: Final = 0.005
_TRIAL_LOSES_S: Final = 0.1
"""A trial that has lost so much ends with its first window: others are as long."""
_LONGEST_OLD_S: Final = 600.0
_LONGEST_PAUSE_S: Final = 2.0
_OTHER_LINK: Final = 2.0
_FIRST_QUIET_S: Final = 0.25
"""Where raw stays in use, and the link has not become slower, nothing is learnt for so long, and twice as
long each time that this is found again: to look at each piece costs 2 % where the cores are the limit."""
_LONGEST_QUIET_S: Final = 1.0
"""A change is to be followed within 2 s, of which some windows and a trial take their part."""
_QUIET_SHARE: Final = 0.25
"""Of it, which is taken for traffic: how much there was is not counted."""
_FAR_FROM_CORES: Final = 3.0
"""A pipeline that takes so many times what encoding and decoding take is surely limited by the link."""
_LINK_BOUND: Final = 1.15
"""A pipeline that takes no more than this share of what the link alone would is limited by the link: that
would be seen to become faster without a look."""
_OTHER_FLOW: Final = 1.25
_SAME_LINK: Final = 1.5


class AdaptiveChoice:
    """Chooses among raw and ``candidates``. Thread safe.

    Whoever sends asks :meth:`choose` before each piece and reports what came of it, and asks :meth:`probe`
    whether a piece should go another way beside the flow. A pipeline that is new is probed with three
    pieces, later with one every 3 s if it might pay, else every 30 s.

    One that is predicted to gain 3 % is taken, or 1 % if it was never in use. What it then costs in use is
    noisy where the cores are shared: windows of 10 ms differ by a third, and two in a row say little. It
    therefore has the benefit of a doubt that becomes smaller with each window, and is left once it is slower
    than raw beyond that, after three windows if it is much slower. What was measured is kept, and the doubt
    grows again with the traffic in between, so what was slow by little is tried again soon, what was slow by
    much late; a trial begins with the last three windows of the one before, and has three of its own, or one
    if that alone lost much: the more it lost, the longer it is remembered.

    What the cores limited took some seconds for each of encoding and decoding, and one that was never in use
    is expected to need as many; until that is known, what leaves cores to spare is tried first, once all were
    probed. No trial follows before what the last one lost, against what was used before it, is half a percent
    of the traffic since (2 s of it at most): meanwhile only what has proven itself is used, and what is known
    of the others is not refreshed.

    While a pipeline is in use, some pieces go raw once a second of traffic, first after 0.2 and 0.6 s: what
    the link itself carries is seen in no other way. Ever later, up to 5 s, where the pipeline costs
    what its bytes cost on the link, so that a faster link would be seen without, and at once when it suddenly
    costs more or less.

    Args:
        candidates: Text forms of pipelines, without ``raw``.
        clock: Monotonic seconds.
        cores: That this end may use; with one, encoding and sending take turns.
    """

    def __init__(self, candidates: Sequence[str], *, clock: Callable[[], float], cores: int) -> None:
        self._clock = clock
        self._cores = cores
        self._lock = threading.Lock()
        self._candidates = {name: Candidate(name) for name in candidates if name != RAW}
        self._link = FlowCost()  # seconds a byte on the link
        self._seen = FlowCost()  # the same, of the look at it that goes on
        self._seen_s = 0.0
        self._chosen = RAW
        self._reason = "nothing was measured yet"
        self._switches = 0
        self._news = False  # something was learnt since the last decision
        self._looking = False  # pieces go raw to look at the link
        self._look_calls = 0
        self._look_every_s = _FIRST_LOOK_S
        self._looked_flow = 0.0  # what the pipeline in use cost then
        self._moving_s = 0.0  # time in which the link was busy since then
        self._probe_at = -math.inf
        self._traffic_s = 0.0  # time in which the link was busy, ever
        self._used_s = 0.0  # of it, with the pipeline in use
        self._used_nbytes = 0
        self._used_windows = 0
        self._to_beat = 0.0  # what was used before it costs a byte
        self._quiet_until = -math.inf  # nothing is to be learnt, of what goes raw
        self._quiet_s = _FIRST_QUIET_S  # the next time
        self._paused_until = 0.0  # nothing new is tried before so much traffic
        self._paused_link = 0.0  # on which link

    # ---- choosing -------------------------------------------------------------------------------

    def choose(self) -> str:
        """The pipeline for the next piece: a candidate, or ``raw``."""
        if self._chosen == RAW and not self._news:  # the way that must cost nothing
            return RAW
        with self._lock:
            now = self._clock()
            if self._looking:
                self._look_calls += 1
                self._looking = self._look_calls < _LOOK_CALLS
                return RAW
            if self._news:
                self._news = False
                self._decide(now)
            if self._chosen != RAW and self._look_due(self._candidates[self._chosen]):
                self._look()
                return RAW
            return self._chosen

    @property
    def rests(self) -> bool:
        """Whether :meth:`choose` says raw and :meth:`probe` nothing, until more is reported or it is time."""
        return self._chosen == RAW and not self._news and self._clock() < self._probe_at

    @property
    def quiet_until(self) -> float:
        """Time up to which all goes raw, with nothing reported: the link was just seen to be the same."""
        return self._quiet_until

    def _look_due(self, used: Candidate) -> bool:
        """Whether the link may have changed since it was seen without a codec in its way."""
        flow, looked = used.flow.value, self._looked_flow
        if not used.flow.windows:
            return False
        if looked and not looked / _OTHER_FLOW <= flow <= looked * _OTHER_FLOW:
            return True
        self._looked_flow = looked or flow
        if flow > _FAR_FROM_CORES * (used.encode.value + used.decode.value):
            return self._moving_s >= _LOOK_SELDOM_S
        often = _LOOK_SELDOM_S if self._limited_by_link(used) else _LOOK_EVERY_S
        return self._moving_s >= min(self._look_every_s, often)

    def _look(self) -> None:
        self._looking, self._look_calls = True, 1
        self._seen, self._seen_s = FlowCost(), 0.0
        self._look_every_s = min(2 * self._look_every_s, _LOOK_SELDOM_S)
        self._looked_flow = self._moving_s = 0.0

    def probe(self) -> str:
        """A candidate with which the next piece should go, beside what is chosen; empty if none is due."""
        now = self._clock()
        if now < self._probe_at:
            return ""
        with self._lock:
            self._probe_at = now + _FIRST_PROBE_EVERY_S
            for candidate in self._candidates.values():
                if candidate.name != self._chosen and self._due(candidate, now):
                    candidate.probed_at = now
                    return candidate.name
        return ""

    def _due(self, candidate: Candidate, now: float) -> bool:
        if min(candidate.encode.count, candidate.decode.count) < _FIRST_PROBES:
            return True
        if now - candidate.probed_at < _PROBE_EVERY_S or self._paused():
            return False
        in_use = self._candidates.get(self._chosen)
        to_beat = self._predicted(in_use) if in_use is not None else self._link.value
        may_pay = self._link.windows > 0 and self._predicted(candidate) < to_beat
        return now - candidate.encode.at > (_STALE_S if may_pay else _OLD_S)

    def _decide(self, now: float) -> None:
        if self._link.windows < _LOOK_WINDOWS or any(
            self._probe_comes(c, now) for c in self._candidates.values()
        ):
            return
        for candidate in self._candidates.values():
            self._forget(candidate, now)
        predicted = {RAW: self._link.value}
        predicted.update({c.name: self._predicted(c) for c in self._candidates.values() if c.known})
        current = self._chosen if self._chosen in predicted else RAW
        if predicted[RAW] < _NO_WORSE * predicted[current]:  # never what is predicted slower than raw
            current = self._cheapest(self._proven())  # and no trial before it is counted what that has cost
        else:
            known = self._proven() if self._paused() or self._on_trial() else predicted
            untried = self._untried()
            gains = {name: _TRY_GAIN if name in untried else _GAIN for name in known}
            better = {name: cost for name, cost in known.items() if cost < gains[name] * predicted[current]}
            if better:
                current = self._cheapest(better)
        if current != self._chosen:
            self._switch(current, now, predicted[self._chosen])
        elif current == RAW:
            waits = min(predicted.values()) < _GAIN * predicted[RAW]  # for a pause to end, or more windows
            self._keep_quiet(now, same=not waits and not self._link.slower(_OTHER_FLOW))
        runner_up = min((n for n in predicted if n != current), key=lambda n: predicted[n], default=None)
        if runner_up is None:
            self._reason = "no candidate is measured yet"
        else:
            self._reason = (
                f"predicted {predicted[current] * 1e9:.3g} s/GB, {runner_up} {predicted[runner_up] * 1e9:.3g}"
            )

    def _keep_quiet(self, now: float, *, same: bool) -> None:
        """Learn nothing for a while where raw stays as it was, the longer the oftener."""
        if not same:
            self._quiet_until, self._quiet_s = -math.inf, _FIRST_QUIET_S
            return
        self._quiet_until = now + self._quiet_s
        self._traffic_s += self._quiet_s * _QUIET_SHARE
        self._quiet_s = min(2 * self._quiet_s, _LONGEST_QUIET_S)

    def _probe_comes(self, candidate: Candidate, now: float) -> bool:
        """Whether its first probe is still to tell something: what is tried first depends on all.

        Not for ever: where prompts are so short that lossy ones leave all of them alone, theirs tell nothing.
        """
        late = self._traffic_s >= _FIRST_PROBE_S * len(self._candidates)
        if self._chosen != RAW or candidate.known or late:
            return False
        return candidate.probed_at == -math.inf or now - candidate.probed_at < _FIRST_PROBE_S

    def _cheapest(self, costs: Mapping[str, float]) -> str:
        """What costs least; of those that cost about as much, what takes least of the cores."""
        work = {c.name: c.work for c in self._candidates.values()}
        untried = self._untried()
        expected = {n: max(cost, _STRAIN * work[n]) if n in untried else cost for n, cost in costs.items()}
        enough = min(expected.values()) / _GAIN
        return min((n for n in costs if expected[n] <= enough), key=lambda name: work.get(name, 0.0))

    def _untried(self) -> set[str]:
        return {c.name for c in self._candidates.values() if not c.promised}

    def _proven(self) -> dict[str, float]:
        """What raw costs, and what was in use for long enough, without any doubt in its favour."""
        proven = {RAW: self._link.value}
        for c in self._candidates.values():
            if c.promised and c.flow.windows >= _SURE_WINDOWS:
                proven[c.name] = max(c.flow.value / c.promised, 1.0) * self._formula(c)
        return proven

    def _on_trial(self) -> bool:
        """Whether what is in use has not shown yet what it costs."""
        return self._chosen in self._candidates and not self._tried()

    def _tried(self) -> bool:
        lost = self._used_s - self._used_nbytes * self._to_beat
        return self._used_windows >= (1 if lost > _TRIAL_LOSES_S else _TRIAL_WINDOWS)

    def _paused(self) -> bool:
        """Whether the trials that failed have cost enough for now; nothing holds for another link."""
        if self._traffic_s >= self._paused_until:
            return False
        before, link = self._paused_link, self._link.value
        return before / _OTHER_LINK <= link <= before * _OTHER_LINK

    def _switch(self, name: str, now: float, cost: float) -> None:
        left = self._candidates.get(self._chosen)
        if left is not None and left.flow.windows:
            self._judge(left, now, name)
        self._used_s, self._used_nbytes, self._used_windows = 0.0, 0, 0
        self._keep_quiet(now, same=False)
        if name != RAW:
            self._candidates[name].flow.keep(_KEPT_WINDOWS)
        self._to_beat = min(cost, self._link.value)
        if self._chosen == RAW:
            # what spoke for it may have been a moment in which the link, or this end, was slow
            self._look_every_s = _FIRST_LOOK_S
        if name != RAW:
            self._looked_flow = self._moving_s = 0.0
        self._chosen = name
        self._switches += 1

    def _judge(self, left: Candidate, now: float, to: str) -> None:
        """What a trial lost is paid off before the next; what did well until now is soon tried again."""
        lost = self._used_s + _TRIAL_ENDS_S - self._used_nbytes * self._to_beat
        if lost > 0:
            self._paused_until = self._traffic_s + min(lost / _TRIALS_SHARE, _LONGEST_PAUSE_S)
            self._paused_link = self._link.value
            left.forgotten_at = now + min(max(lost / _TRIALS_SHARE, _OLD_S), _LONGEST_OLD_S)
        elif to == RAW:
            left.forgotten_at = now + _DISTURBED_S

    # ---- predicting -----------------------------------------------------------------------------

    def _predicted(self, candidate: Candidate) -> float:
        """Seconds a byte, with the doubt that is left in its favour: that is what makes it worth a trial."""
        formula, flow = self._formula(candidate), candidate.flow
        if candidate.name == self._chosen:
            if not self._tried():
                return formula
            return flow.value / (1.0 + (0.0 if flow.settled else _DOUBTS * flow.doubt))
        if candidate.promised:
            return formula * self._slower(candidate)
        return max(formula * self._slower_on_link(), candidate.work * self._strain())

    def _limited_by_link(self, used: Candidate) -> bool:
        return used.flow.value <= _LINK_BOUND * self._link.value * used.size

    def _slower_on_link(self) -> float:
        """How many times what was promised the best of those cost that the link limits."""
        used = (c for c in self._candidates.values() if c.promised and self._limited_by_link(c))
        return min((self._slower(c) for c in used), default=1.0)

    def _strain(self) -> float:
        """Seconds that a second of encoding and decoding takes where the cores are the limit; 0 if unknown.

        A pipeline that takes less of them costs less beyond what was promised.
        """
        used = (c for c in self._candidates.values() if c.promised and c.work)
        return min(
            (self._formula(c) * self._slower(c) / c.work for c in used if not self._limited_by_link(c)),
            default=0.0,
        )

    def _slower(self, seen: Candidate) -> float:
        """How many times what was promised a pipeline cost in use, with the doubt in its favour."""
        doubts = _DOUBTS * (1.0 + (self._traffic_s - seen.seen_traffic_s) / _DOUBTS_GROW_S)
        return max(seen.flow.value / seen.promised / (1.0 + doubts * seen.flow.doubt), 1.0)

    def _formula(self, candidate: Candidate) -> float:
        sending = self._link.value * candidate.size
        encode, decode = candidate.encode.value, candidate.decode.value
        return max(encode + sending, decode) if self._cores < 2 else max(encode, sending, decode)

    def _forget(self, candidate: Candidate, now: float) -> None:
        """What a pipeline that is not in use did cost long ago, or on another link, says nothing."""
        if candidate.name == self._chosen or not candidate.promised:
            return
        before, link = candidate.seen_link, self._link.value
        if now >= candidate.forgotten_at or not before / _SAME_LINK <= link <= before * _SAME_LINK:
            candidate.forget_flow()

    # ---- learning -------------------------------------------------------------------------------

    def encoded(self, name: str, nbytes: int, encoded_nbytes: int, seconds: float) -> None:
        """``nbytes`` of KV became ``encoded_nbytes`` in ``seconds`` of one thread."""
        with self._lock:
            candidate = self._candidates.get(name)
            if candidate is not None:
                candidate.encode.add(nbytes, seconds, self._clock())
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
        sending and decoding is in ``seconds``, and not for the first after another pipeline, which find or
        leave something of the other in the way.
        """
        with self._lock:
            now = self._clock()
            self._moving_s += seconds
            self._traffic_s += seconds
            if name == RAW:
                self._news |= self._link_moved(nbytes, seconds)
                return
            candidate = self._candidates.get(name)
            if name == self._chosen:
                self._used_s += seconds
                self._used_nbytes += nbytes
            if candidate is not None and candidate.known and candidate.flow.add(nbytes, seconds):
                self._used_windows += name == self._chosen
                self._learn(candidate, now)
                self._news = True

    def _link_moved(self, nbytes: int, seconds: float) -> bool:
        if not self._looking:
            return self._link.add(nbytes, seconds)
        self._seen_s += seconds
        if not self._seen.add(nbytes, seconds):
            return False
        seen, link = self._seen, self._link
        same = link.value / _OTHER_FLOW <= seen.value <= link.value * _OTHER_FLOW
        if seen.windows < self._windows_needed(same):
            return False
        if same:
            link.add_all(seen)
        else:
            self._link = seen
        self._looking = False
        return True

    def _windows_needed(self, same: bool) -> int:
        """Of the look that goes on: the fewer the more it is like what is known."""
        if self._link.value / _SAME <= self._seen.value <= self._link.value * _SAME:
            return 1
        if self._seen_s >= _LONG_WINDOWS_S:
            return _LOOK_LONG_WINDOWS
        return _LOOK_SAME_WINDOWS if same else _LOOK_WINDOWS

    def _learn(self, candidate: Candidate, now: float) -> None:
        """What a pipeline costs in use says something of the link, and corrects what was predicted."""
        cost = candidate.flow.value
        on_link = cost - candidate.encode.value if self._cores < 2 else cost
        if candidate.flow.windows >= _SURE_WINDOWS and on_link > 0:  # some may be bursts
            doubt = 1.0 + _DOUBTS * candidate.flow.doubt
            self._link.at_most(doubt * on_link / candidate.size)  # it carried as much, so it is no slower
        candidate.promised = self._formula(candidate)
        candidate.seen_link = self._link.value
        candidate.seen_traffic_s = self._traffic_s
        candidate.forgotten_at = now + _OLD_S

    # ---- telling --------------------------------------------------------------------------------

    def status(self) -> ChoiceStatus:
        """What is used, what is known, and why."""
        with self._lock:
            link = self._link.value
            found = [CandidateStatus(RAW, 1.0, 0.0, 0.0, link * 1e9)]
            for c in self._candidates.values():
                predicted = self._predicted(c) if c.known and self._link.windows else 0.0
                found.append(c.status(predicted))
            return ChoiceStatus(
                self._chosen, self._reason, 1 / link if link else 0.0, tuple(found), self._switches
            )
