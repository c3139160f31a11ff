"""Tiers that take loss and others share a store: each gets what it takes, and removes nothing of others."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, TypeAlias

import pytest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.spec import KVSpec
from kvferry.store.encoding import TierCodec
from kvferry.store.remote.redis import RedisOptions, RedisTier
from kvferry.store.remote.s3 import S3Options, S3Tier
from kvferry.store.remote.tier import RemoteTier
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, ReadResult, TierNamespace, WriteOutcome
from kvferry.testing.codecs import fill_of, kv_layer
from kvferry.testing.redis_server import RedisServer
from kvferry.testing.s3_server import S3Server
from kvferry.testing.tiers_common import chain

HIT, MISS, STORED, PRESENT = ReadOutcome.HIT, ReadOutcome.MISS, WriteOutcome.STORED, WriteOutcome.PRESENT
SPEC = KVSpec(model="m", revision="r", layers=(kv_layer(64, 4, 64),) * 4, block_tokens=64)
SPACE = TierNamespace.of("default", SPEC)
KEYS = chain(SPACE, 1, 2)
DATA = fill_of("values", SPEC.block_nbytes)
AnyRemote: TypeAlias = RemoteTier[Any]
Make = Callable[[TierCodec], AnyRemote]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["redis", "redis in parts", "s3"])
def make(request: pytest.FixtureRequest) -> Make:
    prefix = uuid.uuid4().hex

    def make_redis(codec: TierCodec) -> AnyRemote:
        server: RedisServer = request.getfixturevalue("redis")
        part_nbytes = (64 if "parts" in request.param else 32 << 10) << 10
        return RedisTier("r", RedisOptions(urls=(server.url,), prefix=prefix, part_nbytes=part_nbytes), codec)

    def make_s3(codec: TierCodec) -> AnyRemote:
        server: S3Server = request.getfixturevalue("s3")
        options = S3Options(
            bucket=server.bucket, endpoint=server.endpoint, access_key_id=server.access_key_id,
            secret_access_key=server.secret_access_key, prefix=prefix,
        )  # fmt: skip
        return S3Tier("s", options, codec)

    def make(codec: TierCodec) -> AnyRemote:
        tier = (make_s3 if request.param == "s3" else make_redis)(codec)
        tier.open(SPACE)
        return tier

    return make


def write(tier: AnyRemote, data: bytes = DATA) -> list[WriteOutcome]:
    blocks = [BlockWrite(key, memoryview(data), None, 0) for key in KEYS]
    return [result.outcome for result in tier.write(SPACE, blocks, deadline=deadline_in(20))]


def read(tier: AnyRemote, *, takes_lossy: bool = True) -> tuple[list[ReadResult], list[bytes]]:
    reads = [BlockRead(key, page_aligned(SPEC.block_nbytes), takes_lossy=takes_lossy) for key in KEYS]
    return tier.read_into(SPACE, reads, deadline=deadline_in(20)), [bytes(r.into) for r in reads]


def held(tier: AnyRemote) -> list[bool]:
    return tier.contains(SPACE, KEYS, deadline=deadline_in(20))


def values(tier: AnyRemote) -> int:
    start = tier.names.home(SPACE)
    return sum(len(some) for some in tier.backend.listing(start, deadline_in(20)))


def test_a_lossless_tier_leaves_the_lossy_blocks_of_others_where_they_are(make: Make) -> None:
    with (
        closing(make(TierCodec("int8", allow_lossy=True))) as lossy,
        closing(make(TierCodec())) as exact,
        closing(make(TierCodec("ebp", allow_lossy=True))) as any_loss,
    ):
        assert write(lossy) == [STORED] * 2
        there = values(lossy)
        assert [(r.outcome, r.lossy) for r in read(exact)[0]] == [(MISS, False)] * 2
        assert [(r.outcome, r.lossy) for r in read(any_loss, takes_lossy=False)[0]] == [(MISS, False)] * 2
        assert held(exact) == [False] * 2  # it knows now
        assert held(any_loss) == [True] * 2  # another reader of it may take them
        assert any_loss.only_lossy(SPACE, KEYS) == [True] * 2
        assert values(lossy) == there
        for tier in (lossy, any_loss):
            assert [(r.outcome, r.lossy) for r in read(tier)[0]] == [(HIT, True)] * 2


@pytest.mark.parametrize("text", ["off", "ebp"])
def test_an_exact_block_takes_the_place_of_a_lossy_one_and_not_the_other_way_round(
    make: Make, text: str
) -> None:
    with closing(make(TierCodec("int8", allow_lossy=True))) as lossy, closing(make(TierCodec(text))) as exact:
        assert write(lossy) == [STORED] * 2
        assert write(exact) == [PRESENT] * 2  # it has not looked yet
        read(exact)
        assert write(exact) == [STORED] * 2
        there = values(exact)
        assert held(exact) == [True] * 2
        assert write(lossy) == write(exact) == [PRESENT] * 2
        for tier in (lossy, exact):
            results, data = read(tier)
            assert [(r.outcome, r.lossy) for r in results] == [(HIT, False)] * 2
            assert data == [DATA] * 2
        assert exact.only_lossy(SPACE, KEYS) == [False] * 2
        exact.remove(SPACE, KEYS, deadline=deadline_in(20))
        assert values(exact) == 0  # no part was left behind
        assert write(exact) == [STORED] * 2
        assert values(exact) == there


def test_a_reader_of_an_old_manifest_does_not_remove_the_new_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its manifest and its parts another one has put an exact block there."""
    with closing(make(TierCodec("int8", allow_lossy=True))) as lossy, closing(make(TierCodec())) as exact:
        assert write(lossy) == [STORED] * 2
        read(exact)
        get, calls = lossy.backend.get, list[int]()

        def slowly(gets: object, deadline: float) -> object:
            found = get(gets, deadline)  # type: ignore[arg-type]
            calls.append(len(found))
            if len(calls) == 1:
                assert write(exact) == [STORED] * 2
            return found

        monkeypatch.setattr(lossy.backend, "get", slowly)
        read(lossy)
        results, data = read(exact)
        assert [r.outcome for r in results] == [HIT] * 2
        assert data == [DATA] * 2


def test_what_was_seen_is_forgotten_after_a_while(make: Make) -> None:
    """Others may put exact blocks in the place of lossy ones."""
    now = 0.0
    with (
        closing(make(TierCodec("int8", allow_lossy=True))) as lossy,
        closing(make(TierCodec())) as exact,
        closing(make(TierCodec())) as other,
    ):
        for tier in (exact, other):
            tier._unfit._clock = lambda: now
        write(lossy)
        for tier in (exact, other):
            read(tier)
        assert write(other) == [STORED] * 2
        assert held(exact) == [False] * 2
        now = 61.0
        assert held(exact) == [True] * 2
        assert read(exact)[1] == [DATA] * 2
