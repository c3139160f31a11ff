"""Conformance suite of region transports; see :class:`RegionSuite`."""

# ruff: noqa: D102 - the names of the tests say what is required
from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Final, cast

import numpy as np
import pytest

from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError, ProtocolError, TransferTimeoutError, TransportError
from kvferry.testing.transports_common import (
    GUARD,
    GUARD_NBYTES,
    LARGEST,
    SIZES,
    open_descriptors,
    random_bytes,
)
from kvferry.transports.region import Access, RegionPart, RegionTransfer, RegionTransport, Window

__all__ = ["RegionSuite"]

_WINDOW_NBYTES: Final = 100_000
_OUTSIDE: Final = (
    (-1, 1),
    (-64, 128),
    (_WINDOW_NBYTES - 1, 2),
    (_WINDOW_NBYTES, 1),
    (_WINDOW_NBYTES + 4096, 64),
    (1 << 40, 64),
    ((1 << 63) - 1, 64),
    (-(1 << 63), 64),
    ((1 << 64) - 32, 64),
)
_GRANT_NBYTES: Final = 1024

_ALLOCATE: Final = "from kvferry.core.buffers import page_aligned as allocate"
_OWNER: Final = """
import sys
import numpy as np
memory = allocate(64 << 20)
np.frombuffer(memory, np.uint8)[:] = 7
windows = [endpoint.open_window(memory, access) for access in ("read", "write")]
for window in windows:
    print(window.grant.hex(), flush=True)
sys.stdin.read()
"""


def _busy(seconds: float = 0.4) -> float:
    """The part of a core that this process uses while the test does nothing."""
    used, started = time.process_time(), time.monotonic()
    time.sleep(seconds)  # what is measured, not what is waited for
    return (time.process_time() - used) / (time.monotonic() - started)


class _Memory:
    """Bytes between guards."""

    def __init__(self, whole: memoryview, fill: ByteArray | int) -> None:
        self._whole = np.frombuffer(whole, np.uint8)
        nbytes = len(whole) - 2 * GUARD_NBYTES
        self._whole[:] = GUARD
        self.bytes = self._whole[GUARD_NBYTES : GUARD_NBYTES + nbytes]
        self.bytes[:] = fill

    @property
    def view(self) -> memoryview:
        return self.bytes.data.cast("B")

    def assert_guarded(self) -> None:
        assert (self._whole[:GUARD_NBYTES] == GUARD).all(), "bytes before the memory were changed"
        assert (self._whole[-GUARD_NBYTES:] == GUARD).all(), "bytes after the memory were changed"


@dataclass(frozen=True)
class _Ends:
    """The owner of memory, and who works on it."""

    owner: RegionTransport
    user: RegionTransport


class RegionSuite(ABC):
    """What every region transport must do: inherit it in a test class, with its abstract method.

    Attributes:
        largest_nbytes: The largest transfer; lower it where a run has to be short.
        patience_s: What nothing in these tests should need.
        child_setup: Source that makes ``endpoint`` in another process, such as
            ``from mine import Mine; endpoint = Mine()``; empty leaves out the tests with one. It may set
            ``allocate``, which is there :meth:`allocate` as it is inherited.
        windows: Windows opened and closed before descriptors are counted.
    """

    largest_nbytes: ClassVar[int] = 64 << 20
    patience_s: ClassVar[float] = 30.0
    child_setup: ClassVar[str] = ""
    windows: ClassVar[int] = 100

    @abstractmethod
    def endpoint(self) -> RegionTransport:
        """A new endpoint; two of one process reach each other."""

    def allocate(self, nbytes: int) -> memoryview:
        """Memory that windows can be opened on."""
        return page_aligned(nbytes)

    def _memory(self, nbytes: int, fill: ByteArray | int = 0) -> _Memory:
        return _Memory(self.allocate(nbytes + 2 * GUARD_NBYTES), fill)

    @contextlib.contextmanager
    def _ends(self) -> Iterator[_Ends]:
        with (
            contextlib.closing(self.endpoint()) as owner,
            contextlib.closing(self.endpoint()) as user,
        ):
            yield _Ends(owner, user)

    @contextlib.contextmanager
    def _window(self, ends: _Ends, memory: _Memory, access: Access) -> Iterator[Window]:
        with contextlib.closing(ends.owner.open_window(memory.view, access)) as window:
            yield window

    def _soon(self) -> float:
        return deadline_in(self.patience_s)

    def _move(self, ends: _Ends, grant: bytes, parts: Sequence[RegionPart], access: Access) -> None:
        start = ends.user.write if access == "write" else ends.user.read
        start(grant, parts).wait(self._soon())

    def _assert_works(self, ends: _Ends) -> None:
        memory, data = self._memory(5000), random_bytes(5000)
        with self._window(ends, memory, "write") as window:
            self._move(ends, window.grant, [RegionPart(data.data.cast("B"), 0)], "write")
        assert np.array_equal(memory.bytes, data)

    def _refused(self, error: type[KVFerryError], start: Callable[[], RegionTransfer]) -> None:
        """Check that ``start``, or what it has started, fails."""
        with pytest.raises(error):
            start().wait(self._soon())

    # -- bytes -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("access", ["read", "write"])
    @pytest.mark.parametrize("nbytes", SIZES)
    def test_bytes_arrive_and_nothing_else_is_touched(self, nbytes: int, access: Access) -> None:
        """Case C097."""
        data = random_bytes(nbytes := self.largest_nbytes if nbytes == LARGEST else nbytes)
        theirs = self._memory(max(1, nbytes), GUARD if access == "write" or not nbytes else data)
        mine = self._memory(nbytes, data if access == "write" else 0)
        with self._ends() as ends, self._window(ends, theirs, access) as window:
            self._move(ends, window.grant, [RegionPart(mine.view, 0)], access)
        assert np.array_equal(mine.bytes, data)
        assert np.array_equal(theirs.bytes[:nbytes], data)
        mine.assert_guarded()
        theirs.assert_guarded()

    @pytest.mark.parametrize("access", ["read", "write"])
    def test_scattered_parts(self, access: Access) -> None:
        """300 parts of odd sizes, some empty, in no order, with gaps between them on both sides."""
        sizes = [i * 7 % 400 for i in range(300)]
        starts = np.cumsum([0, *(size + 3 for size in sizes)])
        total = int(starts[-1])
        data = random_bytes(total)
        mine, theirs = self._memory(total, GUARD), self._memory(total, GUARD)
        source, target = (mine, theirs) if access == "write" else (theirs, mine)
        source.bytes[:] = data
        order = np.random.default_rng(3).permutation(300)
        parts = [
            RegionPart(mine.view[starts[i] : starts[i] + sizes[i]], int(starts[i])) for i in map(int, order)
        ]
        with self._ends() as ends, self._window(ends, theirs, access) as window:
            self._move(ends, window.grant, parts, access)
        expected = np.full(total, GUARD, np.uint8)
        for start, size in zip(starts, sizes, strict=False):
            expected[start : start + size] = data[start : start + size]
        assert np.array_equal(target.bytes, expected)
        assert np.array_equal(source.bytes, data)
        target.assert_guarded()

    def test_part_at_an_offset(self) -> None:
        theirs, mine = self._memory(10_000, 1), self._memory(1000, random_bytes(1000))
        with self._ends() as ends, self._window(ends, theirs, "write") as window:
            for offset in (0, 1, 4095, 9000):
                theirs.bytes[:] = 1
                self._move(ends, window.grant, [RegionPart(mine.view, offset)], "write")
                assert np.array_equal(theirs.bytes[offset : offset + 1000], mine.bytes)
                assert (theirs.bytes[:offset] == 1).all()
                assert (theirs.bytes[offset + 1000 :] == 1).all()

    def test_batch_of_nothing(self) -> None:
        with self._ends() as ends, self._window(ends, self._memory(10), "write") as window:
            self._move(ends, window.grant, [], "write")

    def test_what_is_written_may_be_read_only(self) -> None:
        theirs = self._memory(100)
        with self._ends() as ends, self._window(ends, theirs, "write") as window:
            self._move(ends, window.grant, [RegionPart(memoryview(b"constant"), 9)], "write")
        assert bytes(theirs.view[9:17]) == b"constant"

    def test_memory_is_given_as_a_view(self) -> None:
        with self._ends() as ends, pytest.raises(TypeError, match="bytearray is no memoryview"):
            ends.owner.open_window(bytearray(100), "write")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bytes is no memoryview"):
            RegionPart(b"data", 0)  # type: ignore[arg-type]

    def test_many_threads_and_windows_at_once(self) -> None:
        def work(ends: _Ends, seed: int) -> None:
            memory = self._memory(300_000)
            for turn in range(5):
                data = self._memory(300_000, random_bytes(300_000, seed * 100 + turn))
                with self._window(ends, memory, "write") as window:
                    self._move(ends, window.grant, [RegionPart(data.view, 0)], "write")
                assert np.array_equal(memory.bytes, data.bytes)
                back = self._memory(300_000)
                with self._window(ends, memory, "read") as window:
                    self._move(ends, window.grant, [RegionPart(back.view, 0)], "read")
                assert np.array_equal(back.bytes, data.bytes)

        with self._ends() as ends, ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, ends, seed) for seed in range(4)]:
                done.result(timeout=2 * self.patience_s)

    # -- completion ------------------------------------------------------------------------------------

    def test_polled_completion(self) -> None:
        data = random_bytes(8 << 20)
        theirs = self._memory(len(data))
        with self._ends() as ends, self._window(ends, theirs, "write") as window:
            transfer = ends.user.write(window.grant, [RegionPart(data.data.cast("B"), 0)])
            limit = self._soon()
            while not transfer.poll():
                assert time.monotonic() < limit, "never done"
                time.sleep(0.001)
            assert np.array_equal(theirs.bytes, data), "said to be done, but it is not"
            assert transfer.poll(), "once done it stays so"
            transfer.wait(self._soon())

    def test_deadline_of_wait(self) -> None:
        """Past its deadline the transfer goes on, and is right in the end."""
        data = random_bytes(self.largest_nbytes)
        theirs = self._memory(len(data))
        with self._ends() as ends, self._window(ends, theirs, "write") as window:
            started = time.monotonic()
            transfer = ends.user.write(window.grant, [RegionPart(data.data.cast("B"), 0)])
            with contextlib.suppress(TransferTimeoutError):  # some are as fast
                transfer.wait(deadline_in(0.0005))
                assert transfer.poll()
            assert time.monotonic() - started < self.patience_s / 2
            transfer.wait(self._soon())
        assert np.array_equal(theirs.bytes, data)

    # -- refusals --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("access", ["read", "write"])
    @pytest.mark.parametrize(("offset", "nbytes"), _OUTSIDE)
    def test_offsets_outside_the_window_are_refused(self, offset: int, nbytes: int, access: Access) -> None:
        """Before, across and after it: nothing of the whole batch is moved, and the endpoint stays good."""
        around = self._memory(3 * _WINDOW_NBYTES, 5)
        inside = around.view[_WINDOW_NBYTES : 2 * _WINDOW_NBYTES]
        good, bad = self._memory(64, 9), self._memory(nbytes, 9)
        with self._ends() as ends:
            with contextlib.closing(ends.owner.open_window(inside, access)) as window:
                parts = [RegionPart(good.view, 0), RegionPart(bad.view, offset)]
                start = ends.user.write if access == "write" else ends.user.read
                self._refused(TransportError, lambda: start(window.grant, parts))
            self._assert_works(ends)
        assert (around.bytes == 5).all(), "bytes of the owner were changed"
        assert (good.bytes == 9).all(), "a part was moved though another was refused"
        assert (bad.bytes == 9).all(), "bytes came out"

    def test_grant_for_the_other_access_is_refused(self) -> None:
        theirs, mine = self._memory(1000, 5), self._memory(1000, 9)
        parts = [RegionPart(mine.view, 0)]
        with self._ends() as ends:
            with self._window(ends, theirs, "read") as window:
                self._refused(ProtocolError, lambda: ends.user.write(window.grant, parts))
            with self._window(ends, theirs, "write") as window:
                self._refused(ProtocolError, lambda: ends.user.read(window.grant, parts))
        assert (theirs.bytes == 5).all()
        assert (mine.bytes == 9).all()

    def test_malformed_grants_are_refused(self) -> None:
        theirs, mine = self._memory(1000, 5), self._memory(1000, 9)
        parts = [RegionPart(mine.view, 0)]
        with self._ends() as ends, self._window(ends, theirs, "write") as window:
            grant = window.grant
            for bad in (b"", b"\0", grant[:-1], grant + b"\0", bytes(len(grant)), grant[::-1], b"x" * 5000):
                self._refused(ProtocolError, lambda bad=bad: ends.user.write(bad, parts))  # type: ignore[misc]
            self._assert_works(ends)
        assert (theirs.bytes == 5).all()

    def test_damaged_grants_are_refused(self) -> None:
        """One flipped bit anywhere must not become another window, another size or another peer."""
        theirs, other, mine = self._memory(1000, 5), self._memory(1000, 5), self._memory(1000, 9)
        parts = [RegionPart(mine.view, 0)]
        with (
            self._ends() as ends,
            self._window(ends, theirs, "write") as window,
            self._window(ends, other, "write"),
        ):
            for position in range(len(window.grant)):
                damaged = bytearray(window.grant)
                damaged[position] ^= 1 << position % 8
                self._refused(KVFerryError, lambda g=bytes(damaged): ends.user.write(g, parts))  # type: ignore[misc]
            self._assert_works(ends)
        for memory in (theirs, other):
            assert (memory.bytes == 5).all()
            memory.assert_guarded()

    def test_grants_are_small_and_differ(self) -> None:
        memory = self._memory(1000)
        with (
            self._ends() as ends,
            self._window(ends, memory, "read") as one,
            self._window(ends, memory, "write") as other,
        ):
            assert 0 < len(one.grant) <= _GRANT_NBYTES
            assert one.grant != other.grant

    def test_memory_that_cannot_be_used_is_refused(self) -> None:
        with self._ends() as ends, self._window(ends, self._memory(100), "read") as window:
            with pytest.raises(KVFerryError):
                ends.owner.open_window(memoryview(b"constant"), "write")
            with pytest.raises(KVFerryError):
                ends.owner.open_window(memoryview(bytearray(100))[::2], "read")
            for neither in ("rw", "", "READ"):
                with pytest.raises(KVFerryError):
                    ends.owner.open_window(memoryview(bytearray(100)), cast("Access", neither))
            self._refused(
                KVFerryError, lambda: ends.user.read(window.grant, [RegionPart(memoryview(b"constant"), 0)])
            )
            self._assert_works(ends)

    def test_idle_after_refusals(self) -> None:
        """As idle as before them, that is: some libraries poll all the time."""
        with self._ends() as ends, self._window(ends, self._memory(100), "write") as window:
            before = _busy()
            for _ in range(5):
                part = [RegionPart(self._memory(10).view, 95)]
                self._refused(TransportError, lambda part=part: ends.user.write(window.grant, part))  # type: ignore[misc]
            assert _busy() < before + 0.1, "it spins"

    # -- the end ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("access", ["read", "write"])
    def test_closed_window_is_not_used_any_more(self, access: Access) -> None:
        theirs, other, mine = self._memory(1000, 5), self._memory(1000, 5), self._memory(1000, 9)
        parts = [RegionPart(mine.view, 0)]
        with self._ends() as ends, self._window(ends, other, access) as still_open:
            window = ends.owner.open_window(theirs.view, access)
            window.close()
            window.close()
            start = ends.user.write if access == "write" else ends.user.read
            self._refused(TransportError, lambda: start(window.grant, parts))
            assert (theirs.bytes == 5).all()
            assert (mine.bytes == 9).all()
            self._move(ends, still_open.grant, parts, access)

    def test_window_closed_in_the_midst_of_a_transfer(self) -> None:
        """When ``close`` returns nothing is written any more; the transfer then ends one way or the other."""
        data = np.full(self.largest_nbytes, 9, np.uint8)
        theirs = self._memory(len(data), 5)
        with self._ends() as ends:
            window = ends.owner.open_window(theirs.view, "write")
            transfer = ends.user.write(window.grant, [RegionPart(data.data.cast("B"), 0)])
            limit = self._soon()
            while theirs.bytes[0] != 9 and time.monotonic() < limit:
                time.sleep(0)  # short: what comes next must meet the transfer
            window.close()
            after = theirs.bytes.copy()
            with contextlib.suppress(TransportError):
                transfer.wait(self._soon())
            assert np.array_equal(theirs.bytes, after), "bytes were written after the window was closed"
            self._assert_works(ends)

    def test_endpoint_closed(self) -> None:
        theirs, mine = self._memory(1000, 5), self._memory(1000, 9)
        parts = [RegionPart(mine.view, 0)]
        with self._ends() as ends:
            window = ends.owner.open_window(theirs.view, "write")
            ends.owner.close()
            ends.owner.close()
            self._refused(TransportError, lambda: ends.user.write(window.grant, parts))
            with pytest.raises(TransportError):
                ends.owner.open_window(theirs.view, "write")
            window.close()
            ends.user.close()
            self._refused(TransportError, lambda: ends.user.write(window.grant, parts))
        assert (theirs.bytes == 5).all()

    def test_nothing_is_left_of_many_windows(self) -> None:
        memory = self._memory(100_000)
        with self._ends() as ends:
            self._assert_works(ends)
            before = open_descriptors()
            for _ in range(self.windows):
                with self._window(ends, memory, "write") as window:
                    self._move(ends, window.grant, [RegionPart(memory.view[:100], 5000)], "write")
            assert open_descriptors() <= before, "descriptors were left open"

    # -- another process -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _child(self) -> Iterator[tuple[subprocess.Popen[str], bytes, bytes]]:
        """A process that owns 64 MiB of sevens, with the grants to read and to write them."""
        if not self.child_setup:
            pytest.skip("this transport stays within a process")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", f"{_ALLOCATE}\n{self.child_setup}\n{_OWNER}"],
            env=environment,
            stdin=pipe,
            stdout=pipe,
            text=True,
        ) as child:
            try:
                assert child.stdout is not None
                grants = [bytes.fromhex(child.stdout.readline()) for _ in range(2)]
                yield child, grants[0], grants[1]
            finally:
                child.kill()

    def test_another_process(self) -> None:
        data, back = self._memory(1 << 20, random_bytes(1 << 20)), self._memory(2 << 20)
        with self._child() as (_, to_read, to_write), contextlib.closing(self.endpoint()) as user:
            user.write(to_write, [RegionPart(data.view, 1 << 20)]).wait(self._soon())
            user.read(to_read, [RegionPart(back.view, 0)]).wait(self._soon())
        assert (back.bytes[: 1 << 20] == 7).all()
        assert np.array_equal(back.bytes[1 << 20 :], data.bytes)

    def test_owner_is_killed(self) -> None:
        """What is under way fails, and what comes later; other peers do not notice."""
        mine = self._memory(64 << 20, 9)
        with self._ends() as ends:
            with self._child() as (child, _, to_write):
                ends.user.write(to_write, [RegionPart(mine.view[:4096], 0)]).wait(self._soon())
                transfer = ends.user.write(to_write, [RegionPart(mine.view, 0)])
                child.kill()
                child.wait(timeout=self.patience_s)
                with contextlib.suppress(TransportError):  # it may have been as fast
                    transfer.wait(self._soon())
                started = time.monotonic()
                self._refused(
                    TransportError,
                    lambda: ends.user.write(to_write, [RegionPart(mine.view[:4096], 0)]),
                )
                assert time.monotonic() - started < self.patience_s
            self._assert_works(ends)
