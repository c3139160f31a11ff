from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from kvferry.core.condition import QuietCondition
from kvferry.core.interrupts import from_signal_handler


def raising(_number: int, _frame: FrameType | None, *_more: object) -> None:
    raise TimeoutError("the caller's own")


class Handler:
    def method(self, number: int, frame: FrameType | None) -> None:
        raising(number, frame)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raising(number, frame)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "handler",
    [raising, functools.partial(raising), Handler().method, Handler()],
    ids=lambda h: type(h).__name__,
)
def test_an_exception_of_a_signal_handler_is_told_from_others(handler: Handler) -> None:
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(TimeoutError) as caught:
        signal.raise_signal(signal.SIGUSR1)
    assert from_signal_handler(caught.value)
    with pytest.raises(OSError, match="of the code") as other:
        raise OSError("of the code")
    assert not from_signal_handler(other.value)
    assert from_signal_handler(KeyboardInterrupt())


def test_the_lock_is_held_after_a_handler_has_raised_in_a_wait() -> None:
    signal.signal(signal.SIGUSR1, raising)
    lock = threading.Lock()
    condition = QuietCondition(lock)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        with lock:  # free since the wait has begun
            signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=interrupt, name="kvferry-test")
    with pytest.raises(TimeoutError), lock:  # noqa: PT012
        thread.start()
        condition.wait(30)
    thread.join(30)
    assert not lock.locked()
    assert not condition._sleepers
