"""The redis tier over a cluster: slots that move, a server that is lost, and one behind TLS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.store.remote.redis.cluster import slot_of
from kvferry.store.tier import ReadOutcome
from kvferry.testing.blocks import wait_until
from kvferry.testing.redis_server import RedisServer, redis_cluster
from kvferry.testing.tiers_common import HIT, MISS, STORED, chain, outcomes, read, write
from kvferry.testing.tiers_common import write_outcomes as written
from kvferry.testing.tls_proxy import TlsProxy

from .conftest import MakeTier, Opened


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[RedisServer]]:
    with redis_cluster() as servers:
        yield servers


def node_ids(servers: list[RedisServer]) -> list[str]:
    found = [server.call("CLUSTER", "MYID") for server in servers]
    return [each.decode() for each in found if isinstance(each, bytes)]


def owner_of(slot: int, servers: list[RedisServer]) -> int:
    step = -(-16384 // len(servers))
    return slot // step


def test_the_slot_is_that_of_the_servers(cluster: list[RedisServer]) -> None:
    for name in ("abc", "{user}.x", "x{}y", "a{b}c{d}", "{", "kvferry:é"):
        assert cluster[0].call("CLUSTER", "KEYSLOT", name) == slot_of(name)


def test_slots_that_move_are_followed(cluster: list[RedisServer], make: MakeTier) -> None:
    it = make(cluster[0].url)
    keys = chain(it.space, 1, 30)
    assert written(write(it.tier, it.space, keys)) == [STORED] * 30
    key = keys[0]
    slot = slot_of(it.name(key))
    source = owner_of(slot, cluster)
    target = (source + 1) % 3
    ids = node_ids(cluster)
    cluster[target].call("CLUSTER", "SETSLOT", str(slot), "IMPORTING", ids[source])
    cluster[source].call("CLUSTER", "SETSLOT", str(slot), "MIGRATING", ids[target])
    cluster[source].call("MIGRATE", "127.0.0.1", str(cluster[target].port), it.name(key), "0", "5000")
    assert outcomes(read(it.tier, it.space, keys)) == [HIT] * 30  # ASK
    assert it.tier.usage().counters["redirected"] >= 1
    for server in (cluster[target], cluster[source]):
        server.call("CLUSTER", "SETSLOT", str(slot), "NODE", ids[target])
    assert outcomes(read(it.tier, it.space, keys)) == [HIT] * 30  # MOVED
    assert it.tier.remove(it.space, keys, deadline=deadline_in(20)) == [True] * 30
    cluster[source].call("CLUSTER", "SETSLOT", str(slot), "NODE", ids[source])
    cluster[target].call("CLUSTER", "SETSLOT", str(slot), "NODE", ids[source])


def test_a_lost_server_costs_its_share(make: MakeTier) -> None:
    with redis_cluster() as servers:
        it = make(servers[0].url, timeout_s=5.0, server_errors=1, server_pause_s=0.2)
        keys = chain(it.space, 1, 30)
        assert written(write(it.tier, it.space, keys)) == [STORED] * 30
        lost = [owner_of(slot_of(it.name(key)), servers) == 2 for key in keys]
        assert 0 < sum(lost) < 30
        servers[2].kill()
        results = outcomes(read(it.tier, it.space, keys))
        wanted = [ReadOutcome.FAILED if gone else HIT for gone in lost]
        assert results == wanted
        there = it.tier.contains(it.space, keys, deadline=deadline_in(20))
        assert there == [not gone for gone in lost]
        assert not it.tier.usage().healthy
        servers[2].start()

        def back() -> bool:
            found = outcomes(read(it.tier, it.space, keys))
            return found == [MISS if gone else HIT for gone in lost]

        wait_until(back, 20)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    for name in ("server", "client"):
        leaf = authority.issue_cert("127.0.0.1")
        leaf.private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
    return lambda name: str(Path(folder, f"{name}.pem"))


def test_tls(make: MakeTier, certificates: Callable[[str], str]) -> None:
    ca, server_pem, client_pem = map(certificates, ("ca", "server", "client"))
    with RedisServer() as server:
        server.call("ACL", "SETUSER", "engine", "on", ">pw", "~*", "+@all")
        with TlsProxy(server.url, f"cert={server_pem}&client_ca={ca}") as proxy:
            url = f"{proxy.address}?ca={ca}&cert={client_pem}"
            it = make(url, username="engine", password="pw")
            keys = chain(it.space, 1, 12)
            assert written(write(it.tier, it.space, keys)) == [STORED] * 12
            assert outcomes(read(it.tier, it.space, keys)) == [HIT] * 12
            stranger = make(f"{proxy.address}?ca={ca}", username="engine", password="pw", timeout_s=1.0)
            assert set(_read_all(stranger, keys)) == {ReadOutcome.FAILED}


def _read_all(it: Opened, keys: list[BlockKey]) -> list[ReadOutcome]:
    return outcomes(read(it.tier, it.space, keys))
