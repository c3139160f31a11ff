"""A daemon with credentials, in this process: who gets in, what he may do, and what he sees."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from kvferry.client import Client, ClientOptions, ClientReadLease
from kvferry.core.arena import ArenaMap
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    KVFerryError,
    LeaseExpiredError,
    ProtocolError,
    UnavailableError,
)
from kvferry.daemon import Daemon
from kvferry.daemon.credentials import CredentialFile, Limits, Right, edited
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.testing.blockstore_common import no_room
from kvferry.testing.disk_usage import disk_usage
from kvferry.wire import daemon_messages as d
from kvferry.wire.channel import Channel
from kvferry.wire.options import ChannelOptions

from .conftest import Site

SPEC = small_spec("tenants")


def test_nobody_comes_in_without_a_token(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    token = site.token("a")
    daemon = site.start("daemon.listen=tcp://127.0.0.1:0")
    wrong = token[:-1] + (b"x" if token[-1:] != b"x" else b"y")
    for url in daemon.addresses:
        for shown in (None, b"", b"guess", wrong, b"\xff" * 50, b"x" * 60000):
            with pytest.raises(AuthError):
                site.client(shown, url)
        assert site.client(token, url).stats().capacity_nbytes == 4 << 20
    assert daemon.tenants.refused_connections >= 6
    wait_until(lambda: daemon.connections == 2)
    for text in (token.decode(), wrong.decode(), token.decode()[18:]):
        assert text not in caplog.text


def test_the_same_keys_are_other_blocks_for_every_tenant(site: Site) -> None:
    one, other = site.token("a"), site.token("b")
    daemon = site.start(f"daemon.disk={site.folder}/disk", "daemon.disk_capacity=8MiB")
    a, b = site.client(one, session="engine"), site.client(other, session="engine")
    mine, his = a.namespace(SPEC), b.namespace(SPEC)
    keys = mine.keys(range(32))
    assert keys == his.keys(range(32))
    save_blocks(mine, keys)
    assert a.flush(deadline=deadline_in(20))
    with mine.load(keys, deadline=deadline_in(20)) as held:
        assert len(held) == len(keys)
        lease_id = held.lease_id
        # whatever he calls: nothing of it
        assert his.lookup(keys).prefix == 0
        assert len(his.load(keys, deadline=deadline_in(20))) == 0
        assert his.pin(keys, ttl=10) == 0
        assert his.remove(keys) == 0
        assert his.clear() == 0
        his.prefetch(keys)
        assert b.find_lease(lease_id) is None
        assert (b.stats().entries, b.stats().used_nbytes, b.stats().leases) == (0, 0, 0)
        assert a.find_lease(lease_id) is not None
    assert mine.lookup(keys).prefix == len(keys)
    disk = site.folder / "disk"
    folders = {path.relative_to(disk).parts[:2] for path in disk.rglob("*.safetensors")}
    assert folders == {("tenants.d", "a")}
    assert save_blocks(his, keys) == len(keys), "what a has is new to b"
    assert b.flush(deadline=deadline_in(20))
    stats = daemon.stores
    assert {name: store.stats().entries for name, store in stats.items()} == {"a": 8, "b": 8}


def test_a_client_gets_the_memory_of_its_tenant_alone(site: Site) -> None:
    one, other = site.token("a"), site.token("b")
    daemon = site.start()
    a, b = site.client(one), site.client(other)
    for client in (a, b):
        save_blocks(client.namespace(SPEC), client.namespace(SPEC).keys(range(32)))
    maps = [client.link.arena.map for client in (a, b)]
    assert [each.tenant for each in maps] == ["a", "b"]
    assert maps[0].epoch != maps[1].epoch
    assert isinstance(maps[0], ArenaMap)
    assert {store.arena.tenant for store in daemon.stores.values()} == {"a", "b"}


def test_a_reader_reads_over_the_message_path_and_changes_nothing(site: Site) -> None:
    writer, reader = site.token("a"), site.token("a", "read")
    daemon = site.start()
    w, r = site.client(writer).namespace(SPEC), site.client(reader).namespace(SPEC)
    keys = w.keys(range(32))
    save_blocks(w, keys)
    with r.load(keys, deadline=deadline_in(20)) as lease:
        assert bytes(lease.view(3)) == block_bytes(keys[3], SPEC.block_nbytes)
    assert not r.client.link.arena.epoch, "an arena that can be written is not for readers"
    more = r.keys(range(100, 132))
    for call in (
        lambda: save_blocks(r, more),
        lambda: r.reserve(more, parent=None, deadline=deadline_in(20)),
        lambda: r.remove(keys),
        r.clear,
        lambda: r.pin(keys, ttl=5),
    ):
        with pytest.raises(AuthError, match="right to write"):
            call()
    assert w.lookup(keys).prefix == len(keys)
    assert daemon.tenants.all["a"].refused["right"] == 5
    with (
        two_of_a_session(site, reader) as (first, second),
        first.namespace(SPEC).load(keys, deadline=deadline_in(20)) as lease,
    ):
        found = second.find_lease(lease.lease_id)
        assert isinstance(found, ClientReadLease)
        assert bytes(found.view(3)) == block_bytes(keys[3], SPEC.block_nbytes)
        found.release()
    blind = site.client(site_token_after(site, daemon, "a", "write")).namespace(SPEC)
    with pytest.raises(AuthError, match="right to read"):
        blind.lookup(keys)
    assert save_blocks(blind, more) == len(more)
    with blind.reserve(blind.keys(range(200, 232)), parent=None, deadline=deadline_in(20)) as lease:
        lease.view(0)[:4] = b"mine"
        assert lease.commit() == 8
    assert blind.client.link.staging.memory is not None
    assert not blind.client.link.arena.epoch, "who maps memory can read it"
    assert w.lookup(more).prefix == len(more)
    with pytest.raises(AuthError, match="right to read"):
        site.client(site_token_after(site, daemon, "a", "admin")).namespace(SPEC).lookup(keys)


@contextmanager
def two_of_a_session(site: Site, token: bytes) -> Iterator[tuple[Client, Client]]:
    one, two = (site.client(token, session="pair") for _ in range(2))
    with closing(one), closing(two):
        yield one, two


def site_token_after(site: Site, daemon: Daemon, tenant: str, *rights: Right) -> bytes:
    token = site.token(tenant, *rights)
    daemon.tenants.reload()
    return token


def test_readers_map_an_arena_that_only_the_daemon_writes(site: Site) -> None:
    writer, reader = site.token("a"), site.token("a", "read")
    site.start("daemon.arena=copy")
    w, r = site.client(writer).namespace(SPEC), site.client(reader).namespace(SPEC)
    keys = w.keys(range(32))
    save_blocks(w, keys)
    with r.load(keys, deadline=deadline_in(20)) as lease:
        assert lease.view(0).readonly
    assert r.client.link.arena.epoch
    assert not r.client.link.arena.writable


def test_eviction_stays_inside_the_tenant(site: Site) -> None:
    site.tenant("small", Limits(dram=1 << 20))
    one, other = site.token("a"), site.token("small")
    site.start()
    mine, his = site.client(one).namespace(SPEC), site.client(other).namespace(SPEC)
    keys = mine.keys(range(32))
    save_blocks(mine, keys)
    for number in range(4):  # 4 MiB, in chains of 1 MiB
        save_blocks(his, his.keys([number] * 4 * 128))
    assert his.client.stats().used_nbytes <= 1 << 20
    assert his.client.stats().evicted_blocks >= 300
    assert mine.lookup(keys).prefix == len(keys)
    assert mine.client.stats().capacity_nbytes == 3 << 20
    no_room(his, his.keys([9] * 4 * 200))


def test_the_disk_of_a_tenant_is_its_own(site: Site) -> None:
    site.tenant("small", Limits(dram=1 << 20, disk=2 << 20))
    one, other = site.token("a"), site.token("small")
    disk = site.folder / "disk"
    site.start(f"daemon.disk={disk}", "daemon.disk_capacity=8MiB")
    mine, his = site.client(one).namespace(SPEC), site.client(other).namespace(SPEC)
    keys = mine.keys(range(32))
    save_blocks(mine, keys)
    assert mine.client.flush(deadline=deadline_in(20))
    for number in range(5):
        save_blocks(his, his.keys([number] * 4 * 100))
        his.client.flush(deadline=deadline_in(20))
    assert 0 < disk_usage(disk / "tenants.d" / "small") <= 2 << 20
    assert his.client.stats().per_tier["disk"]["capacity_nbytes"] == 2 << 20
    assert mine.client.stats().per_tier["disk"]["capacity_nbytes"] == 6 << 20
    assert mine.client.stats().per_tier["disk"]["entries"] == len(keys)


def test_one_tenant_cannot_take_all_connections(site: Site) -> None:
    site.tenant("a", Limits(connections=2))
    one, other = site.token("a"), site.token("b")
    daemon = site.start()
    clients = [site.client(one) for _ in range(3)]
    assert [bool(client.away) for client in clients] == [False, False, True]
    assert "2 connections" in clients[2].away
    assert not site.client(other).away
    clients[0].close()
    wait_until(lambda: bool(clients[2].stats().capacity_nbytes))
    assert daemon.tenants.all["a"].refused["connections"] >= 1


def test_a_rate_makes_misses_and_refused_saves(site: Site) -> None:
    token = site.token("slow")
    daemon = site.start()
    client = site.client(token)
    ns = client.namespace(SPEC)
    keys = ns.keys(range(8))
    save_blocks(ns, keys)
    held = ns.reserve(ns.keys(range(100, 108)), parent=None, deadline=deadline_in(20))
    slow = daemon.tenants.all["slow"]
    slow.set(Limits(requests=0.001))  # one now, the next in a thousand seconds
    found = [ns.lookup(keys).prefix for _ in range(3)]
    assert found == [2, 0, 0]
    with ns.load(keys, deadline=deadline_in(20)) as lease:
        assert not len(lease)
    with pytest.raises(UnavailableError, match=r"0\.001 requests a second"):
        save_blocks(ns, ns.keys([3] * 8))
    assert held.commit() == 2, "what was begun may be ended"
    assert slow.refused["rate"] >= 4

    def loaded() -> int:
        with ns.load(keys, deadline=deadline_in(20)) as lease:
            return len(lease)

    slow.set(Limits(rate=1))
    wait_until(lambda: not loaded())  # bytes are counted after the answer; made good in hours
    slow.set(Limits())
    assert ns.lookup(keys).prefix == 2
    assert not client.away


def test_a_reload_takes_effect_at_once_on_those_inside(site: Site) -> None:
    site.tenant("a", Limits(dram=1 << 20))
    site.tenant("b", Limits(dram=1 << 20))
    kept, gone, other = site.token("a"), site.token("a"), site.token("b")
    daemon = site.start()
    clients = [site.client(token) for token in (kept, gone, other)]
    for client in clients:
        assert client.stats().capacity_nbytes == 1 << 20
    held = (
        clients[1]
        .namespace(SPEC)
        .reserve(clients[1].namespace(SPEC).keys(range(8)), parent=None, deadline=deadline_in(20))
    )
    site.revoke(gone)
    late = site.token("c")  # a share of the 2 MiB that are left
    with edited(site.path) as box:
        tenants = {name: limits for name, limits in box[0].tenants.items() if name != "b"}
        left = tuple(c for c in box[0].credentials if c.tenant != "b")
        box[0] = CredentialFile(tenants=tenants, credentials=left)
    assert re.match(r"2 credentials of 2 tenants; [2-9] connections were cut", daemon.tenants.reload())
    assert set(daemon.stores) == {"a", "c"}
    assert clients[0].stats().capacity_nbytes == 1 << 20
    assert site.client(late).stats().capacity_nbytes == 3 << 20
    with pytest.raises((UnavailableError, LeaseExpiredError)):
        held.commit()
    for client in clients[1:]:
        wait_until(lambda c=client: "not valid" in c.away)  # type: ignore[misc]
        assert client.stats().capacity_nbytes == 0
        assert client.namespace(SPEC).lookup(client.namespace(SPEC).keys(range(8))).prefix == 0
    site.path.write_text("{")
    with pytest.raises(ConfigError, match=str(site.path)):
        daemon.tenants.reload()
    assert clients[0].stats().capacity_nbytes == 1 << 20, "a wrong file changes nothing"


def test_quotas_beyond_what_there_is_are_refused_at_the_start(site: Site) -> None:
    site.tenant("a", Limits(dram=3 << 20))
    site.tenant("b", Limits(dram=2 << 20))
    with pytest.raises(ConfigError, match="5 MiB"):
        site.start()
    with edited(site.path) as box:
        box[0] = CredentialFile()
    with pytest.raises(ConfigError, match="no tenant"):
        site.start()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (("daemon.listen=tls://0.0.0.0:0",), "cert=PATH"),
        (("daemon.listen=tls://0.0.0.0:0?cert=/nowhere.pem",), "/nowhere.pem cannot be read"),
        (("daemon.listen=tls://0.0.0.0:0", "daemon.credentials=none"), r"daemon\.credentials.*tls://"),
        (("daemon.credentials=c.json",), r"daemon\.credentials.*absolute"),
        (("daemon.credentials=/nowhere.json",), r"/nowhere\.json.*kvferry credentials add"),
        (("daemon.peer_tokens=here", "store.tiers=peer:?peers=tcp://127.0.0.1:9"), r"peer_tokens.*absolute"),
        (("store.tiers=peer:?peers=tcp://127.0.0.1:9",), r"daemon\.credentials.*daemon\.peer_tokens is none"),
    ],
)
def test_what_cannot_work_is_refused_by_name(site: Site, settings: tuple[str, ...], named: str) -> None:
    site.token("a")
    with pytest.raises(ConfigError, match=named):
        site.start(*settings)


@pytest.mark.parametrize(
    ("url", "named"),
    [("tcp://0.0.0.0:0", "tls://"), ("ucx://0.0.0.0:0", "tls://"), ("auto://0.0.0.0:0", "tls://")],
)
def test_tokens_do_not_go_in_the_clear(site: Site, url: str, named: str) -> None:
    site.token("a")
    with pytest.raises(ConfigError, match=named):
        site.start(f"daemon.listen={url}")
    with pytest.raises(ConfigError, match="in the clear"):
        Client("tcp://192.0.2.1:8450", ClientOptions(credential=b"kvf1_somebody_s_token"))
    with pytest.raises(ConfigError, match="credentials"):
        site.start(f"daemon.listen={url}", "daemon.credentials=none")


# ---- peers -------------------------------------------------------------------------------------------------


def test_peers_show_the_token_of_each_tenant(site: Site) -> None:
    tokens = {name: site.token(name) for name in ("a", "b")}
    folder = site.folder / "peer-tokens"
    folder.mkdir()
    (folder / "a.token").write_bytes(tokens["a"])
    (folder / "a.token").chmod(0o600)
    far = site.start()
    tier = f"peer:?peers={far.addresses[0]}&timeout=20s&write=write_through"
    near = site.start(
        f"daemon.socket={site.folder}/near.sock", f"store.tiers={tier}", f"daemon.peer_tokens={folder}"
    )
    for name, reached in (("a", 8), ("b", 0)):
        client = site.client(tokens[name], near.addresses[0])
        ns = client.namespace(SPEC)
        keys = ns.keys(range(32))
        save_blocks(ns, keys)
        client.flush(deadline=deadline_in(20))
        assert far.store_of(name).stats().entries == reached, name
        there = site.client(tokens[name], far.addresses[0]).namespace(SPEC)
        assert there.lookup(keys).prefix == reached


def test_tenants_do_not_go_to_a_peer_that_lets_everybody_in(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Any engine there could load the blocks of a tenant, or scan the memory that it maps for them."""
    token = site.token("acme")
    folder = site.folder / "peer-tokens"
    folder.mkdir()
    (folder / "acme.token").write_bytes(token)
    (folder / "acme.token").chmod(0o600)
    far = site.start("daemon.credentials=none", f"daemon.socket={site.folder}/far.sock")
    tier = f"peer:?peers={far.addresses[0]}&timeout=20s&write=write_through"
    near = site.start(f"store.tiers={tier}", f"daemon.peer_tokens={folder}")
    ns = site.client(token).namespace(SPEC)
    keys = ns.keys(range(32))
    stranger = site.client(None, far.addresses[0]).namespace(SPEC)
    save_blocks(stranger, keys[:4])
    assert ns.lookup(keys).prefix == 0, "what anybody has put there is not taken for its own"
    save_blocks(ns, keys)
    near.store_of("acme").flush(deadline=deadline_in(20))
    assert far.store_of("default").stats().entries == 4
    problems = near.store_of("acme").levels[0].tier.usage().problems
    assert [why for why in problems.values() if "lets everybody in" in why]
    said = [record for record in caplog.records if record.getMessage().startswith("peer unix:")]
    assert len(said) == 1


def test_guesses_of_leases_and_namespaces_find_nothing(site: Site) -> None:
    """Messages by hand, with the numbers that tenant a uses, in a session of the same name."""
    one, other = site.token("a"), site.token("b")
    site.start()
    a = site.client(one, session="engine")
    ns = a.namespace(SPEC)
    keys = ns.keys(range(32))
    save_blocks(ns, keys)
    with (
        ns.load(keys, deadline=deadline_in(20)) as reading,
        ns.reserve(ns.keys(range(100, 132)), parent=None, deadline=deadline_in(20)) as writing,
    ):
        numbers = tuple(int(lease.lease_id, 16) for lease in (reading, writing))
        options = ChannelOptions(role="client", session="engine", credential=other)
        channel = Channel.connect(site.url, options, deadline_in(20))
        for number in numbers:
            for message in (
                d.RenewLease(lease=number),
                d.FindLease(lease=number),
                d.QuarantineLease(lease=number),
                d.CommitBlocks(lease=number, timeout_s=1),
            ):
                with pytest.raises((LeaseExpiredError, ProtocolError)):
                    channel.call(message, d.Done, deadline=deadline_in(20))
        channel.call(d.EndLeases(ended=numbers), d.Done, deadline=deadline_in(20))
        channel.call(d.EndLeases(abandoned=numbers), d.Done, deadline=deadline_in(20))
        channel.close()
        reading.check()
        assert bytes(reading.view(0)) == block_bytes(keys[0], SPEC.block_nbytes)
        assert writing.commit() == 8
        for number in range(3):  # namespaces are numbered by connection
            channel = Channel.connect(site.url, options, deadline_in(20))
            with pytest.raises(ProtocolError):
                channel.call(
                    d.LookupBlocks(namespace=number, keys=b"".join(keys)),
                    d.LookedUp,
                    deadline=deadline_in(20),
                )
            channel.close()


def test_tenants_side_by_side_never_read_each_others_bytes(site: Site) -> None:
    """Both keep other bytes under the same keys, more than there is room for, in two threads each."""
    tokens = {name: site.token(name) for name in ("a", "b")}
    site.start()
    wrong: list[str] = []
    loaded: Counter[str] = Counter()

    def work(name: str, seed: int) -> None:
        ns = site_clients[name].namespace(SPEC)
        for step in range(30):
            keys = ns.keys([(seed + step) % 7] * 4 * 60)
            data = (name.encode() * SPEC.block_nbytes)[: SPEC.block_nbytes]
            with suppress(CapacityError):
                ns.save([(key, data) for key in keys], parent=None, deadline=deadline_in(20))
            with suppress(LeaseExpiredError), ns.load(keys, deadline=deadline_in(20)) as lease:
                bad = [n for n in range(len(lease)) if bytes(lease.view(n)) != data]
                lease.check()
                wrong.extend(f"{name} {n}" for n in bad)
                loaded[name] += len(lease)

    site_clients = {name: site.client(token) for name, token in tokens.items()}
    threads = [threading.Thread(target=work, args=(name, seed)) for name in tokens for seed in (0, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert min(loaded["a"], loaded["b"]) > 100


def test_a_hello_may_not_name_a_tenant(site: Site) -> None:
    """There is no field for one: what a client says of itself beyond its token changes nothing."""
    site.token("a")
    token = site.token("b")
    daemon = site.start("daemon.listen=tcp://127.0.0.1:0")
    client = site.client(token, session="a", role="a")
    assert client.stats().capacity_nbytes
    assert [session.tenant for session in daemon.sessions.active] == ["b"]
    host, port = daemon.addresses[1].removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), 5) as raw:  # no handshake, no answer
        raw.sendall(b"\0" * 64)
        raw.settimeout(20)
        with suppress(ConnectionResetError):
            assert not raw.recv(100)
    with pytest.raises(KVFerryError):
        Client(daemon.addresses[1])
