from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.gateway.timing import (
    Marks,
    clock_offset,
    on_our_clock,
    overlap,
    time_to_first_token,
    transfer_rate,
    with_token_sent,
)


def test_the_parts_are_the_stretches_between_the_marks() -> None:
    ttft = time_to_first_token(Marks(10.0, 11.0, 13.0, 13.5, 14.0))
    assert ttft.as_dict() == {
        "total": 4.0,
        "queue": 1.0,
        "prefill": 2.0,
        "transfer_exposed": 0.5,
        "first_decode": 0.5,
    }


def test_kv_that_was_there_before_prefill_ended_is_not_exposed() -> None:
    ttft = time_to_first_token(Marks(0.0, 1.0, 3.0, 2.0, 4.0))
    assert (ttft.transfer_exposed, ttft.first_decode) == (0.0, 1.0)


moments = st.floats(-1e6, 1e6)


@given(moments, moments, moments, moments, moments)
def test_parts_are_never_negative_and_sum_up(a: float, b: float, c: float, d: float, e: float) -> None:
    ttft = time_to_first_token(Marks(a, b, c, d, e))
    parts = (ttft.queue, ttft.prefill, ttft.transfer_exposed, ttft.first_decode)
    assert min(parts) >= 0
    assert sum(parts) == ttft.total
    assert ttft.total == pytest.approx(max(0.0, e - a), abs=1e-6)


def test_a_peers_clock_is_taken_off() -> None:
    assert on_our_clock(1005.0, 1000.0) == 5.0
    assert clock_offset(1000.0, 0.01) == 1000.0


def test_an_offset_within_its_error_is_none() -> None:
    assert clock_offset(0.004, 0.005) == 0.0
    assert clock_offset(-0.004, 0.005) == 0.0


def test_rate_and_overlap() -> None:
    assert overlap(0.1, 1.0) == pytest.approx(0.9)
    assert transfer_rate(2_000_000_000, 1.0) == 2.0
    assert overlap(0.1, 0.0) is None
    assert transfer_rate(0, 0.0) is None


def test_the_moment_of_sending_replaces_the_routers() -> None:
    assert with_token_sent(Marks(0, 1, 2, 3, 4), 5.0).token_sent == 5.0
