"""How fast one tenant may go: requests and bytes a second, over all its connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvferry.core.errors import OverloadedError

__all__ = ["Meter"]

_BURST_S: Final = 1.0


class Meter:
    """Lets requests through as long as neither limit is used up. Thread safe.

    A second's worth may come at once. Bytes are counted when they have moved, so one request may go beyond
    what is left; the next ones wait until that is made good.

    Args:
        nbytes_per_s: Bytes a second, or no limit.
        requests_per_s: Requests a second, or no limit.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        nbytes_per_s: float | None,
        requests_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._at = clock()
        self.set(nbytes_per_s, requests_per_s)

    def set(self, nbytes_per_s: float | None, requests_per_s: float | None) -> None:
        """Other limits from now on."""
        with self._lock:
            self._nbytes_per_s, self._requests_per_s = nbytes_per_s, requests_per_s
            self._nbytes = (nbytes_per_s or 0.0) * _BURST_S
            self._requests = max(1.0, (requests_per_s or 0.0) * _BURST_S)
            self._limited = nbytes_per_s is not None or requests_per_s is not None

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """Bytes and requests a second."""
        return self._nbytes_per_s, self._requests_per_s

    def admit(self) -> None:
        """Let one request through.

        Raises:
            OverloadedError: If a limit is used up; with when it will not be.
        """
        if not self._limited:
            return
        with self._lock:
            self._refill()
            if self._nbytes_per_s is not None and self._nbytes <= 0:
                raise _over("bytes", self._nbytes_per_s, -self._nbytes / self._nbytes_per_s)
            if self._requests_per_s is not None:
                if self._requests < 1:
                    raise _over("requests", self._requests_per_s, (1 - self._requests) / self._requests_per_s)
                self._requests -= 1

    def spend(self, nbytes: int) -> None:
        """Count bytes that were moved."""
        if not self._limited or not nbytes:
            return
        with self._lock:
            self._refill()
            if self._nbytes_per_s is not None:
                self._nbytes -= nbytes

    def _refill(self) -> None:
        now = self._clock()
        passed, self._at = now - self._at, now
        if (rate := self._nbytes_per_s) is not None:
            self._nbytes = min(rate * _BURST_S, self._nbytes + passed * rate)
        if (number := self._requests_per_s) is not None:
            self._requests = min(max(1.0, number * _BURST_S), self._requests + passed * number)


def _over(what: str, limit: float, wait_s: float) -> OverloadedError:
    return OverloadedError(
        f"the tenant's limit of {limit:g} {what} a second is used up; again in {max(wait_s, 0.001):.3g} s"
    )
