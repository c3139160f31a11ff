"""The region suite itself: each of its tests fails on an endpoint that is broken as it looks for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest

from kvferry.core.buffers import copy_into
from kvferry.core.errors import KVFerryError, ProtocolError, TransferTimeoutError, TransportError
from kvferry.testing import memory_regions
from kvferry.testing.memory_regions import MemoryRegions
from kvferry.testing.regions import RegionSuite
from kvferry.transports.region import Access, RegionPart, RegionTransfer, RegionTransport, Window

FAILED: tuple[type[BaseException], ...] = (Exception, pytest.fail.Exception)


class BrokenWindow(Window):
    """A window with one fault."""

    def __init__(self, inner: Window, fault: str) -> None:
        self._inner = inner
        self._fault = fault

    @property
    def grant(self) -> bytes:
        return b"same" * 10 if self._fault == "same_grants" else self._inner.grant

    def close(self) -> None:
        if self._fault != "never_revokes":
            self._inner.close()


class BrokenTransfer(RegionTransfer):
    """A transfer with one fault."""

    def __init__(self, inner: RegionTransfer, fault: str) -> None:
        self._inner = inner
        self._fault = fault

    def poll(self) -> bool:
        return self._fault == "done_at_once" or self._inner.poll()

    def wait(self, deadline: float) -> None:
        if self._fault == "gives_up":
            raise TransferTimeoutError("not done")
        self._inner.wait(deadline)


class BrokenRegions(RegionTransport):
    """A good endpoint with one fault."""

    name: ClassVar[str] = "broken"

    def __init__(self, fault: str) -> None:
        self._inner = MemoryRegions()
        self._fault = fault
        self._spinning = threading.Event()
        self._leak: list[int] = []
        self._calls = 0

    def trusts(self, host: str) -> bool:
        return self._inner.trusts(host)

    def open_window(self, view: memoryview, access: Access) -> Window:
        if self._fault == "leaks":
            self._leak.append(os.open("/dev/null", os.O_RDONLY))
        if self._fault == "read_only_windows" and view.readonly:
            view = memoryview(bytearray(view))
        if self._fault == "takes_any_buffer":
            view = memoryview(view)
        return BrokenWindow(self._inner.open_window(view, access), self._fault)

    def write(self, grant: bytes, parts: Sequence[RegionPart]) -> RegionTransfer:
        return self._start(self._inner.write, grant, parts)

    def read(self, grant: bytes, parts: Sequence[RegionPart]) -> RegionTransfer:
        return self._start(self._inner.read, grant, parts)

    def _start(
        self,
        start: Callable[[bytes, Sequence[RegionPart]], RegionTransfer],
        grant: bytes,
        parts: Sequence[RegionPart],
    ) -> RegionTransfer:
        self._calls += 1
        if self._fault == "first_part_only":
            parts = parts[:1]
        if self._fault == "at_the_start":
            parts = [RegionPart(part.local, 0) for part in parts]
        if self._fault == "not_the_last_byte":
            parts = [RegionPart(part.local[:-1], part.offset) for part in parts]
        if self._fault == "no_empty_batch" and not parts:
            raise TransportError("nothing to do")
        if self._fault == "no_read_only_source" and any(part.local.readonly for part in parts):
            raise TransportError("is read-only")
        if self._fault == "loses_some" and self._calls % 7 == 0:
            parts = []
        if self._fault == "clips":
            parts = [part for part in parts if part.offset == 0]
        try:
            return BrokenTransfer(start(grant, parts), self._fault)
        except ProtocolError as error:
            if self._fault == "other_error":
                raise TransportError(str(error)) from error
            raise
        except KVFerryError:
            if self._fault == "spins":
                threading.Thread(target=self._spin, daemon=True).start()
            raise

    def _spin(self) -> None:
        until = time.monotonic() + 60  # it ends when it is closed, so that a slow machine sees it too
        while not self._spinning.is_set() and time.monotonic() < until:
            pass

    def close(self) -> None:
        self._spinning.set()
        for fd in self._leak:
            os.close(fd)
        self._leak.clear()
        if self._fault == "stays_open":
            return
        self._inner.close()


class Suite(RegionSuite):
    """The suite over broken endpoints, with little patience."""

    largest_nbytes: ClassVar[int] = 4 << 20
    patience_s: ClassVar[float] = 2.0
    windows: ClassVar[int] = 5

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def endpoint(self) -> RegionTransport:
        return BrokenRegions(self._fault)


CASES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("bytes_arrive_and_nothing_else_is_touched", "not_the_last_byte", {"nbytes": 65, "access": "write"}),
    ("bytes_arrive_and_nothing_else_is_touched", "not_the_last_byte", {"nbytes": 65, "access": "read"}),
    ("scattered_parts", "first_part_only", {"access": "read"}),
    ("part_at_an_offset", "at_the_start", {}),
    ("batch_of_nothing", "no_empty_batch", {}),
    ("what_is_written_may_be_read_only", "no_read_only_source", {}),
    ("memory_is_given_as_a_view", "takes_any_buffer", {}),
    ("many_threads_and_windows_at_once", "loses_some", {}),
    ("polled_completion", "done_at_once", {}),
    ("deadline_of_wait", "gives_up", {}),
    ("offsets_outside_the_window_are_refused", "clips", {"offset": 100_000, "nbytes": 1, "access": "write"}),
    ("grant_for_the_other_access_is_refused", "other_error", {}),
    ("malformed_grants_are_refused", "other_error", {}),
    ("damaged_grants_are_refused", "no_checksum", {}),
    ("grants_are_small_and_differ", "same_grants", {}),
    ("memory_that_cannot_be_used_is_refused", "read_only_windows", {}),
    ("idle_after_refusals", "spins", {}),
    ("closed_window_is_not_used_any_more", "never_revokes", {"access": "write"}),
    ("window_closed_in_the_midst_of_a_transfer", "never_revokes", {}),
    ("endpoint_closed", "stays_open", {}),
    ("nothing_is_left_of_many_windows", "leaks", {}),
)


@pytest.fixture(autouse=True)
def _slow_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A large transfer takes a sixth of a second, so that one can be in its midst."""

    def slow(dst: memoryview, src: memoryview) -> None:
        if len(dst) > 100_000:
            time.sleep(0.01)
        copy_into(dst, src)

    monkeypatch.setattr("kvferry.testing.memory_regions.copy_into", slow)
    yield
    memory_regions._windows.clear()  # of endpoints that were not closed


@pytest.mark.parametrize(("name", "fault", "arguments"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_each_test_can_fail(
    name: str, fault: str, arguments: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    getattr(Suite(""), f"test_{name}")(**arguments)  # passes on a good one
    if fault == "no_checksum":
        monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda _: 0)
    with pytest.raises(FAILED) as caught:
        getattr(Suite(fault), f"test_{name}")(**arguments)
    assert not isinstance(caught.value, (TypeError, AttributeError, NameError)), caught.value


def test_no_test_is_left_out() -> None:
    tests = {name.removeprefix("test_") for name in dir(RegionSuite) if name.startswith("test_")}
    # these two need another process, which the reference does not have
    assert {case[0] for case in CASES} == tests - {"another_process", "owner_is_killed"}
