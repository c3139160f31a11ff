"""What lanes are for: a link that carries each stream at its own, limited rate."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.testing.fault_proxy import FaultProxy, Faults
from kvferry.transports import connect, listen
from kvferry.transports.lanes import STRIPE_NBYTES

LONG_S = 30.0
LIMITED = Faults(rate=10e6, only="to_server")  # each connection, so each lane
STRIPES = 4


def seconds_over(lanes: int) -> float:
    """How long a message of four stripes takes."""
    message, place = bytes(STRIPES * STRIPE_NBYTES), memoryview(bytearray(STRIPES * STRIPE_NBYTES))
    deadline = deadline_in(LONG_S)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(listen("tcp://127.0.0.1:0?lanes=2")))
        proxy = stack.enter_context(FaultProxy(listener.address, LIMITED))
        address = dataclasses.replace(parse_url(proxy.address), options={"lanes": str(lanes)}).url
        pool = stack.enter_context(ThreadPoolExecutor(1))
        one = stack.enter_context(contextlib.closing(connect(address, deadline)))
        started = time.monotonic()
        sending = pool.submit(one.send, [message], deadline)
        other = stack.enter_context(contextlib.closing(listener.accept(deadline)))
        other.recv_into([place], deadline)
        sending.result(LONG_S)
        return time.monotonic() - started


@pytest.mark.soak
def test_two_lanes_carry_twice_what_one_does() -> None:
    """No lane is idle while another one is filled. The best of three, as the machine may be busy."""
    assert max(seconds_over(1) / seconds_over(2) for _ in range(3)) > 1.6
