"""Values of a wrong type or kind are refused by the name of their field, before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvferry.client import Client
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey
from kvferry.core.placement import Placement
from kvferry.store import LevelOptions, StoreOptions, TieredStore
from kvferry.store.disk import DiskOptions
from kvferry.store.policies import AlwaysAdmit, AlwaysPromote, SecondHitAdmit, WriteBack, WriteThrough
from kvferry.store.tier import BlockRead, ReadOutcome, TierNamespace
from kvferry.testing.blocks import small_spec
from kvferry.testing.fake_tier import FakeTier

_NO_COUNT = (math.nan, 4.5, True, "4", None)
_NO_TIME = (math.nan, math.inf, True, "4", None, -1)


class _SometimesWrites(WriteThrough):
    when = cast("Any", "sometimes")


_WRONG: list[tuple[Callable[..., object], str, tuple[object, ...]]] = [
    (LevelOptions, "queue_nbytes", _NO_COUNT),
    (LevelOptions, "errors", _NO_COUNT),
    (LevelOptions, "pause_s", _NO_TIME),
    (LevelOptions, "lookup_timeout_s", _NO_TIME),
    (LevelOptions, "read_timeout_s", _NO_TIME),
    (LevelOptions, "write_timeout_s", _NO_TIME),
    (LevelOptions, "write", ("write_back", None, WriteBack, AlwaysAdmit(), _SometimesWrites())),
    (LevelOptions, "admission", ("always", None, SecondHitAdmit, AlwaysPromote())),
    (LevelOptions, "promotion", ("never", None, AlwaysPromote, AlwaysAdmit())),
    (StoreOptions, "prefetch_jobs", _NO_COUNT),
    (StoreOptions, "prefetch_timeout_s", _NO_TIME),
    (StoreOptions, "room_wait_s", _NO_TIME),
    (StoreOptions, "close_s", _NO_TIME),
    (StoreOptions, "watermarks", ((math.nan, 1), (0.1, True), (0.5,), "ab", 0.9, (0.9, 0.5), ("a", "b"))),
    (StoreOptions, "placement", (None, "hugepages")),
    (Placement, "hugepages", (1, "yes", None)),
    (Placement, "numa_node", (True, 0.0, "0", -1)),
    (lambda **given: DiskOptions(**{"directories": ("/d",), "capacity_nbytes": 1 << 20, **given}),
     "capacity", _NO_COUNT),
    (lambda **given: DiskOptions(("/d",), 1 << 20, **given), "keep_free", _NO_COUNT),
    (lambda **given: DiskOptions(("/d",), 1 << 20, **given), "quarantine", _NO_COUNT),
    (lambda **given: DiskOptions(("/d",), 1 << 20, **given), "read_threads", (*_NO_COUNT, 0, 65)),
    (lambda **given: DiskOptions(("/d",), 1 << 20, **given), "write_threads", (*_NO_COUNT, 0, 65)),
    (lambda **given: DiskOptions(("/d",), 1 << 20, **given), "retry_s", (*_NO_TIME, 0, 3601)),
    (lambda **given: DiskOptions(("/d",), 1 << 20, **given), "verify", (1, "no", None)),
    (lambda **given: DiskOptions(("/d",), 1 << 20, **given), "sync", (True, None, "sometimes", ["none"])),
    (lambda **given: DiskOptions(("/d",), 1 << 20, **given), "direct", (True, None, "maybe")),
    (lambda **given: DiskOptions(("/d",), 1 << 20, **given), "eviction", (True, None, 3)),
    (lambda **given: DiskOptions(**{"capacity_nbytes": 1 << 20, **given}), "directories",
     ("/data", b"/data", None, 3, (), ("",), (b"/data",), (None,), ("/a\0b",))),
]  # fmt: skip
_SIZES = ("capacity", "keep_free", "quarantine")


@pytest.mark.parametrize(("make", "field", "values"), _WRONG, ids=[field for _, field, _ in _WRONG])
def test_options(make: Callable[..., object], field: str, values: tuple[object, ...]) -> None:
    name = f"{field}_nbytes" if field in _SIZES else field
    for value in values:
        with pytest.raises(ConfigError, match=field):
            make(**{name: value})


@pytest.mark.parametrize("value", [*_NO_COUNT, 0, -4096])
def test_capacity_of_memory(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"capacity_nbytes|an arena of"):
        TieredStore(value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("lease_s", (*_NO_TIME, 0)),
        ("write_quota_nbytes", (math.nan, 4.5, True, "4", 0)),
        ("eviction", ("lru", None, 5)),
        ("options", (None, {}, LevelOptions())),
    ],
)
def test_the_rest_of_the_store(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=field):
            TieredStore(1 << 20, **{field: value})


@pytest.mark.parametrize(
    "wrong",
    ["disk", None, (FakeTier("a"),), (FakeTier("a"), StoreOptions()), (LevelOptions(), FakeTier("a"))],
)
def test_tiers(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="tiers has"):
        TieredStore(1 << 20, [wrong])


def test_tiers_are_closed_if_another_is_none() -> None:
    tiers = [FakeTier("a"), FakeTier("b")]
    with pytest.raises(ConfigError, match="tiers has"):
        TieredStore(1 << 20, [tiers[0], cast("Any", "disk"), tiers[1]])
    space = TierNamespace.of("t", small_spec())
    key = BlockKey(bytes(32))
    into = memoryview(bytearray(space.spec.block_nbytes))
    for tier in tiers:
        tier.open(space)
        (read,) = tier.read_into(space, [BlockRead(key, into)], deadline=deadline_in(20))
        assert read.outcome is ReadOutcome.FAILED


def test_paths_may_be_paths(tmp_path: Path) -> None:
    assert DiskOptions((cast("Any", tmp_path),), 1 << 20).directories == (str(tmp_path),)


def _foreign(nbytes: int) -> list[object]:
    strided = np.zeros((nbytes, 2), np.uint8)[:, 0]
    fortran = np.asfortranarray(np.zeros((nbytes // 4, 4), np.uint8))
    return ["a" * nbytes, None, [0] * nbytes, 7, strided, fortran]


def test_values_of_blocks_are_refused_by_their_key() -> None:
    with closing(TieredStore(1 << 20)) as store:
        namespace = store.namespace(small_spec())
        (key,) = namespace.keys(range(small_spec().block_tokens))
        for value in _foreign(small_spec().block_nbytes):
            with pytest.raises(ConfigError, match=f"block {key[:8].hex()}.* contiguous"):
                namespace.save([(key, cast("Any", value))], parent=None, deadline=deadline_in(20))
        for blocks in (None, 7, [key], [(key,)], [7]):
            with pytest.raises(ConfigError, match="pair"):
                namespace.save(cast("Any", blocks), parent=None, deadline=deadline_in(20))
        assert store.stats().used_nbytes == 0


@pytest.mark.parametrize("wrong", [None, "model", {}])
def test_what_is_no_spec_or_scope_is_refused_by_its_type(wrong: Any) -> None:
    with closing(TieredStore(1 << 20)) as store:
        with pytest.raises(ConfigError, match=f"spec .* is {type(wrong).__name__}"):
            store.namespace(wrong)
        with pytest.raises(ConfigError, match=f"scope .* is {type(wrong).__name__}"):
            store.namespace(small_spec(), wrong)


@pytest.mark.parametrize("wrong", ["no", "false", 1, 0, None])
def test_whether_loss_is_taken_is_said_plainly(wrong: Any) -> None:
    with closing(TieredStore(1 << 20)) as store, pytest.raises(ConfigError, match="takes_lossy"):
        store.namespace(small_spec(), takes_lossy=wrong)
    with closing(Client("tcp://127.0.0.1:1")) as client, pytest.raises(ConfigError, match="takes_lossy"):
        client.namespace(small_spec(), takes_lossy=wrong)
