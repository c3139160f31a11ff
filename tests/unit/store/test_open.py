from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvferry.core.config import TierConfig
from kvferry.core.config_sources import load_config
from kvferry.core.errors import ConfigError
from kvferry.core.tier_plugins import TIERS
from kvferry.store import open_store
from kvferry.store.disk import DiskTier
from kvferry.store.disk.names import tenant_folder
from kvferry.store.policies import NeverPromote, OnEvict, S3FIFOPolicy, SecondHitAdmit
from kvferry.store.tier import TierOption
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.fake_tier import FakeTier
from kvferry.testing.store_calls import chain, loaded, settle

SPEC = small_spec("tiered")


@pytest.fixture
def fakes() -> Iterator[list[FakeTier]]:
    """The tiers of kind ``fake`` that were made."""
    made: list[FakeTier] = []

    class Listed(FakeTier):
        def __init__(self, name: str = "fake", capacity_nbytes: int = 0) -> None:
            super().__init__(name, capacity_nbytes)
            made.append(self)

    TIERS.register("fake", Listed)
    yield made
    TIERS.unregister("fake")


def test_a_store_of_memory_alone() -> None:
    store = open_store(load_config(assignments=["store.dram_capacity=1MiB"]).config.store)
    ns = store.namespace(SPEC)
    assert save_blocks(ns, chain(ns, 1, 3)) == 3
    assert loaded(ns, chain(ns, 1, 3)) == 3
    store.close()


def test_tables_of_a_file(tmp_path: Path, fakes: list[FakeTier]) -> None:
    file = tmp_path / "kvferry.toml"
    file.write_text(
        """
        [store]
        dram_capacity = "2MiB"
        eviction = "s3fifo"
        low_watermark = 0.5
        high_watermark = 0.75
        [[store.tiers]]
        kind = "fake"
        write = "on_evict"
        admission = "second_hit"
        promotion = "never"
        queue = "3MiB"
        pause = "2s"
        capacity = 81920
        [[store.tiers]]
        kind = "fake"
        name = "far"
        """
    )
    loaded_config = load_config(file)
    store = open_store(loaded_config.config.store, tenant="t")
    near, far = store.levels
    assert (near.name, far.name, store.tenant) == ("fake", "far", "t")
    assert fakes[0].capacity_nbytes == 81920
    assert isinstance(near.options.write, OnEvict)
    assert isinstance(near.options.admission, SecondHitAdmit)
    assert isinstance(near.options.promotion, NeverPromote)
    assert (near.options.queue_nbytes, near.options.pause_s) == (3 << 20, 2.0)
    assert far.options.write.full == "drop"
    assert isinstance(store._pool.policy, S3FIFOPolicy)
    assert store.options.watermarks == (0.5, 0.75)
    ns = store.namespace(SPEC)
    save_blocks(ns, chain(ns, 1, 4))
    settle(store)
    assert fakes[1].usage().entries == 4
    store.close()


def test_text_means_the_same_as_a_table(fakes: list[FakeTier]) -> None:
    text = "fake:?capacity=4096&write=on_evict&name=a, fake:/var/kv%20cache?read_timeout=5s&d=1&d=2"
    config = load_config(assignments=[f"store.tiers={text}"]).config.store
    first, second = config.tiers
    assert (first.name, first.write, first.options) == ("a", "on_evict", {"capacity": "4096"})
    assert (second.read_timeout, second.options) == (
        5.0,
        {"directory": "/var/kv cache", "d": ["1", "2"]},
    )
    for tier in config.tiers:
        assert TierConfig.model_validate(str(tier)) == tier
    assert not fakes


def test_config_show_has_the_tiers() -> None:
    found = load_config(assignments=["store.tiers=disk:/x?capacity=1GiB"])
    value = next(v for v in found.values() if v.key == "store.tiers")
    assert value.text == "disk:/x?capacity=1073741824"
    assert "commas" in value.allowed
    assert isinstance(value.value, tuple)
    assert value.value[0]["options"] == {"directories": ["/x"], "capacity": 2**30}


def test_config_show_has_every_value_of_each_tier_with_its_source() -> None:
    found = load_config(assignments=["store.tiers=disk:/x?capacity=1GiB&read_threads=7&pause=5s"])
    values = {v.key.removeprefix("store.tiers[0]."): v for v in found.values() if "[0]." in v.key}
    assert set(values) == {*TierConfig.model_fields, *(DiskTier.option_names or ())} - {
        "options",
        "directory",
    }
    shown = {name: (v.value, v.text, v.source) for name, v in values.items()}
    assert shown["read_threads"] == (7, "7", "--set")
    assert shown["write_threads"] == (2, "2", "default")
    assert shown["capacity"] == (2**30, "1 GiB", "--set")
    assert shown["quarantine"] == (64 << 20, "64 MiB", "default")
    assert shown["directories"] == (["/x"], "/x", "--set")
    assert shown["verify"] == (True, "true", "default")
    assert shown["pause"] == (5.0, "5 s", "--set")
    assert shown["name"] == (None, "(none)", "default")
    assert all(v.allowed and v.description for v in values.values())


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("disk:/x?capacity=1GiB&sync=maybe", "none, data, full"),
        ("disk:/x?capacity=1GiB&retry_s=0", "retry_s"),
        ("disk:/x?capacity=1GiB&eviction=oldest", "no eviction policy 'oldest'"),
        ("disk:/x", "capacity must be given"),
        ("disk:/x?capacity=1GiB&directories=/y", "directory or directories, not both"),
        ("disk:?directories=/y&directories=/y/&capacity=1GiB", "each once"),
        ("disk:/x?capacity=1GiB&directory=/y", "directory is given twice"),
        ("redis:redis://127.0.0.1:6379", r"write redis:\?urls=…"),
        ("s3:s3://blocks", r"write s3:\?bucket=…"),
        ("peer:tcp://10.0.0.2", r"write peer:\?peers=…"),
        ("disk:/x?capacity=1GiB&capacity=2GiB", "give it once"),
        ("disk:/x?capacity=1GiB&queue=1MiB&queue=2MiB", "queue is .*give it once"),
        ("disk:/x?capacity=1GiB&options=3", "must be a table"),
        ("disk:/x?capacity=1GiB&retry_s=100d", "at most 3600"),
        ("disk:/x?capacity=1GiB&name=%1b[31m", "can be printed"),
        ("disk:?directories=/y&directories=//y&capacity=1GiB", "each once"),
        ("disk:?directories=/y&directories=/y/z&capacity=1GiB", "/y/z lies inside /y"),
        ("disk:/x?capacity=1GiB&promtion=never", r"did you mean promotion\?.*of every tier: kind, name"),
        ("disk:/x?capacity=1GiB&read_treads=2", r"did you mean read_threads\?"),
        ("dusk:/x?capacity=1GiB", r"did you mean disk\?"),
        ("disk:/x?capacity=1GiB&write=sometimes", "no write policy 'sometimes'"),
        ("disk:/x?capacity=1GiB&name=dram", "different names"),
        ("disk:/x?capacity=1GiB, disk:/y?capacity=1GiB", "different names"),
    ],
)
def test_options_of_a_tier_are_checked_when_they_are_read(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        load_config(assignments=[f"store.tiers={text}"])
    assert "(from --set)" in str(caught.value)


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ('directory = "/x"', r"store\.tiers\[0\]\.kind: Field required"),
        ("kind = 5", r"store\.tiers\[0\]\.kind: "),
        ('kind = "disk"\ndirectory = "/x"\ncapacity = 65536\nqueue = {a = 1}', r"store\.tiers\[0\]\.queue: "),
        ('kind = "disk"\ncapacity = 65536\noptions = {directory = "/x", capacity = 65537}', "given twice"),
        ('kind = "disk"\ndirectory = "/x"\ncapacity = ["1GiB"]', "as one value"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(tmp_path: Path, table: str, match: str) -> None:
    file = tmp_path / "kvferry.toml"
    file.write_text(f"[[store.tiers]]\n{table}\n")
    with pytest.raises(ConfigError, match=match):
        load_config(file)


def test_a_value_is_the_same_as_text_and_as_a_table() -> None:
    """Also a list of one, numbers and words."""
    table = {"directories": ["/a"], "capacity": 1 << 30, "read_threads": 3, "verify": False, "retry_s": 2}
    one = TierConfig.model_validate({"kind": "disk", **table})
    text = "disk:?directories=/a&capacity=1GiB&read_threads=3&verify=off&retry_s=2s"
    assert TierConfig.model_validate(text) == one == TierConfig.model_validate(str(one))
    assert one.options == {**table, "retry_s": 2.0}


class Vault(FakeTier):
    """Its options are a name and a password."""

    option_names = ("bucket", "password")

    @classmethod
    def describe_options(cls, name: str, options: Mapping[str, object]) -> list[TierOption]:
        """See :class:`Tier`."""
        bucket, password = options.get("bucket", "kv"), options.get("password")
        return [
            TierOption("bucket", bucket, "bucket" in options, str(bucket)),
            TierOption("password", password, password is not None, str(password), secret=True),
        ]


def test_secret_options_are_shown_as_stars() -> None:
    TIERS.register("vault", Vault)
    try:
        found = load_config(assignments=["store.tiers=vault:?password=hunter2"])
        values = list(found.values())
        assert found.config.store.tiers[0].options == {"password": "hunter2"}
        assert "hunter2" not in repr(values)
        shown = {v.key: v.text for v in values}
        assert shown["store.tiers[0].password"] == "***"
        assert shown["store.tiers[0].bucket"] == "kv"
    finally:
        TIERS.unregister("vault")


@pytest.mark.parametrize("option", ["directory", "directories"])
def test_several_directories_are_shown_as_they_are_read(option: str) -> None:
    tier = TierConfig.model_validate({"kind": "disk", option: ["/a", "/b, c"], "capacity": "1GiB"})
    shown = load_config(assignments=[f"store.tiers={tier}"])
    assert shown.config.store.tiers == (tier,)
    assert next(v.text for v in shown.values() if v.key == "store.tiers") == str(tier)


@pytest.mark.parametrize(
    ("tiers", "match"),
    [
        ("disk", "kind:path"),
        ("disk:?directories=/a,/b&capacity=1GiB", "directories=/a&directories=/b"),
        ("fake:?queue=0", "queue"),
        ("fake:?write=a&write=b", "write is .*give it once"),
        ("fake:?pause=0s", "pause"),
    ],
)
def test_tiers_that_cannot_be_are_refused(tiers: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        load_config(assignments=[f"store.tiers={tiers}"])
    assert "store.tiers" in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        "store.tiers=fake:?name=a, nowhere:",
        "store.tiers=fake:?name=a, fake:?name=a",
        "store.tiers=fake:?write=sometimes",
        "store.tiers=fake:?admission=sometimes",
        "store.tiers=fake:?promotion=sometimes",
        "store.eviction=oldest",
    ],
)
def test_unknown_plug_ins_are_refused_and_nothing_stays_open(setting: str, fakes: list[FakeTier]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(load_config(assignments=[setting]).config.store)
    assert re.search("no plug-in|no .* policy|different names", str(caught.value))
    assert all(tier._closed for tier in fakes)


@pytest.mark.parametrize("tenant", ["", "x" * 300])
def test_a_tenant_id_is_checked_before_anything_is_made(tenant: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    config = load_config(assignments=[f"store.tiers=disk:{folder}?capacity=1MiB"]).config.store
    with pytest.raises(ConfigError, match="1 to 120 bytes"):
        open_store(config, tenant=tenant)
    assert not folder.exists()


def test_a_tenant_id_that_a_store_refuses_is_one_that_the_disk_refuses() -> None:
    for tenant in ("", "x" * 120, "x" * 121, "ä" * 60, "ä" * 61):
        try:
            tenant_folder(tenant)
            usable = True
        except ConfigError:
            usable = False
        tier = FakeTier()
        try:
            TieredStore(1 << 20, [tier], tenant=tenant).close()
            taken = True
        except ConfigError:
            taken = False
        assert (taken, tier._closed) == (usable, True)


def test_every_promised_figure_of_a_tier_is_there_from_the_start(tmp_path: Path) -> None:
    config = load_config(assignments=[f"store.tiers=disk:{tmp_path}?capacity=1MiB"]).config.store
    store = open_store(config)
    found = store.stats().per_tier["disk"]
    for name in (
        "read_hit", "read_miss", "read_corrupt", "read_failed", "read_skipped", "write_stored",
        "write_present", "write_refused", "write_failed", "write_dropped", "write_dropped_nbytes",
        "write_skipped", "lost_blocks", "promoted", "queued_nbytes", "read_breaker_opened",
        "write_breaker_opened", "faults",
    ):  # fmt: skip
        assert found[name] == 0, name
    for name in ("healthy", "reads_work", "writes_work"):
        assert found[name] == 1, name
    store.close()
