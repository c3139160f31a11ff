"""UCXX without kvferry: the baseline of the ``ucx`` transport, in the same pattern.

One process makes an end, passes its address to the other by any means, and both ``join``. ``put`` sends the
parts of a message, a window of them posted at once, and waits for one byte; ``take`` receives them and
answers. Both progress without sleep, as fast as UCXX goes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError
from kvferry.transports.ucx.library import library

__all__ = ["BareUcxx"]

_DATA_TAG: Final = 1
_ACK_TAG: Final = 2
_LOOK_EVERY: Final = 1024  # rounds of progress between two looks at the clock


class BareUcxx:
    """One end; one thread at a time.

    Args:
        config: Options of UCX by name without ``UCX_``, the same as those of the transport beside it.
        window: Messages that are posted at once.

    Raises:
        PluginUnavailableError: If ``ucxx`` is not installed.
    """

    def __init__(self, config: Mapping[str, str], window: int) -> None:
        self._ucx = library()
        self._worker: Any = self._ucx.new_worker(self._ucx.new_context(config))
        self._endpoint: Any = None
        self._window = window
        self._data = self._ucx.tag(_DATA_TAG)
        self._ack_tag = self._ucx.tag(_ACK_TAG)
        self._ack = self._ucx.array(np.zeros(1, np.uint8))

    @property
    def address(self) -> bytes:
        """For the other end's :meth:`join`."""
        return bytes(self._worker.address)

    def join(self, address: bytes) -> None:
        """Connect to the other end; without error handling, so that it may use shared memory."""
        self._endpoint = self._ucx.new_endpoint(self._worker, address, error_handling=False)

    def put(self, parts: Sequence[memoryview], deadline: float) -> None:
        """Send ``parts`` and wait for the answer.

        Raises:
            TransferTimeoutError: At the deadline; the end is of no use then.
        """
        array, send = self._ucx.array, self._endpoint.tag_send
        for start in range(0, len(parts), self._window):
            window = [array(part) for part in parts[start : start + self._window]]
            self._wait([send(part, self._data) for part in window], deadline)
        self._wait([self._worker.tag_recv(self._ack, self._ack_tag)], deadline)

    def take(self, views: Sequence[memoryview], deadline: float) -> None:
        """Receive parts of exactly the sizes of ``views`` and answer; raises as :meth:`put`."""
        array, receive = self._ucx.array, self._worker.tag_recv
        for start in range(0, len(views), self._window):
            window = [array(view) for view in views[start : start + self._window]]
            self._wait([receive(view, self._data) for view in window], deadline)
        self._wait([self._endpoint.tag_send(self._ack, self._ack_tag)], deadline)

    def close(self) -> None:
        """End it; the other end may not be in a call."""
        self._ucx.destroy(self._worker)

    def _wait(self, requests: list[Any], deadline: float) -> None:
        progress, rounds = self._worker.progress_once, 0
        while not requests[-1].completed or not all(request.completed for request in requests):
            progress()
            rounds += 1
            if rounds % _LOOK_EVERY == 0 and time.monotonic() >= deadline:
                raise TransferTimeoutError(f"UCXX did not do {len(requests)} operations by the deadline")
        for request in requests:
            try:
                request.check_error()
            except self._ucx.error as error:
                raise ConnectionClosedError(f"UCXX: {error}") from error
