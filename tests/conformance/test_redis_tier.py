"""The redis tier passes the suite over a real Valkey: whole values, values in parts, and a cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.core.spec import KVSpec
from kvferry.store.encoding import TierCodec
from kvferry.store.remote.redis import RedisOptions, RedisTier
from kvferry.store.remote.redis.backend import RedisBackend
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, Tier, TierNamespace, WriteOutcome
from kvferry.testing.codecs import fill_of, kv_layer
from kvferry.testing.redis_server import RedisServer, redis_cluster
from kvferry.testing.tiers import TierSuite
from kvferry.testing.tiers_common import Damage, Fault, chain, closing, write

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
    codec = "off"
    flipped = 777

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
        tier = RedisTier("redis", options, TierCodec(self.codec))
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
            at = self.flipped
            value = value[:-at] + bytes([value[-at] ^ 4]) + value[1 - at :]
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


class TestEncoded(RedisSuite):
    """Blocks become a sixth: the suite's bytes repeat themselves."""

    codec = "zstd"
    flipped = 77

    def test_blocks_are_encoded_here(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        write(tier, namespace, keys)
        assert tier.usage().counters["codec_encoded_blocks"] == len(keys)
        assert tier.usage().used_nbytes < len(keys) * VALUE_NBYTES // 2

    def test_blocks_larger_than_a_part_come_back(self, tmp_path: Path) -> None:
        """Lossy tiers and others share the store; values in parts are encoded too."""
        spec = KVSpec(model="m", revision="r", layers=(kv_layer(64, 4, 64),) * 4, block_tokens=64)
        namespace = TierNamespace.of("default", spec)
        keys = chain(namespace, 1, 2)
        data = fill_of("values", spec.block_nbytes)
        self.part_nbytes = 64 << 10
        for text, reader, outcome in (
            ("ebp", TierCodec(), ReadOutcome.HIT),
            ("int8", TierCodec("int8", allow_lossy=True), ReadOutcome.HIT),
            ("int8", TierCodec(), ReadOutcome.MISS),
        ):
            with (
                closing(self.make_tier(tmp_path, 400)) as writer,
                closing(self.make_tier(tmp_path, 400)) as other,
            ):
                assert isinstance(writer, RedisTier)
                assert isinstance(other, RedisTier)
                writer._writer._codec = TierCodec(text, allow_lossy=True)
                other.codec = reader
                for tier in (writer, other):
                    tier.open(namespace)
                blocks = [BlockWrite(key, memoryview(data), None, 0) for key in keys]
                stored = writer.write(namespace, blocks, deadline=deadline_in(20))
                assert [r.outcome for r in stored] == [WriteOutcome.STORED] * 2
                reads = [BlockRead(key, page_aligned(spec.block_nbytes)) for key in keys]
                found = other.read_into(namespace, reads, deadline=deadline_in(20))
                assert [r.outcome for r in found] == [outcome] * 2
                assert {r.lossy for r in found} == {text == "int8" and outcome is ReadOutcome.HIT}
                if text == "ebp":
                    assert [bytes(r.into) for r in reads] == [data] * 2
                kept = other.contains(namespace, keys, deadline=deadline_in(20))
                assert kept == [outcome is ReadOutcome.HIT] * 2
                writer.remove(namespace, keys, deadline=deadline_in(20))
