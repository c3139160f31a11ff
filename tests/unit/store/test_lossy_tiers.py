"""What a lossy tier gives stays marked in memory, and goes to no tier that takes no loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey
from kvferry.core.room import NOTHING_BELOW
from kvferry.core.spec import KVSpec
from kvferry.store import open_store
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.encoding import TierCodec
from kvferry.store.level import LevelOptions
from kvferry.store.policies import OnEvict, WriteBack, WriteThrough
from kvferry.store.tier import BlockWrite, TierNamespace, WriteResult
from kvferry.store.tiered import TieredStore
from kvferry.testing.codecs import fill_of, kv_layer

SPEC = KVSpec(model="m", revision="r", layers=(kv_layer(64, 1, 64),) * 2, block_tokens=64)
DATA = fill_of("values", SPEC.block_nbytes)


def disk(folder: Path, name: str, codec: TierCodec) -> DiskTier:
    options = DiskOptions((str(folder / name),), 4 << 20, direct="off")
    return DiskTier(name, options, codec=codec)


@pytest.mark.parametrize("taken", [False, True], ids=["lossless below", "lossy below"])
@pytest.mark.parametrize("write", [WriteThrough, OnEvict])
def test_loss_does_not_leave_by_way_of_memory(
    tmp_path: Path, taken: bool, write: Callable[[], WriteThrough | OnEvict]
) -> None:
    lossy = disk(tmp_path, "lossy", TierCodec("int8", allow_lossy=True))
    store = TieredStore(4 * SPEC.block_nbytes, [(lossy, LevelOptions(write=WriteThrough()))])
    namespace = store.namespace(SPEC)
    keys = namespace.keys(range(128))
    namespace.save([(key, DATA) for key in keys], parent=None, deadline=deadline_in(20))
    assert store.flush(deadline=deadline_in(20))
    store.close()

    first = disk(tmp_path, "lossy", TierCodec("int8", allow_lossy=True))
    second = disk(tmp_path, "below", TierCodec("ebp", allow_lossy=taken))
    # the tier that has the blocks comes last, so that the other one is offered them
    store = TieredStore(
        4 * SPEC.block_nbytes, [(second, LevelOptions(write=write())), (first, LevelOptions())]
    )
    assert len(store.namespace(SPEC).load(keys, deadline=deadline_in(20))) == 0
    namespace = store.namespace(SPEC, takes_lossy=True)
    with namespace.load(keys, deadline=deadline_in(20)) as lease:
        assert len(lease) == 2
        assert lease.lossy == {0, 1}
        assert bytes(lease.view(0)) != DATA
    assert store.flush(deadline=deadline_in(20))  # nothing counts as lost
    assert [entry.lossy for entry in second.scan()] == [True] * (2 if taken else 0)
    store.close()


def test_the_configuration_names_the_codec(tmp_path: Path) -> None:
    line = f"store.tiers=disk:{tmp_path}/kv?capacity=4MiB&direct=off&codec=ebp"
    config = load_config(assignments=["store.dram_capacity=1MiB", line]).config
    store = open_store(config.store)
    namespace = store.namespace(SPEC)
    keys = namespace.keys(range(128))
    namespace.save([(key, DATA) for key in keys], parent=None, deadline=deadline_in(20))
    assert store.flush(deadline=deadline_in(20))
    figures = store.stats().per_tier["disk"]
    assert figures["codec_encoded_blocks"] == 2
    assert figures["codec_encoded_nbytes"] > 1.3 * figures["codec_stored_nbytes"]
    store.close()
    shown = {option.name: option.text for option in config.store.tiers[0].values()}
    assert (shown["codec"], shown["allow_lossy"], shown["codec_check"]) == ("ebp", "false", "sample")


def test_a_lossy_codec_is_refused_when_the_configuration_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allow_lossy=true"):
        load_config(assignments=[f"store.tiers=disk:{tmp_path}/kv?capacity=4MiB&codec=int8"])


def test_status_says_what_is_lost(tmp_path: Path) -> None:
    tier = disk(tmp_path, "lossy", TierCodec("int8", allow_lossy=True))
    assert tier.usage().status["codec"].startswith("int8 (lossy")
    tier.close()


def lossy_save(store: TieredStore, keys: list[BlockKey]) -> None:
    """As a lossy codec of a link leaves it."""
    with store.namespace(SPEC).reserve(keys, parent=None, deadline=deadline_in(20)) as lease:
        for index in range(len(keys)):
            lease.view(index)[:] = DATA[::-1]
        lease.mark_lossy(range(len(keys)))
        lease.commit()
    assert store.flush(deadline=deadline_in(20))


def test_an_exact_save_takes_the_place_of_a_lossy_block_in_every_tier(tmp_path: Path) -> None:
    tier = disk(tmp_path, "both", TierCodec("ebp", allow_lossy=True))
    store = TieredStore(4 * SPEC.block_nbytes, [(tier, LevelOptions(write=WriteThrough()))])
    assert store.allows_lossy
    exact, any_loss = store.namespace(SPEC), store.namespace(SPEC, takes_lossy=True)
    keys = exact.keys(range(128))
    lossy_save(store, keys)
    assert [entry.lossy for entry in tier.scan()] == [True, True]
    store.evict(4 * SPEC.block_nbytes)
    assert any_loss.lookup(keys).tiers == ("both", "both")
    assert exact.lookup(keys).tiers == (None, None)
    assert len(exact.load(keys, deadline=deadline_in(20))) == 0
    assert exact.save([(key, DATA) for key in keys], parent=None, deadline=deadline_in(20)) == 2
    assert store.flush(deadline=deadline_in(20))
    assert [entry.lossy for entry in tier.scan()] == [False, False]
    store.evict(4 * SPEC.block_nbytes)
    for namespace in (exact, any_loss):
        with namespace.load(keys, deadline=deadline_in(20)) as lease:
            assert [bytes(lease.view(index)) for index in range(len(lease))] == [DATA, DATA]
            assert lease.lossy == frozenset()
    store.close()


def test_an_exact_block_below_is_found_behind_a_lossy_one_in_memory(tmp_path: Path) -> None:
    """And takes its place there, for readers of both kinds."""
    first = TieredStore(4 * SPEC.block_nbytes, [disk(tmp_path, "below", TierCodec("ebp", allow_lossy=True))])
    keys = first.namespace(SPEC).keys(range(128))
    first.namespace(SPEC).save([(key, DATA) for key in keys], parent=None, deadline=deadline_in(20))
    assert first.flush(deadline=deadline_in(20))
    first.close()

    tier = disk(tmp_path, "below", TierCodec("ebp", allow_lossy=True))
    store = TieredStore(4 * SPEC.block_nbytes, [tier])
    exact, any_loss = store.namespace(SPEC), store.namespace(SPEC, takes_lossy=True)
    with store._lock:  # as if a stream had brought them while the tier was away
        missing, slots, _ = store._take_slots(exact, dict.fromkeys(keys), NOTHING_BELOW, deadline_in(20))
        store._pool.publish_all(
            exact.namespace_id, exact.slot_nbytes, missing, missing.values(), slots, [0, 1]
        )
    assert any_loss.lookup(keys).tiers == ("dram", "dram")
    assert exact.lookup(keys).tiers == ("below", "below")
    with exact.load(keys, deadline=deadline_in(20)) as lease:
        assert [bytes(lease.view(index)) for index in range(len(lease))] == [DATA, DATA]
    with any_loss.load(keys, deadline=deadline_in(20)) as lease:
        assert lease.lossy == frozenset()
        assert bytes(lease.view(1)) == DATA
    assert store.stats().entries == 2
    store.close()


def test_a_lossless_reader_gets_nothing_of_a_lossy_tier_and_leaves_it_there(tmp_path: Path) -> None:
    store = TieredStore(4 * SPEC.block_nbytes, [disk(tmp_path, "lossy", TierCodec("int8", allow_lossy=True))])
    exact, any_loss = store.namespace(SPEC), store.namespace(SPEC, takes_lossy=True)
    keys = exact.keys(range(128))
    exact.save([(key, DATA) for key in keys], parent=None, deadline=deadline_in(20))
    assert store.flush(deadline=deadline_in(20))
    with exact.load(keys, deadline=deadline_in(20)) as lease:
        assert bytes(lease.view(1)) == DATA  # memory has what was saved
    store.evict(4 * SPEC.block_nbytes)
    for _ in range(2):
        assert len(exact.load(keys, deadline=deadline_in(20))) == 0
        exact.prefetch(keys)
    assert len(any_loss.load(keys, deadline=deadline_in(20))) == 2
    assert len(exact.load(keys, deadline=deadline_in(20))) == 0  # it is in memory now
    store.close()


class Careless(DiskTier):
    """Gives what it has to any reader, as one does that learns of the loss by reading."""

    def only_lossy(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> list[bool]:
        return [False] * len(keys)


def test_the_store_does_not_rely_on_its_tiers(tmp_path: Path) -> None:
    options = DiskOptions((str(tmp_path / "lossy"),), 4 << 20, direct="off")
    tier = Careless("lossy", options, codec=TierCodec("int8", allow_lossy=True))
    store = TieredStore(4 * SPEC.block_nbytes, [tier])
    exact, any_loss = store.namespace(SPEC), store.namespace(SPEC, takes_lossy=True)
    keys = exact.keys(range(128))
    exact.save([(key, DATA) for key in keys], parent=None, deadline=deadline_in(20))
    assert store.flush(deadline=deadline_in(20))
    store.evict(4 * SPEC.block_nbytes)
    assert len(exact.load(keys, deadline=deadline_in(20))) == 0
    assert (store.stats().entries, store.stats().pinned_nbytes) == (0, 0)
    assert len(any_loss.load(keys, deadline=deadline_in(20))) == 2
    store.close()


class Gated(DiskTier):
    """Writes wait for ``gate``, once they have said so."""

    def __init__(self, folder: Path, codec: str) -> None:
        self.waits, self.gate = threading.Event(), threading.Event()
        self.begun = list[BlockKey]()
        options = DiskOptions((str(folder),), 4 << 20, direct="off")
        super().__init__("disk", options, codec=TierCodec(codec, allow_lossy=True))

    def write(
        self, namespace: TierNamespace, blocks: Sequence[BlockWrite], *, deadline: float
    ) -> list[WriteResult]:
        self.begun += [block.key for block in blocks]
        self.waits.set()
        assert self.gate.wait(20)
        return super().write(namespace, blocks, deadline=deadline)


def save_lossy(namespace: Namespace, key: BlockKey, parent: BlockKey | None) -> None:
    with namespace.reserve([key], parent=parent, deadline=deadline_in(20)) as lease:
        lease.view(0)[:] = bytes(SPEC.block_nbytes)
        lease.mark_lossy([0])
        lease.commit()


@pytest.mark.parametrize("codec", ["off", "ebp"])
def test_an_exact_block_that_follows_a_lossy_one_closely_takes_its_place(tmp_path: Path, codec: str) -> None:
    """Both wait for the writer at once."""
    tier = Gated(tmp_path / "kv", codec)
    store = TieredStore(8 * SPEC.block_nbytes, [(tier, LevelOptions(write=WriteBack()))])
    exact, lossy = store.namespace(SPEC), store.namespace(SPEC, takes_lossy=True)
    first, key = exact.keys(range(128))
    exact.save([(first, DATA)], parent=None, deadline=deadline_in(20))
    assert tier.waits.wait(20)
    save_lossy(lossy, key, first)
    assert exact.save([(key, DATA)], parent=first, deadline=deadline_in(20)) == 1
    tier.gate.set()
    assert store.flush(deadline=deadline_in(20))
    assert tier.begun == [first, key], "the one whose place was taken is not written at all"
    store.evict(8 * SPEC.block_nbytes)
    assert exact.lookup([first, key]).tiers == ("disk", "disk")
    with exact.load([first, key], deadline=deadline_in(20)) as found:
        assert bytes(found.view(1)) == DATA
    store.close()


@pytest.mark.parametrize("writing", [False, True], ids=["queued", "being written"])
@pytest.mark.parametrize("all_of_them", [False, True], ids=["remove", "clear"])
def test_a_lossy_block_whose_place_was_taken_does_not_outlive_its_removal(
    tmp_path: Path, writing: bool, all_of_them: bool
) -> None:
    tier = Gated(tmp_path / "kv", "off")
    store = TieredStore(8 * SPEC.block_nbytes, [(tier, LevelOptions(write=WriteBack()))])
    exact, lossy = store.namespace(SPEC), store.namespace(SPEC, takes_lossy=True)
    first, key = exact.keys(range(128))
    if not writing:
        exact.save([(first, DATA)], parent=None, deadline=deadline_in(20))
        assert tier.waits.wait(20)
    save_lossy(lossy, key, first)
    assert tier.waits.wait(20)
    assert exact.save([(key, DATA)], parent=first, deadline=deadline_in(20)) == 1
    _ = exact.clear() if all_of_them else exact.remove([key])
    tier.gate.set()
    assert store.flush(deadline=deadline_in(20))
    assert lossy.lookup([key]).tiers == (None,)
    assert [entry.key for entry in tier.scan()] == ([] if writing or all_of_them else [first])
    store.close()
