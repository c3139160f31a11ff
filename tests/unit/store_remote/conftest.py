from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from kvferry.core.keys import BlockKey
from kvferry.store.remote.redis import RedisOptions, RedisTier
from kvferry.store.tier import TierNamespace
from kvferry.testing.redis_server import RedisServer
from kvferry.testing.tiers_common import SPEC, chain, closing, opened

MakeTier = Callable[..., "Opened"]


@dataclass
class Opened:
    """A tier, a namespace that it was told of, and the keys of a chain."""

    tier: RedisTier
    space: TierNamespace
    keys: list[BlockKey]

    def name(self, key: BlockKey) -> str:
        return self.tier.names.block(self.tier.names.home(self.space), key)


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> Iterator[RedisServer]:
    """A server that is empty, and whose settings the test may change."""
    shared.call("FLUSHALL")
    yield shared
    for name, value in (("maxmemory", "0"), ("maxmemory-policy", "noeviction")):
        shared.call("CONFIG", "SET", name, value)
    shared.call("CONFIG", "SET", "proto-max-bulk-len", "512mb")


@pytest.fixture
def make() -> Iterator[MakeTier]:
    with ExitStack() as stack:

        def make(url: str, **options: object) -> Opened:
            given: dict[str, object] = {"timeout_s": 5.0, "server_pause_s": 0.05, "urls": (url,), **options}
            tier = stack.enter_context(closing(RedisTier("redis", RedisOptions(**given))))  # type: ignore[arg-type]
            assert isinstance(tier, RedisTier)
            space = opened(tier, SPEC)
            return Opened(tier, space, chain(space, 1, 4))

        yield make


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The log lines so far, of warnings and what is worse."""
    caplog.set_level(logging.INFO)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
