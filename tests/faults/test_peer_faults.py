"""Daemons that are peers of each other: one is killed, stopped, restarted, or named by mistake."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.client import Client, ClientOptions
from kvferry.client.peer import PeerClient
from kvferry.core.blockstore import Namespace
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey
from kvferry.daemon import Daemon
from kvferry.store.remote.peer import AskedPeer, PeerOptions, PeerTier
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, TierNamespace, WriteOutcome
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, stop_process, wait_until
from kvferry.testing.fault_link import Faults
from kvferry.testing.fault_proxy import FaultProxy
from kvferry.testing.processes import Command

SPEC = small_spec("peer-faults")
HEAL_S = 60.0


def url(folder: Path, name: str) -> str:
    return f"unix://{folder}/{name}.sock"


def serve(folder: Path, name: str, *peers: str) -> Command:
    tiers = [f"--set=store.tiers={tier(folder, *peers)}"] if peers else ["--disk", "none"]
    return Command(
        "serve", "--socket", f"{folder}/{name}.sock", "--set", "daemon.listen=none", "--http", "none",
        "--capacity", "8MiB", *tiers,
    )  # fmt: skip


def tier(folder: Path, *peers: str) -> str:
    named = "&".join(f"peers={url(folder, peer)}" for peer in peers)
    return f"peer:?{named}&timeout=3s&write=write_through"


def in_process(folder: Path, name: str, *peers: str) -> Daemon:
    more = [f"store.tiers={tier(folder, *peers)}"] if peers else ["daemon.disk=none"]
    return daemon_of(f"daemon.socket={folder}/{name}.sock", "daemon.listen=none", *more)


def daemon_of(*assignments: str) -> Daemon:
    return Daemon(load_config(None, assignments=["store.dram_capacity=8MiB", *assignments]).config)


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Daemon]:
    """The daemon ``a``, in this process, with the peers ``b`` and ``c``, which are not there yet."""
    daemon = in_process(tmp_path, "a", "b", "c")
    yield daemon
    daemon.close()


def tier_of(daemon: Daemon) -> PeerTier:
    (level,) = daemon.store_of("default").levels
    assert isinstance(level.tier, PeerTier)
    return level.tier


def share(daemon: Daemon, keys: list[BlockKey], name: str) -> list[BlockKey]:
    return [key for key in keys if "bc"[tier_of(daemon).placement.owner(key)] == name]


def shared(daemon: Daemon, ns: Namespace, first: int) -> list[BlockKey]:
    """Twelve keys of which each peer keeps a part: where one goes depends on the names of the sockets."""
    chains = (ns.keys([token] * 12 * SPEC.block_tokens) for token in range(first, first + 100))
    return next(keys for keys in chains if share(daemon, keys, "b") and share(daemon, keys, "c"))


def held(ns: Namespace, keys: list[BlockKey]) -> set[BlockKey]:
    return {key for key, where in zip(keys, ns.lookup(keys).tiers, strict=True) if where is not None}


def loaded(ns: Namespace, key: BlockKey) -> bool:
    with ns.load([key], deadline=deadline_in(20)) as lease:
        if not lease.keys:
            return False
        assert lease.view(0) == block_bytes(key, SPEC.block_nbytes)
        return True


def test_a_lost_peer_costs_only_its_share_and_heals(
    tmp_path: Path, ours: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Not there at the start, stopped, killed: the daemon goes on, says so once, and heals."""
    caplog.set_level(logging.INFO)
    with Client(url(tmp_path, "a"), ClientOptions(call_timeout_s=60)) as client:
        ns = client.namespace(SPEC)
        keys = shared(ours, ns, 100)
        lost = share(ours, keys, "c")
        assert ns.lookup(keys).prefix == 0
        with closing(in_process(tmp_path, "b")), serve(tmp_path, "c") as c:
            c.wait_ready()
            wait_until(lambda: tier_of(ours).usage().healthy, HEAL_S)
            save_blocks(ns, keys)
            assert client.flush(deadline=deadline_in(60))
            store = ours.store_of("default")
            with store._lock:
                store._forget(ns.namespace_id, None)  # from memory alone
            assert held(ns, keys) == set(keys)
            caplog.clear()
            stop_process(c.process.pid)
            lost_peer_is_missed(ours, ns, keys, caplog)
            c.process.send_signal(signal.SIGCONT)
            wait_until(lambda: held(ns, keys) == set(keys), HEAL_S)
            assert loaded(ns, lost[0])
            caplog.clear()  # before: it may be seen at once
            c.kill()
            lost_peer_is_missed(ours, ns, [key for key in keys if key != lost[0]], caplog)
            with closing(in_process(tmp_path, "c")):
                wait_until(lambda: tier_of(ours).usage().healthy, HEAL_S)
                counters = tier_of(ours).usage().counters
                failed = [counters[f"failed_at {peer}"] for peer in tier_of(ours)._ids]
                assert len(failed) == 2
                assert max(failed) > 0
                more = shared(ours, ns, 200)
                save_blocks(ns, more)
                assert client.flush(deadline=deadline_in(60))
                with Client(url(tmp_path, "c")) as there:
                    assert held(there.namespace(SPEC), more) == set(share(ours, more, "c"))


def lost_peer_is_missed(
    ours: Daemon, ns: Namespace, keys: list[BlockKey], caplog: pytest.LogCaptureFixture
) -> None:
    mine, lost = share(ours, keys, "b"), share(ours, keys, "c")
    for _ in range(8):  # it may take two to be sure that it is gone
        started = time.monotonic()
        assert held(ns, keys) == set(mine)
        assert time.monotonic() - started < 20
    assert loaded(ns, mine[-1])
    assert not loaded(ns, lost[-1])
    reads = [BlockRead(key, page_aligned(SPEC.block_nbytes)) for key in keys]
    space = TierNamespace.of("default", SPEC)
    results = tier_of(ours).read_into(space, reads, deadline=deadline_in(20))
    for key, result in zip(keys, results, strict=True):
        assert result.outcome is (ReadOutcome.HIT if key in mine else ReadOutcome.MISS), result
    assert ours.store_of("default").levels[0].reads.opened == 0, "its fault was taken for the tier's"
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "c.sock" in line and "is away" in line]) == 1
    assert not tier_of(ours).usage().healthy


def test_peers_of_each_other_do_not_go_round(tmp_path: Path) -> None:
    """What comes from a peer is neither given on nor asked further, also while that one does not answer."""
    with closing(in_process(tmp_path, "d", "b")) as d, serve(tmp_path, "b", "d") as b:
        b.wait_ready()
        with Client(url(tmp_path, "b")) as client, Client(url(tmp_path, "d")) as other:
            ns = client.namespace(SPEC)
            keys = ns.keys([6] * 6 * SPEC.block_tokens)
            save_blocks(ns, keys)
            for each in (client, other):
                assert each.flush(deadline=deadline_in(60))
            there = other.namespace(SPEC)
            assert all(loaded(there, key) for key in keys)
            assert client.stats().per_tier["peer"]["stored"] == 6
            assert other.stats().per_tier["peer"]["stored"] == 0
            assert other.stats().per_tier["peer"]["present"] == 0, "sent back to where it came from"
            stop_process(b.process.pid)
            asks = PeerClient(url(tmp_path, "d"), connections=1, timeout_s=60, own_epoch=lambda: "test")
            try:
                space = TierNamespace.of("default", SPEC)
                nowhere = ns.keys([7] * 2 * SPEC.block_tokens)
                before = tier_of(d).usage().counters
                assert asks.has(space, nowhere, deadline_in(60)) == [False, False]
                assert tier_of(d).usage().counters == before, "it asked its own peer, which hangs"
            finally:
                asks.close()
                b.process.send_signal(signal.SIGCONT)


def test_a_slow_or_lying_link_costs_time_up_to_the_deadline_and_no_wrong_byte(tmp_path: Path) -> None:
    there = daemon_of("daemon.socket=none", "daemon.listen=tcp://127.0.0.1:0", "daemon.disk=none")
    with closing(there), FaultProxy(there.addresses[0]) as proxy:

        def make(url: str, *, connections: int, timeout_s: float) -> AskedPeer:
            return PeerClient(url, connections=connections, timeout_s=timeout_s, own_epoch=lambda: "test")

        tier = PeerTier("peer", PeerOptions(peers=(proxy.address,), timeout_s=10), make)
        with closing(tier):
            space = TierNamespace.of("default", SPEC)
            tier.open(space)
            keys = [BlockKey(bytes([number]) * 32) for number in range(8)]
            sources = [memoryview(block_bytes(key, SPEC.block_nbytes)) for key in keys]
            blocks = [BlockWrite(key, data, None, 0) for key, data in zip(keys, sources, strict=True)]
            stored = tier.write(space, blocks, deadline=deadline_in(60))
            assert {result.outcome for result in stored} == {WriteOutcome.STORED}
            reads = [BlockRead(key, page_aligned(SPEC.block_nbytes)) for key in keys]
            proxy.faults = Faults(rate=20_000, only="to_client")
            started = time.monotonic()
            slow = tier.read_into(space, reads, deadline=deadline_in(0.4))
            assert {result.outcome for result in slow} == {ReadOutcome.FAILED}
            assert 0.3 < time.monotonic() - started < 10
            proxy.faults = Faults(flip_rate=1e-4, only="to_client")
            for _ in range(10):
                for block, result in zip(
                    reads, tier.read_into(space, reads, deadline=deadline_in(20)), strict=True
                ):
                    wrong = block.into != block_bytes(block.key, SPEC.block_nbytes)
                    assert result.outcome is not ReadOutcome.HIT or not wrong
            proxy.faults = Faults()
            proxy.reset_connections()

            def healed() -> bool:
                results = tier.read_into(space, reads, deadline=deadline_in(20))
                return {result.outcome for result in results} == {ReadOutcome.HIT}

            wait_until(healed, HEAL_S)


def test_a_daemon_is_not_its_own_peer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="sock of tier peer is this daemon itself"):
        in_process(tmp_path, "self", "self")
    (tmp_path / "c.sock").symlink_to(tmp_path / "a.sock")  # by another name it is seen when it answers
    daemon = in_process(tmp_path, "a", "c")
    try:
        ns = daemon.store_of("default").namespace(SPEC)
        for _ in range(3):
            assert ns.lookup(ns.keys([8] * SPEC.block_tokens)).prefix == 0
        assert "is this daemon itself" in str(tier_of(daemon).usage().status)
    finally:
        daemon.close()
    assert sum("is this daemon itself" in r.getMessage() for r in caplog.records) == 1
