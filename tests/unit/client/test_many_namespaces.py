"""More namespaces than a connection may have open: a salt a user, an adapter a customer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import msgspec
import pytest

from kvferry.client import Client, ClientOptions
from kvferry.client.namespace import ClientNamespace
from kvferry.client.peer import PeerClient
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import OverloadedError, ProtocolError, SpecMismatchError
from kvferry.core.keys import BlockKey
from kvferry.core.spec import KeyScope, namespace_id
from kvferry.daemon import Daemon
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, TierNamespace
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire import daemon_messages as d
from kvferry.wire.messages import Message

Start = Callable[..., Daemon]

SPEC = small_spec("many-namespaces")
MOST = 4


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.wire.daemon_messages.MOST_NAMESPACES", MOST)
    monkeypatch.setattr("kvferry.daemon.opened.MOST_NAMESPACES", MOST)


def salted(number: int) -> KeyScope:
    return KeyScope(salt=b"user %d" % number)


@pytest.mark.parametrize("share_memory", [True, False])
def test_a_client_goes_on_beyond_what_a_connection_may_have_open(start: Start, share_memory: bool) -> None:
    """It was refused from the 1,025th on, for ever: nothing saved, every lookup a miss."""
    daemon = start()
    with Client(daemon.addresses[0], ClientOptions(max_connections=1, share_memory=share_memory)) as client:
        spaces = [client.namespace(SPEC, salted(n)) for n in range(3 * MOST)]
        for ns in spaces:
            assert save_blocks(ns, ns.keys([1] * SPEC.block_tokens)) == 1
        held = [ns.load(ns.keys([1] * SPEC.block_tokens), deadline=deadline_in(20)) for ns in spaces]
        for _ in range(2):
            for ns in (*spaces, *reversed(spaces)):
                assert_own(ns)
        for ns, lease in zip(spaces, held, strict=True):
            assert lease.view(0) == block_bytes(ns.keys([1] * SPEC.block_tokens)[0], SPEC.block_nbytes)
            lease.release()
        (line,) = client.link._idle
        assert len(line.opened) == MOST
        assert client.counters.connects == 1
        assert (client.counters.missed_lookups, client.counters.refused_saves) == (0, 0)


def assert_own(ns: ClientNamespace) -> None:
    """It finds its own block, and not that of a namespace that had its number before."""
    (key,) = ns.keys([1] * SPEC.block_tokens)
    assert ns.lookup([key]).prefix == 1
    assert ns.lookup(ns.keys([2] * SPEC.block_tokens)).prefix == 0
    with ns.load([key], deadline=deadline_in(20)) as lease:
        assert lease.view(0) == block_bytes(key, SPEC.block_nbytes)


def test_a_peer_does_too(start: Start) -> None:
    daemon = start()
    spaces = [TierNamespace.of("default", SPEC, salted(n)) for n in range(2 * MOST)]
    with closing(
        PeerClient(daemon.addresses[0], connections=1, timeout_s=60, own_epoch=lambda: "test")
    ) as peer:
        key = BlockKey(bytes(32))
        for number, space in enumerate(spaces):
            data = memoryview(bytes([number]) * SPEC.block_nbytes)
            assert peer.write(space, [BlockWrite(key, data, None, 0)], deadline_in(20)) == [True]
        for number, space in enumerate(spaces):
            read = BlockRead(key, page_aligned(SPEC.block_nbytes))
            (result,) = peer.read(space, [read], deadline_in(20))
            assert result.outcome is ReadOutcome.HIT
            assert read.into == bytes([number]) * SPEC.block_nbytes


def test_a_daemon_forgets_those_that_no_connection_has_open(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took 3.5 KiB for ever, with a salt a user gigabytes."""
    monkeypatch.setattr("kvferry.store.spaces._MOST_IDLE", 2 * MOST)
    daemon = start()
    with Client(daemon.addresses[0], ClientOptions(max_connections=1)) as client:
        first, *others = (client.namespace(SPEC, salted(n)) for n in range(60))
        keys = first.keys([1] * SPEC.block_tokens)
        for ns in (first, *others):
            assert ns.lookup(ns.keys([1] * SPEC.block_tokens)).prefix == 0
        assert len(daemon.store_of("default").spaces()) <= 4 * MOST
        assert save_blocks(first, keys) == 1
        for ns in others:
            assert ns.lookup(ns.keys([1] * SPEC.block_tokens)).prefix == 0
        spaces = daemon.store_of("default").spaces()
        assert len(spaces) <= 4 * MOST
        assert first.namespace_id in {space.namespace_id for space in spaces}
        assert_own(first)


def opening(number: int, instead_of: int | msgspec.UnsetType = msgspec.UNSET) -> d.OpenNamespace:
    scope = salted(number)
    return d.OpenNamespace(
        spec=SPEC, scope=scope, namespace_id=namespace_id(SPEC, scope), instead_of=instead_of
    )


def test_a_connection_may_not_take_more_nor_the_place_of_what_is_not_there(start: Start) -> None:
    daemon = start()
    with closing(
        Channel.connect(daemon.addresses[0], ChannelOptions("client", "s"), deadline_in(20))
    ) as channel:

        def ask(message: d.OpenNamespace) -> int:
            return channel.call(message, d.NamespaceOpened, deadline=deadline_in(20)).namespace

        def has(number: int, scope: int) -> bool:
            keys = daemon.store_of("default").namespace(SPEC, salted(scope)).keys([1] * SPEC.block_tokens)
            question: Message = d.LookupBlocks(namespace=number, keys=keys[0])
            return channel.call(question, d.LookedUp, deadline=deadline_in(20)).found == b"\x01"

        for number in range(MOST):
            assert ask(opening(number)) == number
        with pytest.raises(OverloadedError, match=f"at most {MOST} namespaces"):
            ask(opening(MOST))
        wrong = d.OpenNamespace(spec=SPEC, scope=salted(50), namespace_id=bytes(32), instead_of=1)
        with pytest.raises(SpecMismatchError):
            ask(wrong)
        assert ask(opening(1)) == 1, "what was refused took no place"
        for scope in (1, 70):
            ns = daemon.store_of("default").namespace(SPEC, salted(scope))
            save_blocks(ns, ns.keys([1] * SPEC.block_tokens))
        assert has(1, 1)
        assert ask(opening(70, instead_of=1)) == 1
        assert has(1, 70)
        assert not has(1, 1)
        with pytest.raises(OverloadedError):
            ask(opening(1))
        assert ask(opening(1, instead_of=0)) == 0
        assert has(0, 1)
        with pytest.raises(ProtocolError, match="namespace 99 was not opened"):
            ask(opening(MOST, instead_of=99))


def test_what_is_held_under_a_number_that_went_is_the_session_s(start: Start) -> None:
    """Leases of a namespace that is open no more end with their client."""
    daemon = start()
    with Client(daemon.addresses[0], ClientOptions(max_connections=1)) as client:
        spaces = [client.namespace(SPEC, salted(n)) for n in range(2 * MOST)]
        key = spaces[0].keys([1] * SPEC.block_tokens)
        leases = [ns.reserve(key, parent=None, deadline=deadline_in(20)) for ns in spaces]
        assert daemon.store_of("default").stats().leases == len(leases)
        leases[0].view(0)[:] = block_bytes(key[0], SPEC.block_nbytes)
        assert leases[0].commit() == 1
        assert spaces[0].lookup(key).prefix == 1
    wait_until(lambda: daemon.store_of("default").stats().leases == 0)
