"""What a lossy tier gives stays marked in memory, and goes to no tier that takes no loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.errors import ConfigError
from kvferry.core.spec import KVSpec
from kvferry.store import open_store
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.encoding import TierCodec
from kvferry.store.level import LevelOptions
from kvferry.store.policies import OnEvict, WriteThrough
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
    namespace.save([(key, DATA) for key in keys], parent=None, deadline=deadline_in(5))
    assert store.flush(deadline=deadline_in(5))
    store.close()

    first = disk(tmp_path, "lossy", TierCodec("int8", allow_lossy=True))
    second = disk(tmp_path, "below", TierCodec("ebp", allow_lossy=taken))
    # the tier that has the blocks comes last, so that the other one is offered them
    store = TieredStore(
        4 * SPEC.block_nbytes, [(second, LevelOptions(write=write())), (first, LevelOptions())]
    )
    namespace = store.namespace(SPEC)
    with namespace.load(keys, deadline=deadline_in(5)) as lease:
        assert len(lease) == 2
        assert bytes(lease.view(0)) != DATA
    assert store.flush(deadline=deadline_in(5))  # nothing counts as lost
    assert [entry.lossy for entry in second.scan()] == [True] * (2 if taken else 0)
    store.close()


def test_the_configuration_names_the_codec(tmp_path: Path) -> None:
    line = f"store.tiers=disk:{tmp_path}/kv?capacity=4MiB&direct=off&codec=ebp"
    config = load_config(assignments=["store.dram_capacity=1MiB", line]).config
    store = open_store(config.store)
    namespace = store.namespace(SPEC)
    keys = namespace.keys(range(128))
    namespace.save([(key, DATA) for key in keys], parent=None, deadline=deadline_in(5))
    assert store.flush(deadline=deadline_in(5))
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
