"""Seconds a byte from noisy samples."""

from __future__ import annotations

import pytest

from kvferry.codecs.costs import CallCost, FlowCost


def test_calls_that_waited_do_not_count() -> None:
    cost = CallCost()
    assert (cost.value, cost.count) == (0.0, 0)
    for number, seconds in enumerate((5.0, 1.0, 9.0, 1.1, 7.0, 1.2)):
        cost.add(10, seconds, float(number))
    assert cost.value == pytest.approx(0.11)
    assert (cost.count, cost.at) == (6, 5.0)
    cost.add(0, 1.0, 6.0)
    cost.add(1, -1.0, 6.0)
    assert cost.at == 5.0


def test_a_window_has_ten_milliseconds_and_two_pieces() -> None:
    flow = FlowCost()
    assert [
        flow.add(
            100,
            0.004,
        )
        for _ in range(3)
    ] == [False, False, True]
    assert flow.value == pytest.approx(0.00004)
    assert [flow.add(100, 0.02) for _ in range(2)] == [False, True]
    assert flow.add(100, 0.05)  # so long that one piece says enough
    assert flow.windows == 3
    assert not flow.add(0, 1.0)


def test_some_windows_in_which_something_else_had_the_cores_are_forgotten() -> None:
    flow = FlowCost()
    for seconds in (0.05, 0.05, 0.5, 0.05, 0.9, 0.7, 0.05, 0.05):
        flow.add(1, seconds)
    assert flow.value == 0.05


@pytest.mark.parametrize("after", [0.06, 0.6])
def test_a_flow_that_has_changed_is_believed_after_five_windows(after: float) -> None:
    flow = FlowCost()
    for _ in range(9):
        flow.add(1, 0.2)
    for _ in range(4):
        flow.add(1, after)
        assert flow.value == 0.2
    flow.add(1, after)
    assert (flow.value, flow.windows) == (after, 5)


def test_the_doubt_is_less_with_more_windows_and_with_such_as_agree() -> None:
    alike, unlike = FlowCost(), FlowCost()
    doubts = []
    for number in range(30):
        alike.add(1, 0.1)
        unlike.add(1, 0.08 if number % 2 else 0.12)
        assert unlike.doubt >= alike.doubt
        assert unlike.settled == (number >= 24)
        doubts.append(alike.doubt)
    assert doubts[0] == pytest.approx(0.18, abs=0.01)
    assert doubts[:25] == sorted(doubts[:25], reverse=True)
    assert doubts[-1] < 0.01
    assert 0.05 < unlike.doubt < 0.12  # 1.25 * 0.35 / sqrt(25)


def test_how_many_windows_are_known_is_kept_when_they_change() -> None:
    flow = FlowCost(40)
    for seconds in [0.2] * 9 + [0.6] * 5:
        flow.add(1, seconds)
    flow.at_most(0.5)
    assert flow.windows == 5
    for _ in range(50):
        flow.add(1, 0.5)
    assert (flow.windows, flow.settled) == (40, True)


def test_what_carried_more_costs_no_more() -> None:
    flow = FlowCost()
    flow.at_most(0.1)
    assert flow.windows == 0
    for seconds in (0.2, 0.05, 0.4):
        flow.add(1, seconds)
    flow.at_most(0.3)
    assert flow.value == 0.2
    flow.at_most(0.1)
    assert flow.value == 0.1
    flow.add(1, 0.05)
    assert flow.value == pytest.approx(0.075)
