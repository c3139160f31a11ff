from __future__ import annotations

import threading
import time

from kvferry.core.clock import deadline_in
from kvferry.store.io_pool import IoPool


def test_items_run_side_by_side_and_results_keep_their_order() -> None:
    pool = IoPool("kvferry-test", 3)
    together = threading.Barrier(3, timeout=20)

    def work(number: int) -> int:
        if number < 3:
            together.wait()
        return number * number

    results, begun = pool.run(20, work, deadline_in(20)).cancel()
    assert results == [n * n for n in range(20)]
    assert begun == range(20)
    assert pool.run(0, work, deadline_in(20)).settled.is_set()
    assert pool.close() == []


def test_a_small_batch_does_not_wait_for_a_large_one() -> None:
    pool = IoPool("kvferry-test", 1)
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def large(number: int) -> None:
        order.append(f"large {number}")
        begun.set()
        assert go_on.wait(20)

    first = threading.Thread(target=lambda: pool.run(50, large, deadline_in(30)))
    first.start()
    assert begun.wait(20)
    second = threading.Thread(target=lambda: pool.run(1, lambda _: order.append("small"), deadline_in(30)))
    second.start()
    while pool._queue.empty():  # until the small one stands in the queue
        time.sleep(0.001)
    go_on.set()
    for thread in (first, second):
        thread.join(30)
    assert order.index("small") <= 2
    assert len(order) == 51
    pool.close()


def test_the_caller_comes_back_at_its_deadline() -> None:
    pool = IoPool("kvferry-test", 2)
    go_on = threading.Event()
    start = time.monotonic()
    batch = pool.run(10, lambda _: go_on.wait(30), deadline_in(0.1))
    results, begun = batch.cancel()
    assert time.monotonic() - start < 25
    assert begun == range(2)
    assert results == [None] * 10
    assert not batch.settled.is_set()
    go_on.set()
    assert batch.settled.wait(20)
    pool.close()


def test_an_item_that_raises_has_no_result_and_the_others_have() -> None:
    pool = IoPool("kvferry-test", 2)

    def work(number: int) -> int:
        if number == 1:
            raise RuntimeError("on purpose")
        return number

    assert pool.run(3, work, deadline_in(20)).cancel()[0] == [0, None, 2]
    pool.close()


def test_nothing_hangs_after_close() -> None:
    pool = IoPool("kvferry-test", 2)
    assert pool.close() == []
    start = time.monotonic()
    assert pool.run(5, lambda n: n, deadline_in(30)).cancel()[0] == [None] * 5
    assert time.monotonic() - start < 25
