"""The transport suite itself: each of its tests fails on a transport that is broken as it looks for."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeAlias

import numpy as np
import pytest

from kvferry.core.buffers import Buf, as_bytes_view
from kvferry.core.errors import (
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    KVFerryError,
    TransferTimeoutError,
)
from kvferry.testing.transports import TransportSuite
from kvferry.transports import get_transport
from kvferry.transports.base import Connection, Listener, Transport

_numbers = itertools.count()
Failed: TypeAlias = "type[BaseException]"
FAILED: tuple[Failed, ...] = (Exception, pytest.fail.Exception)
LATER_S = 0.5


class BrokenConnection(Connection):
    """A connection with one fault."""

    def __init__(self, inner: Connection, fault: str, reading: threading.Event) -> None:
        self._inner = inner
        self._fault = fault
        self._reading = reading
        self._lock = threading.Lock()
        self._ended = False
        self._last = b""

    @property
    def local_address(self) -> str:
        return self._inner.local_address

    @property
    def peer_address(self) -> str:
        return "inproc://somebody" if self._fault == "peer_address" else self._inner.peer_address

    def __repr__(self) -> str:
        return repr(self._inner)

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        if self._fault == "send_later":
            threading.Thread(target=self._send_later, args=(parts, deadline)).start()
            return
        if self._fault == "one_at_a_time":
            with self._lock:
                self._inner.send(parts, deadline)
            return
        if self._fault == "close_drops":  # what was sent last, if it is short
            if self._last:
                self._inner.send([self._last], deadline)
            self._last = b"".join(as_bytes_view(part) for part in parts)
            if len(self._last) < 1 << 19:
                return
            self._last = b""
        self._inner.send(self._parts(parts), self._deadline("send", deadline))

    def _parts(self, parts: Sequence[Buf]) -> Sequence[Buf]:
        if self._fault == "flip":
            data = bytearray(b"".join(as_bytes_view(part) for part in parts))
            data[len(data) // 2 : len(data) // 2 + 1] = b"?" if len(data) > 1 else data
            return [data]
        if self._fault == "first_1024_parts":
            return parts[:1024]
        if self._fault == "reversed_parts":
            return parts[::-1]
        if self._fault == "copies_anything":
            return [np.asarray(part).tobytes() for part in parts]
        if self._fault == "items_for_bytes":
            return [as_bytes_view(part)[: len(memoryview(part))] for part in parts]  # type: ignore[arg-type]
        return parts

    def _deadline(self, call: str, deadline: float) -> float:
        if self._fault == "nan_is_soon" and math.isnan(deadline):
            return time.monotonic() + 1
        if self._fault == "text_is_soon" and isinstance(deadline, str):
            return time.monotonic() + 1
        if self._fault == "far_overflows" and deadline > 1e12:
            raise OverflowError("timestamp out of range")
        if self._fault == "past_deadlines" and deadline < time.monotonic():
            return time.monotonic() + 1
        if self._fault == f"{call}_early":
            raise TransferTimeoutError("too early")
        if self._fault == "rendezvous" and call == "send" and not self._reading.wait(1):
            raise TransferTimeoutError("nobody reads")
        return deadline

    def _send_later(self, parts: Sequence[Buf], deadline: float) -> None:
        time.sleep(0.05)
        with contextlib.suppress(KVFerryError, ValueError):
            self._inner.send(parts, deadline)

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        self._reading.set()
        if self._fault == "guards" and views and isinstance(views[0].obj, np.ndarray):
            views[0].obj[...].reshape(-1)[0] = 0
        if self._fault == "items_for_views":
            views = [as_bytes_view(view)[: len(view)] for view in views]
        with self._lock if self._fault == "one_at_a_time" else contextlib.nullcontext():
            try:
                self._inner.recv_into(views, self._deadline("recv", deadline))
            except ConnectionClosedError as error:
                if self._fault == "no_end":
                    raise TransferTimeoutError("waits on") from error
                text = re.sub(r"\d+ of", "some of", str(error)) if self._fault == "no_count" else str(error)
                raise ConnectionClosedError(text) from error

    def wait_readable(self, deadline: float) -> bool:
        if self._fault in ("always_readable", "never_readable"):
            return self._fault == "always_readable"
        return self._inner.wait_readable(deadline)

    def close(self) -> None:
        if self._ended and self._fault == "end_twice":
            raise ConnectionClosedError("is closed already")
        self._ended = True
        if self._fault == "close_drops":
            self._inner.abort()
        elif self._fault == "close_waits":
            time.sleep(LATER_S + 0.2)
        elif self._fault != "close_nothing":
            self._inner.close()

    def abort(self) -> None:
        if self._fault != "close_nothing":
            self._inner.abort()


class BrokenListener(Listener):
    """A listener with one fault."""

    def __init__(self, inner: Listener, fault: str, reading: threading.Event) -> None:
        self._inner = inner
        self._fault = fault
        self._reading = reading
        self._held: list[Connection] = []
        self._accepted: list[Connection] = []

    @property
    def address(self) -> str:
        return self._inner.address

    def __repr__(self) -> str:
        return repr(self._inner)

    def accept(self, deadline: float) -> Connection:
        if self._fault == "accept_early":
            raise TransferTimeoutError("too early")
        if self._fault == "last_first":
            with contextlib.suppress(TransferTimeoutError):
                while True:
                    self._held.append(self._inner.accept(time.monotonic() + 0.01))
            return self._held.pop()
        found = BrokenConnection(self._inner.accept(deadline), self._fault, self._reading)
        self._accepted.append(found)
        return found

    def close(self) -> None:
        if self._fault == "listens_on":
            return
        if self._fault == "listener_ends_all":
            for one in self._accepted:
                one.abort()
        self._inner.close()


class BrokenTransport(Transport):
    """A transport with one fault, or none, over a good one."""

    scheme: ClassVar[str] = "inproc"

    def __init__(self, fault: str, inner: str) -> None:
        self._fault = fault
        self._inner = get_transport(inner)
        self.scheme = inner  # type: ignore[misc]
        self._reading = threading.Event()
        self._made: list[BrokenConnection] = []

    def connect(self, address: str, deadline: float) -> Connection:
        if self._fault == "any_option":
            address = address.partition("?")[0]
        if self._fault == "any_scheme" and address.startswith("other"):
            raise ConnectError("nobody there")
        if self._fault == "connect_late":
            time.sleep(LATER_S + 0.3)
        if self._fault == "past_deadlines":
            deadline = max(deadline, time.monotonic() + 1)
        try:
            found = BrokenConnection(self._inner.connect(address, deadline), self._fault, self._reading)
        except ConnectError:
            if self._fault == "no_address":
                raise ConnectError("nobody listens") from None
            raise
        self._made.append(found)
        if self._fault == "one_ends_all" and len(self._made) == 4:
            self._made[3].abort()
        if self._fault == "descriptors":
            self._leak = [*getattr(self, "_leak", []), os.open("/dev/null", os.O_RDONLY)]
        return found

    def listen(self, address: str) -> Listener:
        if self._fault == "any_option":
            address = address.partition("?")[0]
        return BrokenListener(self._inner.listen(address), self._fault, self._reading)

    def close(self) -> None:
        """Give back what the fault took."""
        for fd in getattr(self, "_leak", []):
            os.close(fd)


class Suite(TransportSuite):
    """The suite over a broken transport, with little patience."""

    largest_nbytes: ClassVar[int] = 1 << 20
    connect_cycles: ClassVar[int] = 5
    soak_cycles: ClassVar[int] = 20
    patience_s: ClassVar[float] = 0.3
    late_s: ClassVar[float] = LATER_S

    def __init__(self, fault: str, inner: str = "inproc") -> None:
        self.inner = inner
        self.broken = BrokenTransport(fault, inner)

    def transport(self) -> Transport:
        return self.broken

    def listen_url(self) -> str:
        return f"inproc://broken-{next(_numbers)}" if self.inner == "inproc" else "tcp://127.0.0.1:0"


@pytest.mark.soak
class TestNothingBroken(TransportSuite):
    """The wrapper as such is good."""

    largest_nbytes: ClassVar[int] = 1 << 20
    connect_cycles: ClassVar[int] = 5
    soak_cycles: ClassVar[int] = 20  # the wrapper keeps what it made
    crosses_processes: ClassVar[bool] = False
    child_setup: ClassVar[str] = ""

    def transport(self) -> Transport:
        return BrokenTransport("", "inproc")

    def listen_url(self) -> str:
        return f"inproc://unbroken-{next(_numbers)}"


NO_FORK_CHECK = """
import os
os.register_at_fork = lambda **_: None
os.getpid = lambda pid=os.getpid(): pid
"""

POOL = object()  # stands for the fixture
CASES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("bytes_arrive_and_nothing_else_is_touched", "flip", {"pool": POOL, "nbytes": 4097}),
    ("bytes_arrive_and_nothing_else_is_touched", "guards", {"pool": POOL, "nbytes": 65}),
    ("scattered_bytes_of_every_size", "flip", {"pool": POOL}),
    ("parts_and_views_need_not_match", "reversed_parts", {"pool": POOL}),
    ("more_parts_than_one_call_takes", "first_1024_parts", {"pool": POOL}),
    ("parts_of_any_type_and_shape", "items_for_bytes", {}),
    ("views_of_any_items_and_shape_are_filled", "items_for_views", {"pool": POOL, "rows": 3}),
    (
        "memory_that_cannot_be_moved_is_refused_and_the_stream_goes_on",
        "copies_anything",
        {"pool": POOL, "nbytes": 8},
    ),
    ("sent_buffers_may_be_reused_at_once", "send_later", {"pool": POOL}),
    ("both_directions_at_once", "one_at_a_time", {"pool": POOL}),
    ("small_messages_both_ways_before_either_is_read", "rendezvous", {}),
    ("deadline_of_receive", "recv_early", {}),
    ("deadline_of_send", "send_early", {}),
    ("deadline_of_accept", "accept_early", {}),
    ("past_deadline_fails_before_anything_is_moved", "past_deadlines", {}),
    ("what_is_no_deadline_is_refused", "nan_is_soon", {"given": math.nan}),
    ("what_is_no_deadline_is_refused", "text_is_soon", {"given": "1"}),
    ("deadline_as_far_as_can_be", "far_overflows", {"deadline": float("inf"), "pool": POOL}),
    ("wait_readable", "always_readable", {"pool": POOL}),
    ("wait_readable", "never_readable", {"pool": POOL}),
    ("close_does_not_wait_for_a_peer_that_does_not_read", "close_waits", {}),
    ("connect_to_nobody_who_accepts_ends_in_time", "connect_late", {}),
    ("close_delivers_what_was_sent_and_then_the_end", "close_drops", {"pool": POOL}),
    ("last_words_arrive_though_the_peer_was_sending", "close_drops", {"pool": POOL}),
    ("stream_that_ends_early_says_after_how_much", "no_count", {}),
    ("calls_after_the_end_say_so", "close_nothing", {"end": "close"}),
    ("calls_after_the_end_say_so", "close_nothing", {"end": "abort"}),
    ("ending_twice_is_nothing_new", "end_twice", {"ends": ("close", "close")}),
    ("end_wakes_blocked_threads_on_both_sides", "close_nothing", {"pool": POOL, "end": "abort"}),
    ("end_wakes_who_waits_for_bytes", "no_end", {"pool": POOL, "end": "close", "call": "receive"}),
    ("sending_to_a_closed_peer_fails_soon", "close_nothing", {}),
    ("addresses_are_urls_that_can_be_dialled", "peer_address", {}),
    ("connections_are_accepted_in_order", "last_first", {}),
    ("nobody_listens", "no_address", {}),
    ("address_in_use_and_free_again", "listens_on", {}),
    ("connect_past_its_deadline", "past_deadlines", {}),
    ("unknown_option_is_refused", "any_option", {}),
    ("address_of_another_scheme_is_refused", "any_scheme", {}),
    ("listener_closed_while_accepting", "listens_on", {"pool": POOL}),
    ("connections_outlive_their_listener", "listener_ends_all", {}),
    ("connection_that_was_never_accepted_ends_with_the_listener", "listens_on", {}),
    ("one_ends_and_the_others_go_on", "one_ends_all", {}),
    ("descriptors_are_given_back", "descriptors", {"end": "close"}),
    ("dialling_and_going_away_harms_nobody", "descriptors", {}),
    ("nothing_is_left_of_thousands_of_connections", "descriptors", {}),
    ("peer_process_is_killed", "no_end", {"call": "receive"}),
    ("peer_process_stops_and_every_call_ends_in_time", "recv_early", {}),
    ("forked_child_gets_an_error_and_the_parent_goes_on", "", {}),
)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.parametrize(("name", "fault", "arguments"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_each_test_can_fail(
    name: str,
    fault: str,
    arguments: dict[str, object],
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crossing = name.startswith(("peer_process", "forked"))
    suite = Suite(fault, "tcp" if crossing else "inproc")
    if name.startswith("forked"):
        monkeypatch.setattr(Suite, "child_setup", NO_FORK_CHECK)
        monkeypatch.setattr(Suite, "patience_s", 20.0)
    elif crossing:
        monkeypatch.setattr(Suite, "patience_s", 20.0)
    test: Callable[..., None] = getattr(suite, f"test_{name}")
    given = {key: pool if value is POOL else value for key, value in arguments.items()}
    try:
        with pytest.raises(FAILED) as caught:
            test(**given)
    finally:
        suite.broken.close()
    assert not isinstance(caught.value, (TypeError, AttributeError, NameError, ConfigError)), caught.value


def test_no_test_is_left_out() -> None:
    tests = {name.removeprefix("test_") for name in dir(TransportSuite) if name.startswith("test_")}
    assert {case[0] for case in CASES} == tests
