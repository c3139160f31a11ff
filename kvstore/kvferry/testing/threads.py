"""Threads of a test that are known to block before the test goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import TransferTimeoutError

__all__ = ["Blocked", "until_asleep"]

_START_S: Final = 30.0


def until_asleep(thread_id: int, deadline: float) -> None:
    """Wait until a thread of this process blocks in the kernel (where the system shows it)."""
    stat = Path(f"/proc/self/task/{thread_id}/stat")
    seen = 0
    while seen < 5:
        if time.monotonic() >= deadline:
            raise TransferTimeoutError(f"thread {thread_id} did not come to rest")
        try:
            state = stat.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # it has ended, or the system does not show it
            return
        seen = seen + 1 if state == "S" else 0
        time.sleep(0.005)


class Blocked:
    """Runs one call in a thread of ``pool`` and waits until it blocks.

    Attributes:
        future: What comes of the call.
    """

    def __init__(self, pool: ThreadPoolExecutor, call: Callable[[], object]) -> None:
        started = threading.Event()
        ids: list[int] = []

        def run() -> object:
            ids.append(threading.get_native_id())
            started.set()
            return call()

        self.future: Future[object] = pool.submit(run)
        assert started.wait(_START_S)
        until_asleep(ids[0], deadline_in(_START_S))

    def assert_ends_with(self, error: type[Exception], within_s: float = 20.0) -> None:
        """Check that the call ends with ``error``, and soon."""
        with pytest.raises(error):
            self.future.result(timeout=within_s)
