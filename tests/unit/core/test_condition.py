from __future__ import annotations

import threading

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
