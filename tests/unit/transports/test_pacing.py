from __future__ import annotations

import random

import pytest

from kvferry.transports.pacing import Pacer

MB = 10**6


class Link:
    """Drives a pacer with a clock of its own, as a connection would."""

    def __init__(self, rate: float) -> None:
        self.now = 1000.0
        self.started = self.now
        self.pacer = Pacer(rate, self.now)
        self.sent: list[tuple[float, int]] = []

    def send(
        self, nbytes: int, *, oversleep_s: float = 0.0, handing_s: float = 0.0, stalled: bool = False
    ) -> None:
        self.pacer.begin(self.now)
        while nbytes:
            piece = min(nbytes, self.pacer.limit(self.now))
            due = self.pacer.reserve(piece, self.now)
            if due > self.now:
                self.now = due + oversleep_s
            self.sent.append((self.now, piece))
            self.now += handing_s
            self.pacer.sent(self.now, stalled=stalled)
            nbytes -= piece

    def largest_burst(self, window_s: float) -> int:
        """Most bytes that were sent within ``window_s``."""
        best = first = total = 0
        for time, nbytes in self.sent:
            total += nbytes
            while self.sent[first][0] < time - window_s:
                total -= self.sent[first][1]
                first += 1
            best = max(best, total)
        return best

    @property
    def rate(self) -> float:
        return sum(nbytes for _, nbytes in self.sent) / (self.now - self.started)


@pytest.mark.parametrize("rate", [0.1 * MB, 1 * MB, 100 * MB, 10_000 * MB])
def test_long_run_keeps_the_rate(rate: float) -> None:
    link = Link(rate)
    link.send(int(2 * rate))
    assert link.rate == pytest.approx(rate, rel=0.001)


def test_small_and_large_messages_mixed() -> None:
    link, sizes = Link(50 * MB), random.Random(1)
    while link.now < link.started + 2:
        link.send(sizes.choice([1, 40, 100, 1000, 100_000, 3 * MB]))
    assert link.rate == pytest.approx(50 * MB, rel=0.01)


@pytest.mark.parametrize("late_s", [0.001, 0.004, 0.02, 0.1])
def test_late_wake_ups_do_not_add_up(late_s: float) -> None:
    link = Link(20 * MB)
    link.send(40 * MB, oversleep_s=late_s)
    assert link.now - link.started == pytest.approx(2.0, abs=late_s + 0.01)


def test_time_lost_while_handing_over_does_not_add_up() -> None:
    """Waiting for the interpreter's lock after a call is lateness too."""
    link = Link(20 * MB)
    for i in range(200):
        link.send(200_000, handing_s=0.03 if i % 10 == 0 else 0.0)
    assert link.rate == pytest.approx(20 * MB, rel=0.02)


def test_idle_link_does_not_burst() -> None:
    link = Link(100 * MB)
    link.send(400_000, oversleep_s=0.05)
    link.now += 5.0
    link.sent.clear()
    link.send(20 * MB)
    assert link.largest_burst(0.0) <= 0.0101 * 100 * MB
    assert link.largest_burst(0.1) <= 0.1101 * 100 * MB


def test_short_pauses_do_not_add_up_to_a_burst() -> None:
    """A sender with less to send than the link carries may not catch up with what it never had."""
    link = Link(1000 * MB)
    for _ in range(200):
        link.send(MB)
        link.now += 0.005
    link.sent.clear()
    began = link.now
    link.send(100 * MB)
    assert link.now - began == pytest.approx(0.094, abs=0.001)  # less the 6 ms of a link that was idle


def test_peer_that_did_not_read_is_not_caught_up_with() -> None:
    link = Link(100 * MB)
    link.send(MB, handing_s=1.0, stalled=True)
    link.sent.clear()
    link.send(20 * MB)
    assert link.largest_burst(0.0) <= 0.0101 * 100 * MB


def test_first_bytes_take_their_time() -> None:
    link = Link(1 * MB)
    link.send(1000)
    assert link.now - link.started == pytest.approx(0.001)


def test_pieces() -> None:
    assert Pacer(1000, 0.0).limit(0.0) == 1024
    assert Pacer(10 * MB, 0.0).limit(0.0) == 40_000
    assert Pacer(100_000 * MB, 0.0).limit(0.0) == 1 << 19
    assert Pacer(10 * MB, 0.0).limit(0.004) == 80_000, "what is due goes in one piece"
    assert Pacer(10 * MB, 0.0).limit(100.0) == 100_000, "but an idle link has no more than its credit"
