from __future__ import annotations

import contextlib
import threading
from collections import deque

import pytest

from kvferry.core.condition import QuietCondition


def test_who_waits_is_woken_and_nobody_else_is_told() -> None:
    lock = threading.Lock()
    condition = QuietCondition(lock)
    with lock:
        condition.notify_all()
        condition.notify()
        assert condition.wait(0.001) is False
        assert not condition._sleepers
    woken: list[int] = []
    ready = threading.Semaphore(0)

    def wait(number: int) -> None:
        with condition:
            ready.release()
            if condition.wait(30):
                woken.append(number)

    threads = [threading.Thread(target=wait, args=(n,), name="kvferry-test") for n in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert ready.acquire(timeout=30)
    with lock:  # each holds the lock from its release on until it waits
        assert len(condition._sleepers) == 3
        condition.notify()
        condition.notify_all()
    for thread in threads:
        thread.join(30)
    assert sorted(woken) == [0, 1, 2]
    assert not condition._sleepers


class _Interrupted(BaseException):
    pass


class _Sleepers(deque[threading.Lock]):
    """A signal handler raises as soon as the first one was taken out."""

    def popleft(self) -> threading.Lock:
        super().popleft()
        raise _Interrupted


@pytest.mark.parametrize("everybody", [False, True])
def test_nobody_is_forgotten_when_a_handler_raises_while_others_are_woken(everybody: bool) -> None:
    condition = QuietCondition(threading.Lock())
    asleep = [threading.Lock(), threading.Lock()]
    for sleeper in asleep:
        sleeper.acquire()
    condition._sleepers = _Sleepers(asleep)
    for _ in asleep:  # the second is the next call that may give room
        with contextlib.suppress(_Interrupted):
            if everybody:
                condition.notify_all()
            else:
                condition.notify()
    assert not any(sleeper.locked() for sleeper in asleep)


def test_one_that_was_woken_already_is_not_woken_again() -> None:
    condition = QuietCondition(threading.Lock())
    condition._sleepers.append(threading.Lock())  # as a call leaves it that a handler has ended
    condition.notify()
    assert not condition._sleepers
