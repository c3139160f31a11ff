"""Case C066: a peer that comes back somewhere else, behind the same name or as another peer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvferry.client import Client, ClientOptions
from kvferry.core import names
from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.keys import BlockKey
from kvferry.daemon import Daemon
from kvferry.store.remote.peer import PeerTier
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until

SPEC = small_spec("peer-moves")
HEAL_S = 60.0
CALL = ClientOptions(call_timeout_s=60)


@pytest.fixture
def run() -> Iterator[Callable[..., Daemon]]:
    """Starts daemons in this process; they are closed at the end, the last first."""
    with ExitStack() as stack:

        def run(*assignments: str) -> Daemon:
            daemon = Daemon(load_config(None, assignments=["store.dram_capacity=8MiB", *assignments]).config)
            stack.callback(daemon.close)
            return daemon

        yield run


def peer(run: Callable[..., Daemon], listen: str, disk: str = "none") -> Daemon:
    return run("daemon.socket=none", f"daemon.listen={listen}", f"daemon.disk={disk}")


def asking(run: Callable[..., Daemon], where: Path, *peers: str) -> tuple[Daemon, PeerTier]:
    named = "&".join(f"peers={url}" for url in peers)
    tier = f"store.tiers=peer:?{named}&timeout=3s&write=write_through"
    daemon = run(f"daemon.socket={where}", "daemon.listen=none", "wire.trusted_network=true", tier)
    (level,) = daemon.store_of("default").levels
    assert isinstance(level.tier, PeerTier)
    return daemon, level.tier


def port_of(daemon: Daemon) -> int:
    return int(daemon.addresses[0].rpartition(":")[2])


def held(ns: Namespace, keys: list[BlockKey]) -> set[BlockKey]:
    return {key for key, where in zip(keys, ns.lookup(keys).tiers, strict=True) if where is not None}


def forget_memory(daemon: Daemon) -> None:
    store = daemon.store_of("default")
    store.evict(8 << 20)
    assert store.stats().entries == 0


def test_c066_a_name_that_leads_elsewhere_is_looked_up_again(
    run: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other peer notices nothing, and what goes to the name goes where it leads now."""
    leads_to = "127.0.0.1"
    real = names._look_up

    def look_up(question: tuple[str, int, int]) -> object:
        host, port, flags = question
        elsewhere = host == "node-b" and not flags & int(socket.AI_NUMERICHOST)
        return real((leads_to if elsewhere else host, port, flags))

    monkeypatch.setattr(names, "_look_up", look_up)
    first = peer(run, "tcp://127.0.0.1:0")
    other = peer(run, "tcp://127.0.0.1:0")
    port = port_of(first)
    daemon, tier = asking(run, tmp_path / "a.sock", f"tcp://node-b:{port}", other.addresses[0])
    with Client(f"unix://{tmp_path}/a.sock", CALL) as client:
        ns = client.namespace(SPEC)
        before = ns.keys([1] * 12 * SPEC.block_tokens)
        save_blocks(ns, before)
        assert client.flush(deadline=deadline_in(60))
        forget_memory(daemon)
        assert held(ns, before) == set(before)
        first.close()
        theirs = {key for key in before if tier.placement.owner(key) == 1}
        assert theirs and len(theirs) < len(before)  # noqa: PT018 - of both
        for _ in range(4):
            started = time.monotonic()
            assert held(ns, before) == theirs
            assert time.monotonic() - started < 20
        leads_to = "127.0.0.2"
        second = peer(run, f"tcp://127.0.0.2:{port}")
        wait_until(lambda: tier.usage().healthy, HEAL_S)
        after = ns.keys([2] * 12 * SPEC.block_tokens)
        save_blocks(ns, after)
        assert client.flush(deadline=deadline_in(60))
        with Client(second.addresses[0]) as there:
            mine = {key for key in after if tier.placement.owner(key) == 0}
            assert held(there.namespace(SPEC), after) == mine != set()
        counters = tier.usage().counters
        assert counters[f"failed_at {tier._ids[1]}"] == 0


def test_c066_a_peer_on_another_port_is_named_in_the_configuration(
    run: Callable[..., Daemon], tmp_path: Path
) -> None:
    """It came back on another port with its disk: who is started with that address finds its blocks."""
    first = peer(run, "tcp://127.0.0.1:0", f"{tmp_path}/disk")
    old, _ = asking(run, tmp_path / "a.sock", first.addresses[0])
    with Client(f"unix://{tmp_path}/a.sock", CALL) as client:
        ns = client.namespace(SPEC)
        keys = ns.keys([1] * 4 * SPEC.block_tokens)
        save_blocks(ns, keys)
        assert client.flush(deadline=deadline_in(60))
        with Client(first.addresses[0]) as there:
            assert there.flush(deadline=deadline_in(60))
        first.close()
        holder = socket.create_server(("127.0.0.1", port_of(first)))  # nobody comes back there
        with closing(holder):
            second = peer(run, "tcp://127.0.0.1:0", f"{tmp_path}/disk")
            forget_memory(old)
            assert held(ns, keys) == set(), "nothing is known of the new address"
            old.close()
            asking(run, tmp_path / "a.sock", second.addresses[0])
            wait_until(lambda: held(ns, keys) == set(keys), HEAL_S)
            with ns.load(keys, deadline=deadline_in(20)) as lease:
                for index, key in enumerate(lease.keys):
                    assert lease.view(index) == block_bytes(key, SPEC.block_nbytes)
                assert len(lease) == 4
