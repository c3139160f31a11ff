"""Work side by side: each thread has one part and its own CPU, and nothing is timed before all are ready."""

from __future__ import annotations

import os
import threading

import pytest

from kvferry.bench.side_by_side import SideBySide


def test_each_thread_takes_one_part_on_a_cpu_of_its_own() -> None:
    allowed = os.sched_getaffinity(0)
    seen: list[tuple[int, int, frozenset[int]]] = []
    work = SideBySide(3)
    try:
        for _ in range(3):
            seen.clear()
            seconds = work.run(
                lambda n: seen.append((n, threading.get_ident(), frozenset(os.sched_getaffinity(0)))),
                [1, 2, 3],
            )
            assert seconds > 0
            assert sorted(n for n, _, _ in seen) == [1, 2, 3]
            assert len({thread for _, thread, _ in seen}) == 3
            assert all(len(cpus) == 1 for _, _, cpus in seen)
            assert len(frozenset().union(*(cpus for _, _, cpus in seen))) == min(3, len(allowed))
    finally:
        work.close()
    assert os.sched_getaffinity(0) == allowed  # the caller's own thread stays free


def test_one_thread_is_the_callers() -> None:
    allowed = os.sched_getaffinity(0)
    seen: list[int] = []
    work = SideBySide(1)
    work.run(lambda _: seen.append(threading.get_ident()), [0])
    work.close()
    assert seen == [threading.get_ident()]
    assert os.sched_getaffinity(0) == allowed


def test_what_fails_in_a_thread_is_raised() -> None:
    work = SideBySide(2)
    try:
        with pytest.raises(ZeroDivisionError):
            work.run(lambda n: 1 // n, [1, 0])
        with pytest.raises(ValueError, match="3 parts for 2 threads"):
            work.run(len, [(), (), ()])
        assert work.run(lambda _: None, [1, 2]) > 0
    finally:
        work.close()
