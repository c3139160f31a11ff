"""The suite of connections that pass memory: each of its tests fails on one that is broken in its way."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ClassVar

import pytest

from kvferry.core.errors import ConnectionClosedError, KVFerryError, ProtocolError, TransferTimeoutError
from kvferry.testing.transports import SharedMemorySuite
from kvferry.testing.transports_memory import SharedMemoryTests
from kvferry.transports import get_transport
from kvferry.transports.base import Transport
from kvferry.transports.unix import UnixConnection

FAILED: tuple[type[BaseException], ...] = (Exception, pytest.fail.Exception)
SEND = UnixConnection.send_descriptors
RECV = UnixConnection.recv_descriptors
LEAKED: list[int] = []


class Suite(SharedMemorySuite):
    """The suite over ``unix``, with little patience."""

    patience_s: ClassVar[float] = 0.5
    late_s: ClassVar[float] = 0.5

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def transport(self) -> Transport:
        return get_transport("unix")

    def listen_url(self) -> str:
        return f"unix://{self._folder}/s"


def sends(change: Callable[[Sequence[int]], Sequence[int]]) -> Callable[..., None]:
    def send(self: UnixConnection, descriptors: Sequence[int], deadline: float) -> None:
        SEND(self, change(descriptors), deadline)

    return send


def receives(change: Callable[[list[int]], list[int]]) -> Callable[..., list[int]]:
    def receive(self: UnixConnection, count: int, deadline: float) -> list[int]:
        return change(RECV(self, count, deadline))

    return receive


def receives_instead(
    caught: type[KVFerryError], instead: Callable[[], list[int]]
) -> Callable[..., list[int]]:
    def receive(self: UnixConnection, count: int, deadline: float) -> list[int]:
        try:
            return RECV(self, count, deadline)
        except caught:
            return instead()

    return receive


def with_time(call: Callable[..., object]) -> Callable[..., object]:
    """Whatever the deadline says."""

    def patient(self: UnixConnection, what: object, deadline: float) -> object:
        return call(self, what, max(deadline, time.monotonic() + 0.2))

    return patient


def send_later(self: UnixConnection, descriptors: Sequence[int], deadline: float) -> None:
    def later() -> None:
        limit = time.monotonic() + 20
        with suppress(OSError):
            while time.monotonic() < limit:  # until the caller has closed them
                os.fstat(descriptors[0])
                time.sleep(0.002)
        try:
            SEND(self, descriptors, deadline)
        except (KVFerryError, OSError):
            self.abort()

    threading.Thread(target=later).start()


def too_early(*_: object) -> list[int]:
    raise TransferTimeoutError("too early")


def copies(descriptors: list[int]) -> list[int]:
    """Memory of one's own instead of what came, with the same number at its start."""
    found = []
    for fd in descriptors:
        found.append(os.memfd_create("copy"))
        os.truncate(found[-1], os.fstat(fd).st_size)
        os.close(fd)
    return found


def inheritable(descriptors: list[int]) -> list[int]:
    for fd in descriptors:
        os.set_inheritable(fd, True)
    return descriptors


def leaking(descriptors: Sequence[int]) -> Sequence[int]:
    LEAKED.extend(os.dup(fd) for fd in descriptors)
    return descriptors


def timed_out() -> list[int]:
    raise TransferTimeoutError("waits on")


POOL = object()
CASES: tuple[tuple[str, str, object, dict[str, object]], ...] = (
    ("both_sides_see_the_same_memory", "recv_descriptors", receives(copies), {}),
    ("descriptors_lie_in_order_among_the_bytes", "recv_descriptors", receives(lambda d: d[::-1]), {}),
    (
        "more_descriptors_than_one_call_of_the_kernel_takes",
        "send_descriptors",
        sends(lambda d: d[:253]),
        {"pool": POOL},
    ),
    ("sent_descriptors_may_be_closed_at_once", "send_descriptors", send_later, {}),
    ("received_descriptors_are_closed_on_exec", "recv_descriptors", receives(inheritable), {}),
    (
        "another_number_than_announced_is_refused",
        "recv_descriptors",
        receives_instead(ProtocolError, list),
        {"sent": 3, "asked": 1},
    ),
    ("deadline_of_receiving_descriptors", "recv_descriptors", too_early, {}),
    ("past_deadline_fails_before_a_descriptor_is_moved", "send_descriptors", with_time(SEND), {}),
    ("past_deadline_fails_before_a_descriptor_is_moved", "recv_descriptors", with_time(RECV), {}),
    (
        "end_wakes_who_waits_for_descriptors",
        "recv_descriptors",
        receives_instead(ConnectionClosedError, timed_out),
        {"pool": POOL, "end": "close"},
    ),
    (
        "calls_with_descriptors_after_the_end_say_so",
        "recv_descriptors",
        receives_instead(ConnectionClosedError, list),
        {"end": "abort"},
    ),
    ("descriptors_that_nobody_took_are_not_left_open", "send_descriptors", sends(leaking), {"end": "close"}),
    ("deadline_of_sending_descriptors", "send_descriptors", too_early, {}),
    (
        "credentials_are_those_of_the_kernel",
        "peer_credentials",
        property(lambda _: (os.getpid(), os.getuid(), os.getgid())),
        {},
    ),
    (
        "descriptors_of_a_killed_peer_stay_good",
        "recv_descriptors",
        receives_instead(ConnectionClosedError, timed_out),
        {},
    ),
)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.parametrize(("name", "method", "broken", "arguments"), CASES, ids=[c[0] for c in CASES])
def test_each_test_can_fail(
    name: str,
    method: str,
    broken: object,
    arguments: dict[str, object],
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {key: pool if value is POOL else value for key, value in arguments.items()}
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        test: Callable[..., None] = getattr(Suite(folder), f"test_{name}")
        monkeypatch.setattr(UnixConnection, method, broken)
        if name.startswith("credentials"):
            monkeypatch.setattr(Suite, "patience_s", 20.0)  # it starts a process
        try:
            with pytest.raises(FAILED) as caught:
                test(**given)
        finally:
            for fd in LEAKED:
                os.close(fd)
            LEAKED.clear()
    assert not isinstance(caught.value, (TypeError, AttributeError, NameError)), caught.value


def test_no_test_is_left_out() -> None:
    tests = {name.removeprefix("test_") for name in dir(SharedMemoryTests) if name.startswith("test_")}
    assert {case[0] for case in CASES} == tests
