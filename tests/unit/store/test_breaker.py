from __future__ import annotations

import logging

import pytest

from kvferry.core.errors import ConfigError
from kvferry.store.breaker import Breaker


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def breaker(clock: Time) -> Breaker:
    return Breaker("t", work="writes", errors=3, pause_s=2.0, max_pause_s=5.0, clock=clock)


def fail(breaker: Breaker, count: int = 1) -> None:
    breaker.leave(failures=count, successes=0, reason="broken")


def test_it_opens_after_so_many_errors_in_a_row(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.leave(failures=1, successes=1)
    fail(breaker, 2)
    assert breaker.enter()
    fail(breaker)
    assert breaker.is_open
    assert not breaker.ready
    assert not breaker.enter()
    assert breaker.opened == 1


def test_after_the_pause_one_at_a_time_may_try(breaker: Breaker, clock: Time) -> None:
    fail(breaker, 3)
    clock.now += 1.9
    assert not breaker.enter()
    clock.now += 0.1
    assert breaker.ready
    assert breaker.enter()
    assert not breaker.ready
    assert not breaker.enter()
    breaker.leave(failures=0, successes=0)  # a miss says nothing
    assert breaker.is_open
    assert breaker.enter()
    breaker.leave(failures=0, successes=1)
    assert not breaker.is_open
    assert breaker.enter()


def test_pauses_get_longer_up_to_a_bound_and_start_anew(breaker: Breaker, clock: Time) -> None:
    fail(breaker, 3)
    for pause in (2.0, 4.0, 5.0, 5.0):
        clock.now += pause - 0.01
        assert not breaker.enter()
        clock.now += 0.02
        assert breaker.enter()
        fail(breaker)
    clock.now += 5.0
    assert breaker.enter()
    breaker.leave(failures=0, successes=1)
    fail(breaker, 3)
    clock.now += 2.0
    assert breaker.enter()
    assert breaker.opened == 2


def test_calls_that_were_under_way_when_it_opened_change_nothing(breaker: Breaker, clock: Time) -> None:
    fail(breaker, 3)
    fail(breaker, 8)
    clock.now += 2.0
    assert breaker.enter()


def test_one_line_when_it_opens_and_one_when_it_closes(
    breaker: Breaker, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            fail(breaker, 3)
            clock.now += 60
            assert breaker.enter()
        breaker.leave(failures=0, successes=1)
        breaker.leave(failures=0, successes=1)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert [r.message for r in caplog.records] == [
        "tier t: no writes for 2 s after 3 errors, and until they work again: broken",
        "tier t: writes work again",
    ]


@pytest.mark.parametrize("bad", [{"errors": 0}, {"pause_s": 0.0}, {"pause_s": 9.0, "max_pause_s": 1.0}])
def test_values_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="breaker of tier x"):
        Breaker("x", **bad)  # type: ignore[arg-type]


def test_another_kind_of_reason_is_told_once_and_shown_at_once(
    breaker: Breaker, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    first = "10.0.0.1:6379: connection refused after 0.5 s"

    def again(reason: str, *, told: bool = False) -> None:
        clock.now += 6.0
        assert breaker.enter()
        breaker.leave(failures=1, successes=0, reason=reason, told=told)
        assert breaker.reason == reason

    with caplog.at_level(logging.INFO):
        assert breaker.reason == ""
        breaker.leave(failures=3, successes=0, reason=first)
        again("10.0.0.1:6379: the password is wrong")  # too soon for a line
        again("10.0.0.1:6380: connection refused after 17 s")
        again("10.0.0.1:6379: the password is wrong")
        again("10.0.0.2 is left alone for a while, after: 10.0.0.1:6379: the password is wrong")
        again("the store answered with status 403", told=True)
        again("the store answered with status 500")  # 6 s after what somebody else told
        breaker.leave(failures=1, successes=0, reason="of a call that was under way")
        assert breaker.reason == "the store answered with status 500"
        again("the store answered with status 500")
        clock.now += 6.0
        breaker.leave(failures=0, successes=1)
    assert breaker.reason == ""
    assert [r.message for r in caplog.records] == [
        f"tier t: no writes for 2 s after 3 errors, and until they work again: {first}",
        "tier t: still no writes, and the reason is another now: 10.0.0.1:6379: the password is wrong",
        "tier t: still no writes, and the reason is another now: the store answered with status 500",
        "tier t: writes work again",
    ]


def test_a_slow_log_holds_up_nobody_who_asks(breaker: Breaker, clock: Time) -> None:
    """What the handler sees may come late, but no call waits for it."""
    held: list[bool] = []

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            del record
            held.append(breaker._lock.locked())

    handler, log = Slow(), logging.getLogger("kvferry.store.breaker")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        fail(breaker, 3)
        clock.now += 20
        breaker.leave(failures=1, successes=0, reason="of another kind")
        breaker.leave(failures=0, successes=1)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert held == [False] * 3
