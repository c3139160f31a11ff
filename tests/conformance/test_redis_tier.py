"""The redis tier passes the suite over a real Valkey: whole values, values in parts, and a cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.store.remote.redis import RedisOptions, RedisTier
from kvferry.store.remote.redis.backend import RedisBackend
from kvferry.store.tier import Tier, TierNamespace
from kvferry.testing.redis_server import RedisServer, redis_cluster
from kvferry.testing.tiers import TierSuite
from kvferry.testing.tiers_common import Damage, Fault

VALUE_NBYTES = 10 << 10  # a block of the suite with its manifest and what a name is counted with
PASSWORD = "of-the-suite"
RIGHTS = {"read": ("get", "getrange"), "write": ("set",)}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        server.call("ACL", "SETUSER", "suite", "on", f">{PASSWORD}", "~*", "+@all")
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[RedisServer]]:
    with redis_cluster() as servers:
        yield servers


class RedisSuite(TierSuite):
    servers: list[RedisServer]
    cluster = False
    part_nbytes = 32 << 20

    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        self.servers = [server]

    def urls(self) -> tuple[str, ...]:
        return (self.servers[0].url,)

    def make_tier(self, medium: Path, blocks: int) -> Tier:
        options = RedisOptions(
            urls=self.urls(),
            username=None if self.cluster else "suite",
            password=None if self.cluster else PASSWORD,
            prefix=hashlib.sha256(str(medium).encode()).hexdigest()[:16],
            capacity_nbytes=blocks * VALUE_NBYTES,
            part_nbytes=self.part_nbytes,
        )
        tier = RedisTier("redis", options)
        assert tier.wait_found(deadline=deadline_in(20))
        return tier

    def name(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> str:
        assert isinstance(tier, RedisTier)
        return tier.names.block(tier.names.home(namespace), key)

    def damage(
        self, tier: Tier, namespace: TierNamespace, key: BlockKey, how: Damage, other: BlockKey
    ) -> None:
        (server,) = self.servers
        name = self.name(tier, namespace, key)
        value = server.call("GET", self.name(tier, namespace, other) if how == "swap" else name)
        assert isinstance(value, bytes)
        if how == "flip":
            name = self.data_name(name)
            value = server.call("GET", name)
            assert isinstance(value, bytes)
            value = value[:-777] + bytes([value[-777] ^ 4]) + value[-776:]
        elif how != "swap":
            value = value[: len(value) // 2] if how == "truncate" else b""
        server.call("SET", name, value)

    def data_name(self, name: str) -> str:
        """The value that has the data of a block."""
        return name

    def lose(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> None:
        (server,) = self.servers
        assert server.call("DEL", self.name(tier, namespace, key)) == 1

    def fault(self, tier: Tier, kind: Fault) -> AbstractContextManager[object]:
        (server,) = self.servers
        if kind == "stall":
            return server.hanging()
        return full(server) if kind == "full" else forbidden(server, RIGHTS[kind])


@contextmanager
def full(server: RedisServer) -> Iterator[None]:
    server.call("CONFIG", "SET", "maxmemory", "1")
    try:
        yield
    finally:
        server.call("CONFIG", "SET", "maxmemory", "0")


@contextmanager
def forbidden(server: RedisServer, verbs: tuple[str, ...]) -> Iterator[None]:
    server.call("ACL", "SETUSER", "suite", *(f"-{verb}" for verb in verbs))
    try:
        yield
    finally:
        server.call("ACL", "SETUSER", "suite", *(f"+{verb}" for verb in verbs))


class TestWhole(RedisSuite):
    pass


class TestParts(RedisSuite):
    """Every value is split; the suite damages manifests, and loses parts."""

    @pytest.fixture(autouse=True)
    def _small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RedisBackend, "max_value_nbytes", lambda *_: 3000)

    def data_name(self, name: str) -> str:
        (server,) = self.servers
        names = server.call("KEYS", name + ":*.1")
        assert isinstance(names, list)
        (found,) = names
        assert isinstance(found, bytes)
        return found.decode()

    def lose(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> None:
        (server,) = self.servers
        assert server.call("DEL", self.data_name(self.name(tier, namespace, key))) == 1


class TestCluster(RedisSuite):
    cluster = True

    @pytest.fixture(autouse=True)
    def _server(self, cluster: list[RedisServer]) -> None:
        self.servers = cluster

    damage = TierSuite.damage
    lose = TierSuite.lose
    fault = TierSuite.fault
