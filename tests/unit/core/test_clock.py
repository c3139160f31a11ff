"""Deadlines: what is none is refused, and what is left fits the calls that take a timeout."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from kvferry.core.clock import checked_deadline, deadline_in, is_past, remaining, time_left
from kvferry.core.errors import ConfigError

NAN = float("nan")


@pytest.mark.parametrize("call", [checked_deadline, deadline_in, is_past, remaining, time_left])
def test_nan_is_no_deadline(call: Callable[[float], object]) -> None:
    with pytest.raises(ConfigError, match="NaN"):
        call(NAN)


@pytest.mark.parametrize("call", [checked_deadline, is_past, remaining, time_left])
@pytest.mark.parametrize("given", [None, "1"])
def test_what_is_no_number_is_no_deadline(call: Callable[[float], object], given: float) -> None:
    with pytest.raises(ConfigError, match=f"got {given!r}; .*deadline_in"):
        call(given)


@pytest.mark.parametrize("deadline", [float("inf"), 1e300, 1e10])
def test_what_is_left_of_the_longest_deadline_is_a_timeout(deadline: float) -> None:
    assert remaining(deadline) > 1e9
    assert not is_past(deadline)
    with socket.socket() as sock:
        sock.settimeout(time_left(deadline))
    assert threading.Lock().acquire(timeout=time_left(deadline))


def test_a_deadline_that_passed_leaves_nothing() -> None:
    past = time.monotonic() - 1
    assert is_past(past)
    assert time_left(past) == 0
    assert time_left(float("-inf")) == 0
