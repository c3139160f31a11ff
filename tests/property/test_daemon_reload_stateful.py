"""A daemon whose tenants come, go, and have more and less, while their clients save and hold leases."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvferry.client import Client, ClientNamespace, ClientOptions
from kvferry.client.leases import ClientReadLease
from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.errors import CapacityError, ConfigError, KVFerryError, LeaseExpiredError, StoreError
from kvferry.core.keys import BlockKey
from kvferry.daemon import Daemon
from kvferry.daemon.credentials import Limits, edited, new_credential
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until

SPEC = small_spec("reload")
MIB = 1 << 20
MOST = 4 * MIB
CHAIN = 16  # blocks of 8 KiB
NAMES = st.sampled_from(["a", "b", "c"])
QUOTAS = st.sampled_from([MIB, 3 * MIB // 2, 2 * MIB, 3 * MIB])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def open_paths() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # that of the listing
            found.append(str(Path(f"/proc/self/fd/{name}").readlink()))
    return sorted(found)


class Reloaded(RuleBasedStateMachine):
    """See the module; the sums return to what they were whatever happened."""

    @initialize(arena=st.sampled_from(["shared", "copy"]))
    def start(self, arena: str) -> None:
        self.files, self.threads = open_files(), threading.active_count()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "credentials.json"
        self.quotas: dict[str, int] = {}
        self.clients: dict[str, ClientNamespace] = {}
        self.held: list[tuple[str, ClientReadLease, list[BlockKey]]] = []
        self.cut: set[str] = set()  # clients whose connection was given up, and with it what they held
        self.write("a", MIB)
        self.quotas["a"] = MIB
        given = [
            *(f"daemon.socket={self.folder}/d", "daemon.listen=none", "daemon.disk=none"),
            *(f"daemon.credentials={self.path}", f"store.dram_capacity={MOST}", f"daemon.arena={arena}"),
            "store.lease=600s",  # none ends by its deadline, however slow the machine
        ]
        self.daemon = Daemon(load_config(None, assignments=given).config)
        self.connect("a")
        self.come_or_change("b", MIB)

    def write(self, name: str, dram: int) -> None:
        """Into the file: a tenant's quota, and a token if it is new."""
        with edited(self.path) as box:
            tenants = {**box[0].tenants, name: Limits(dram=dram)}
            credentials = box[0].credentials
            if name not in box[0].tenants:
                credential, token = new_credential(name, ("read", "write"))
                credentials, self.token = (*credentials, credential), token.encode()
            box[0] = msgspec.structs.replace(box[0], tenants=tenants, credentials=credentials)

    def connect(self, name: str) -> None:
        client = Client(
            f"unix://{self.folder}/d", ClientOptions(credential=self.token, connect_timeout_s=20.0)
        )
        self.clients[name] = client.namespace(SPEC)

    @rule(name=NAMES, dram=QUOTAS)
    def come_or_change(self, name: str, dram: int) -> None:
        before = self.path.read_bytes()
        self.write(name, dram)
        if sum(self.quotas.values()) - self.quotas.get(name, 0) + dram > MOST:
            with pytest.raises(ConfigError, match="quotas of memory"):
                self.daemon.tenants.reload()
            self.path.write_bytes(before)
            return
        self.daemon.tenants.reload()
        self.quotas[name] = dram
        if name not in self.clients:
            self.connect(name)

    @rule(number=st.integers(0, 2))
    def go(self, number: int) -> None:
        name = sorted(self.quotas)[number % len(self.quotas)]
        if len(self.quotas) == 1:
            return
        with edited(self.path) as box:
            tenants = {one: limits for one, limits in box[0].tenants.items() if one != name}
            left = tuple(one for one in box[0].credentials if one.tenant != name)
            box[0] = msgspec.structs.replace(box[0], tenants=tenants, credentials=left)
        store = self.daemon.store_of(name)
        self.daemon.tenants.reload()
        with pytest.raises(StoreError, match="closed"):
            store.arena.allocate(1)
        del self.quotas[name]
        for number in reversed(range(len(self.held))):
            if self.held[number][0] == name:
                self.cut.add(name)  # what was mapped stays, and is void only if it was used again
                self.release(number)
        self.clients.pop(name).client.close()
        self.cut.discard(name)

    @rule(number=st.integers(0, 2), chain=st.integers(0, 9))
    def save_and_hold(self, number: int, chain: int) -> None:
        name = sorted(self.clients)[number % len(self.clients)]
        ns = self.clients[name]
        keys = ns.keys([chain] * CHAIN * SPEC.block_tokens)
        try:
            save_blocks(ns, keys, seconds=0.05)
        except CapacityError:  # what is held leaves no room
            pass
        except KVFerryError:  # too late in the midst of a frame
            self.cut.add(name)
        if len(self.held) < 8:
            self.held.append((name, ns.load(keys, deadline=deadline_in(20)), keys))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.held:
            self.release(data.draw(st.integers(0, len(self.held) - 1)))

    def release(self, number: int) -> None:
        name, lease, keys = self.held.pop(number)
        try:
            with lease:
                for n in range(len(lease)):
                    found = bytes(lease.view(n))
                    lease.check()
                    assert found == block_bytes(keys[n], SPEC.block_nbytes)
        except LeaseExpiredError:
            counters = self.clients[name].client.link.counters
            if name not in self.cut and not counters.reconnects + counters.timeouts:
                raise

    @rule()
    def look_after(self) -> None:
        for store in self.daemon.stores.values():
            store.settle()
        for ns in self.clients.values():
            ns.client.link.arena.forget_gone()

    @invariant()
    def sums(self) -> None:
        stores = self.daemon.stores
        assert {name: store.arena.capacity_nbytes for name, store in stores.items()} == self.quotas
        for store in stores.values():
            arena = store.arena
            assert arena.used_nbytes <= arena.mapped_nbytes
            assert store.write_quota_nbytes == arena.capacity_nbytes
        if not self.held:
            self.no_leases()

    def no_leases(self) -> None:
        for name, ns in self.clients.items():
            ns.client.link._flush_ends()
            arena, store = self.daemon.store_of(name).arena, self.daemon.store_of(name)
            # slots too, which a late save still fills though its client waits for it no more
            wait_until(lambda store=store: not (store.stats().leases or store.stats().pinned_nbytes))  # type: ignore[misc]
            store.settle()
            assert arena.used_nbytes <= arena.mapped_nbytes <= arena.capacity_nbytes

    def teardown(self) -> None:
        if not hasattr(self, "daemon"):
            return
        self.close()
        wait_until(lambda: threading.active_count() <= self.threads)
        try:
            wait_until(self.no_more_files)
        except AssertionError as error:
            raise AssertionError(f"still open: {open_paths()}, at first {self.files}") from error
        shutil.rmtree(self.folder)

    def no_more_files(self) -> bool:
        gc.collect()  # tables of generations go with their arenas, which a thread's error may hold a while
        return open_files() <= self.files

    def close(self) -> None:
        while self.held:
            self.release(0)
        self.no_leases()
        for store in self.daemon.stores.values():
            store.evict(MOST)
            assert store.arena.used_nbytes == 0
        for ns in self.clients.values():
            ns.client.close()
        self.clients.clear()
        self.daemon.close()
        del self.daemon


def test_sums_return_while_tenants_come_and_go() -> None:
    run_state_machine_as_test(
        Reloaded, settings=settings(max_examples=6, stateful_step_count=16, deadline=None)
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_sums_return_over_many_reloads() -> None:
    run_state_machine_as_test(
        Reloaded, settings=settings(max_examples=150, stateful_step_count=60, deadline=None)
    )
