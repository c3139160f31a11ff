"""Quotas that change while the daemon runs: evicted inside the tenant, on disk too, and all or nothing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from kvferry.client import ClientNamespace
from kvferry.core import arena
from kvferry.core.clock import deadline_in
from kvferry.core.config import StoreConfig
from kvferry.core.errors import ConfigError, StoreError
from kvferry.core.keys import BlockKey
from kvferry.core.placement import Placement
from kvferry.daemon import Daemon
from kvferry.daemon.credentials import Limits, edited
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.testing.disk_usage import disk_usage

from .conftest import Site

SPEC = small_spec("quotas")
MIB = 1 << 20
CHAIN = 100  # blocks of 8 KiB


def filled(site: Site, token: bytes, chains: int) -> tuple[ClientNamespace, list[list[BlockKey]]]:
    ns = site.client(token).namespace(SPEC)
    keys = [ns.keys([number] * SPEC.block_tokens * CHAIN) for number in range(chains)]
    for one in keys:
        save_blocks(ns, one)
        assert ns.client.flush(deadline=deadline_in(20))
    return ns, keys


def test_a_smaller_quota_evicts_inside_the_tenant(site: Site) -> None:
    site.tenant("a", Limits(dram=3 * MIB, disk=12 * MIB))
    site.tenant("b", Limits(dram=1 * MIB, disk=4 * MIB))
    tokens = {name: site.token(name) for name in ("a", "b")}
    disk = site.folder / "disk"
    daemon = site.start(f"daemon.disk={disk}", "daemon.disk_capacity=16MiB")
    mine, keys = filled(site, tokens["a"], 4)
    his, his_keys = filled(site, tokens["b"], 1)
    held = mine.load(keys[3], deadline=deadline_in(20))
    assert len(held) == CHAIN
    site.tenant("a", Limits(dram=1 * MIB, disk=2 * MIB))
    site.tenant("b", Limits(dram=3 * MIB, disk=14 * MIB, rate=1e9))
    told = daemon.tenants.reload()
    assert "a has now memory 1 MiB, disk 2 MiB" in told
    assert "b has now memory 3 MiB, disk 14 MiB" in told
    a, b = daemon.store_of("a"), daemon.store_of("b")
    assert a.stats().used_nbytes <= a.stats().capacity_nbytes == 1 * MIB
    assert a.arena.mapped_nbytes <= 1 * MIB
    wait_until(lambda: disk_usage(disk / "tenants.d" / "a") <= 2 * MIB)
    wait_until(lambda: a.stats().per_tier["disk"]["used_nbytes"] <= 2 * MIB)  # counted after it has gone
    figures = a.stats().per_tier["disk"]
    assert figures["capacity_nbytes"] == 2 * MIB
    assert 1.5 * MIB < figures["used_nbytes"] <= 2 * MIB, "no more goes than has to, folders counted"
    assert [bytes(held.view(n)) for n in (0, CHAIN - 1)] == [
        block_bytes(keys[3][n], SPEC.block_nbytes) for n in (0, CHAIN - 1)
    ]
    held.release()
    assert his.lookup(his_keys[0]).prefix == CHAIN, "what is another's stays"
    assert b.stats().capacity_nbytes == 3 * MIB
    assert daemon.tenants.all["b"].meter.limits == (1e9, None)
    more = his.keys([77] * SPEC.block_tokens * 200)  # more than it had before
    save_blocks(his, more)
    assert set(his.lookup(more).tiers) == {"dram"}
    save_blocks(mine, mine.keys([88] * SPEC.block_tokens * CHAIN))
    assert a.stats().used_nbytes <= 1 * MIB


def test_what_is_held_is_evicted_when_it_is_free(site: Site) -> None:
    site.tenant("a", Limits(dram=4 * MIB))
    token = site.token("a")
    daemon = site.start()
    mine, keys = filled(site, token, 3)
    with (
        mine.load(keys[0], deadline=deadline_in(20)) as one,
        mine.load(keys[1], deadline=deadline_in(20)) as two,
        mine.load(keys[2], deadline=deadline_in(20)) as three,
    ):
        site.tenant("a", Limits(dram=1 * MIB))
        daemon.tenants.reload()
        store = daemon.store_of("a")
        assert store.stats().used_nbytes == 3 * CHAIN * SPEC.block_nbytes
        for lease in (one, two, three):
            lease.check()
    wait_until(lambda: store.stats().used_nbytes <= 1 * MIB)  # the daemon looks once a second
    assert store.arena.mapped_nbytes <= 1 * MIB


def test_a_file_that_promises_too_much_changes_nothing(site: Site) -> None:
    for name in ("a", "b"):
        site.tenant(name, Limits(dram=2 * MIB, disk=8 * MIB))
    token = site.token("a")
    daemon = site.start(f"daemon.disk={site.folder}/disk", "daemon.disk_capacity=16MiB")
    mine, keys = filled(site, token, 2)
    site.tenant("a", Limits(dram=1 * MIB, disk=8 * MIB, requests=0.1))
    site.tenant("b", Limits(dram=2 * MIB, disk=9 * MIB))
    with pytest.raises(ConfigError, match="17 MiB in all"):
        daemon.tenants.reload()
    assert daemon.store_of("a").stats().capacity_nbytes == 2 * MIB
    assert [mine.lookup(one).prefix for one in keys * 2] == [CHAIN] * 4, "rates stay too"


def test_a_new_tenant_takes_its_share_from_those_without_a_quota(site: Site) -> None:
    first = site.token("a")
    daemon = site.start()
    mine, keys = filled(site, first, 5)
    assert mine.client.stats().capacity_nbytes == 4 * MIB
    site.token("b")
    assert "a has now memory 2 MiB" in daemon.tenants.reload()
    stats = mine.client.stats()
    assert (stats.capacity_nbytes, daemon.store_of("b").stats().capacity_nbytes) == (2 * MIB, 2 * MIB)
    assert 0 < stats.used_nbytes <= 2 * MIB
    assert mine.lookup(keys[-1]).prefix == CHAIN, "the oldest went"


class _Host:
    """One that has a fixed amount of memory, of which arenas take what they map."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
        self.nbytes = nbytes
        self.daemon: Daemon | None = None
        monkeypatch.setattr(arena, "available_memory", self.available)

    def available(self) -> int:
        stores = [] if self.daemon is None else list(self.daemon.stores.values())
        return self.nbytes - sum(one.arena.mapped_nbytes + one.arena.kept_nbytes for one in stores)


def test_a_full_host_gives_a_new_tenant_what_others_give_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = _Host(monkeypatch, 4 * MIB + (64 << 10))
    site.tenant("a", Limits(dram=3 * MIB))
    site.tenant("b", Limits(dram=1 * MIB))
    tokens = {name: site.token(name) for name in ("a", "b")}
    daemon = host.daemon = site.start()
    for name, chains in (("a", 4), ("b", 2)):
        filled(site, tokens[name], chains)
    assert host.available() < MIB
    site.tenant("a", Limits(dram=1 * MIB))
    site.tenant("c", Limits(dram=2 * MIB))
    third = site.token("c")
    assert "a has now memory 1 MiB" in daemon.tenants.reload()
    capacities = {name: store.stats().capacity_nbytes // MIB for name, store in daemon.stores.items()}
    assert capacities == {"a": 1, "b": 1, "c": 2}
    with edited(site.path) as box:  # and of one that goes
        tenants = {name: limits for name, limits in box[0].tenants.items() if name != "b"}
        left = tuple(one for one in box[0].credentials if one.tenant != "b")
        box[0] = msgspec.structs.replace(box[0], tenants=tenants, credentials=left)
    filled(site, third, 3)
    site.tenant("d", Limits(dram=1 * MIB))
    site.token("d")
    assert "tenant b is gone" in daemon.tenants.reload()
    assert daemon.store_of("d").stats().capacity_nbytes == MIB


def test_a_reload_that_fails_on_a_full_host_changes_no_quota(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = _Host(monkeypatch, 4 * MIB + (64 << 10))
    site.tenant("a", Limits(dram=3 * MIB))
    token = site.token("a")
    daemon = host.daemon = site.start()
    mine, keys = filled(site, token, 4)
    store = daemon.store_of("a")

    def refused(tenant: str, config: StoreConfig) -> TieredStore:
        assert (store.arena.capacity_nbytes, tenant, config.dram_capacity) == (MIB, "b", 2 * MIB)
        assert host.available() >= 2 * MIB, "it has made room"
        raise ConfigError("the folder is another's")

    monkeypatch.setattr(daemon.tenants, "_open_store", refused)
    site.tenant("a", Limits(dram=1 * MIB))
    site.tenant("b", Limits(dram=2 * MIB))
    site.token("b")
    with pytest.raises(ConfigError, match="another's"):
        daemon.tenants.reload()
    assert list(daemon.stores) == ["a"]
    assert (store.stats().capacity_nbytes, store.write_quota_nbytes) == (3 * MIB, 3 * MIB)
    assert mine.lookup(keys[3]).prefix == CHAIN, "what was used last is still there"
    save_blocks(mine, mine.keys([99] * SPEC.block_tokens * 2 * CHAIN))
    assert store.stats().used_nbytes > MIB


def test_less_than_a_page_is_refused_by_name_and_changes_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Placement, "check", lambda *_: None)  # as if there were a pool of large pages
    site.tenant("a", Limits(dram=4 * MIB))
    site.token("a")
    daemon = site.start("store.hugepages=true")
    site.tenant("a", Limits(dram=1 * MIB, requests=0.1))
    with pytest.raises(ConfigError, match="1 MiB, below one page of 2 MiB"):
        daemon.tenants.reload()
    assert daemon.store_of("a").stats().capacity_nbytes == 4 * MIB
    assert daemon.tenants.all["a"].meter.limits == (None, None)


@pytest.mark.parametrize("mode", ["shared", "copy"])
def test_a_client_with_a_cap_goes_on_whatever_is_reloaded(site: Site, mode: str) -> None:
    site.tenant("a", Limits(dram=4 * MIB))
    token = site.token("a")
    daemon = site.start(f"daemon.arena={mode}")
    client = site.client(token, max_mapped_nbytes=4 * MIB)
    ns, store = client.namespace(SPEC), daemon.store_of("a")
    for turn in range(6):
        keys = ns.keys([turn] * SPEC.block_tokens * 4 * CHAIN)
        save_blocks(ns, keys)
        with ns.load(keys, deadline=deadline_in(20)) as lease:
            assert len(lease) == len(keys)
            assert bytes(lease.view(turn)) == block_bytes(keys[turn], SPEC.block_nbytes)
        client.link._flush_ends()
        for share in (1 * MIB, 4 * MIB):
            site.tenant("a", Limits(dram=share))
            daemon.tenants.reload()
    assert store.arena.mapped_nbytes + store.arena.kept_nbytes <= 4 * MIB
    assert client.counters.missed_loads == 0
    site.tenant("a", Limits(dram=1 * MIB))
    daemon.tenants.reload()
    wait_until(lambda: client.link.arena.map.mapped_nbytes <= 1 * MIB + store.arena.kept_nbytes)


def test_what_a_reload_opens_while_the_daemon_ends_is_closed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.tenant("a", Limits(dram=1 * MIB))
    site.token("a")
    daemon = site.start()
    begun, goes_on = threading.Event(), threading.Event()
    opened: list[TieredStore] = []
    open_store = daemon.tenants._open_store

    def opening(tenant: str, config: StoreConfig) -> TieredStore:
        begun.set()
        assert goes_on.wait(30)
        opened.append(open_store(tenant, config))
        return opened[0]

    monkeypatch.setattr(daemon.tenants, "_open_store", opening)
    site.tenant("b", Limits(dram=1 * MIB))
    site.token("b")
    with ThreadPoolExecutor(2) as pool:
        reload = pool.submit(daemon.tenants.reload)
        assert begun.wait(30)
        close = pool.submit(daemon.close)
        wait_until(daemon.tenants._ended.is_set, 30)
        goes_on.set()
        reload.result(30)
        close.result(30)
    assert [store._closed for store in opened] == [True]
    with pytest.raises(StoreError, match="ends"):
        daemon.tenants.reload()


def test_a_store_that_does_not_close_holds_up_no_quota(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        site.tenant(name, Limits(dram=1 * MIB))
        site.token(name)
    daemon = site.start()
    gone = daemon.store_of("b")
    with edited(site.path) as box:
        left = tuple(one for one in box[0].credentials if one.tenant == "a")
        box[0] = msgspec.structs.replace(
            box[0],
            tenants={"a": msgspec.structs.replace(box[0].tenants["a"], dram=3 * MIB)},
            credentials=left,
        )

    def refused() -> None:
        raise StoreError("its disk hangs")

    with monkeypatch.context() as patch:
        patch.setattr(gone, "close", refused)
        daemon.tenants.reload()
    assert daemon.store_of("a").stats().capacity_nbytes == 3 * MIB
    gone.close()
