"""Looking before sleeping: when it is done, and when it is not. All by a clock of the test."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from kvferry.core.errors import ConfigError
from kvferry.transports.spin import Crowd, Look, parse_spin

US = 1e-6


class Machine:
    """Time, and what a call to let others run takes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.yield_s = 1 * US
        self.asked = 0
        self.crowd = Crowd()
        self.look = Look(100 * US, self.crowd)
        monkeypatch.setattr("kvferry.transports.spin.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr("kvferry.transports.spin.os", SimpleNamespace(sched_yield=self._yield))

    def _yield(self) -> None:
        self.now += self.yield_s

    def wait(self, seconds: float, *, deadline: float = 1e9) -> bool:
        """A wait whose bytes come after ``seconds``; whether it began with a look."""
        start = self.now

        def there() -> bool:
            self.asked += 1
            return self.now >= start + seconds

        looked = self.look.look(there, start, deadline)
        self.now = max(self.now, start + seconds)
        self.look.waited(self.now - start, looked=looked)
        return looked


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_looks_after_a_short_wait_only(machine: Machine) -> None:
    waits = [10 * US, 10 * US, 150 * US, 10 * US, 3.0, 10 * US, 10 * US]
    machine.look = Look(200 * US, machine.crowd)
    assert [machine.wait(one) for one in waits] == [False, True, True, True, True, False, False]


def test_idle_waits_cost_nothing(machine: Machine) -> None:
    assert not any(machine.wait(0.002) for _ in range(1000))
    assert machine.asked == 0


def test_a_look_in_vain_is_repeated_ever_more_seldom(machine: Machine) -> None:
    """The wait is too long for the look, and short enough to be tried again."""
    looked = [number for number in range(5000) if machine.wait(150 * US)]
    gaps = [b - a for a, b in pairwise(looked)]
    assert looked[0] == 1
    assert gaps == [9, 17, 33, 65, 129, 257, 513, 1025, 1025, 1025]


def test_a_look_that_found_something_ends_that(machine: Machine) -> None:
    assert [machine.wait(150 * US) for _ in range(11)].count(True) == 2
    while not machine.wait(10 * US):
        pass
    assert all(machine.wait(10 * US) for _ in range(20))


def test_nobody_looks_where_others_keep_the_processor(machine: Machine) -> None:
    other = Look(100 * US, machine.crowd)
    off = []
    machine.yield_s = 0.003
    for _ in range(7):
        while not machine.wait(10 * US):
            machine.now += 0.01
        noticed = machine.now
        other.waited(10 * US, looked=False)
        assert not other.look(lambda: pytest.fail("it looked"), machine.now, 1e9)
        while machine.crowd.is_here(machine.now):
            machine.now += 0.001
        off.append(round(machine.now - noticed, 1))
    assert off == [0.1, 0.2, 0.4, 0.8, 1.5, 3.1, 3.2]
    machine.now += 3.3
    while not machine.wait(10 * US):
        machine.now += 0.001
    assert machine.crowd.is_here(machine.now + 0.09)
    assert not machine.crowd.is_here(machine.now + 0.11), "it was long ago"


def test_who_keeps_it_shortly_now_and_then_costs_few_looks(machine: Machine) -> None:
    """Such as a process that wakes up 20 times a second for 0.2 ms: it does not add up."""
    machine.look = Look(300 * US, machine.crowd)
    looks = 0
    for number in range(10_000):
        machine.yield_s = 200 * US if number % 1000 == 999 else 1 * US
        looks += machine.wait(50 * US if machine.yield_s < 100 * US else 400 * US)
    assert looks > 8_500


def test_a_peer_on_the_same_processor_is_no_crowd(machine: Machine) -> None:
    """What came while this thread was away may be the peer's work; nothing came of others, or much later."""
    machine.look = Look(400 * US, machine.crowd)
    machine.wait(10 * US)
    machine.yield_s = 300 * US
    assert machine.wait(50 * US)
    assert not machine.crowd.is_here(machine.now)
    machine.wait(10 * US)
    machine.yield_s = 0.003
    assert machine.wait(50 * US)
    assert machine.crowd.is_here(machine.now)


def test_the_deadline_ends_a_look(machine: Machine) -> None:
    machine.wait(10 * US)
    start = machine.now
    assert machine.look.look(lambda: False, start, start + 20 * US)
    assert machine.now - start < 25 * US


def test_without_time_to_look_there_is_no_look(machine: Machine) -> None:
    machine.look = Look(0.0, machine.crowd)
    assert not any(machine.wait(0.0) for _ in range(10))


def test_the_option() -> None:
    assert [parse_spin(text) for text in ("0", "50us", "10ms")] == [0.0, 5e-05, 0.01]
    with pytest.raises(ConfigError, match=r"may be 0\.01 s at most"):
        parse_spin("11ms")
