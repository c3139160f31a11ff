from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import OverloadedError, RequestCancelledError, RequestError
from kvferry.engine.workers.admission import Admission, Place

TIMEOUT_S = 10.0


def wanted() -> None:
    """Nobody has cancelled."""


def admission(*, blocks: int = 10, places: int = 2, max_waiting: int = 2) -> Admission:
    return Admission(blocks=blocks, places=places, max_waiting=max_waiting, what="test worker")


class Waiting:
    """A request in line, in a thread of its own."""

    def __init__(self, line: Admission, blocks: int, still_wanted: Callable[[], None] = wanted) -> None:
        self.place: Place | None = None
        self.error: Exception | None = None
        self.done = threading.Event()
        waiting = line.waiting

        def run() -> None:
            try:
                self.place = line.enter(blocks, deadline_in(TIMEOUT_S), still_wanted)
            except OverloadedError as error:
                self.error = error
            self.done.set()

        self.thread = threading.Thread(target=run, name="kvferry-test-waiting")
        self.thread.start()
        limit = deadline_in(TIMEOUT_S)
        while line.waiting == waiting and not self.done.is_set():
            assert time.monotonic() < limit
            threading.Event().wait(0.005)

    def let_in(self) -> Place:
        assert self.done.wait(TIMEOUT_S)
        self.thread.join(TIMEOUT_S)
        assert self.place is not None
        return self.place


def test_what_can_never_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(RequestError, match="needs 11 blocks of paged KV, this test worker has 10"):
        admission().enter(11, deadline_in(1), wanted)


def test_blocks_and_places_are_given_back_once() -> None:
    line = admission(places=1)
    place = line.enter(10, deadline_in(1), wanted)
    assert line.running == 1
    place.leave()
    place.leave()
    assert line.running == 0
    line.enter(10, deadline_in(1), wanted).leave()
    assert line.wait_idle(deadline_in(1))


def test_who_came_first_is_let_in_first_even_if_a_later_one_would_fit() -> None:
    line = admission()
    first = line.enter(8, deadline_in(1), wanted)
    big, small = Waiting(line, 9), Waiting(line, 1)
    assert not small.done.is_set()
    first.leave()
    place = big.let_in()
    small.let_in().leave()
    place.leave()
    assert line.wait_idle(deadline_in(1))


def test_a_full_line_refuses_and_a_deadline_gives_up() -> None:
    line = admission(places=1, max_waiting=1)
    place = line.enter(1, deadline_in(1), wanted)
    with pytest.raises(OverloadedError, match="no room at this test worker in time: 1 requests run"):
        line.enter(1, deadline_in(0.05), wanted)
    waiting = Waiting(line, 1)
    with pytest.raises(OverloadedError, match="1 requests wait at this test worker"):
        line.enter(1, deadline_in(1), wanted)
    place.leave()
    waiting.let_in().leave()
    assert (line.running, line.waiting) == (0, 0)


def test_who_is_cancelled_in_line_leaves_it() -> None:
    line = admission(places=1)
    place = line.enter(1, deadline_in(1), wanted)

    def cancelled() -> None:
        raise RequestCancelledError("gone")

    with pytest.raises(RequestCancelledError):
        line.enter(1, deadline_in(TIMEOUT_S), cancelled)
    assert line.waiting == 0
    place.leave()


def test_closing_ends_the_line_but_not_those_inside() -> None:
    line = admission(places=1)
    place = line.enter(1, deadline_in(1), wanted)
    waiting = Waiting(line, 1)
    line.close()
    assert waiting.done.wait(TIMEOUT_S)
    assert isinstance(waiting.error, OverloadedError)
    with pytest.raises(OverloadedError, match="shutting down"):
        line.enter(1, deadline_in(1), wanted)
    assert not line.wait_idle(deadline_in(0.05))
    place.leave()
    assert line.wait_idle(deadline_in(1))
