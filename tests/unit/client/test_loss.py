"""Clients and peers of a daemon: those that take blocks that have lost something, and the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvferry.client import Client, ClientOptions
from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.errors import ProtocolError
from kvferry.core.keys import BlockKey
from kvferry.daemon import Daemon
from kvferry.testing.blocks import small_spec, wait_until
from kvferry.wire import daemon_messages as d

SPEC = small_spec("loss")
EXACT, LOSSY = b"\x01" * SPEC.block_nbytes, b"\x02" * SPEC.block_nbytes
Start = Callable[..., Daemon]


def fill(namespace: Namespace, keys: list[BlockKey], data: bytes, *, lossy: bool) -> int:
    with namespace.reserve(keys, parent=None, deadline=deadline_in(20)) as lease:
        for index in range(len(lease)):
            lease.view(index)[:] = data
        lease.mark_lossy(range(len(lease)) if lossy else ())
        return lease.commit()


def read(namespace: Namespace, keys: list[BlockKey]) -> list[tuple[bytes, bool]]:
    with namespace.load(keys, deadline=deadline_in(20)) as lease:
        return [(bytes(lease.view(index)), index in lease.lossy) for index in range(len(lease))]


@pytest.mark.parametrize("share_memory", [True, False])
def test_a_client_gets_what_it_takes_and_hears_what_it_is(start: Start, share_memory: bool) -> None:
    daemon = start()
    options = ClientOptions(share_memory=share_memory)
    with Client(daemon.addresses[0], options) as client:
        exact, any_loss = client.namespace(SPEC), client.namespace(SPEC, takes_lossy=True)
        keys = exact.keys([1] * 3 * SPEC.block_tokens)
        assert fill(exact, keys[:2], LOSSY, lossy=True) == 2
        assert exact.lookup(keys).prefix == len(exact.load(keys, deadline=deadline_in(20))) == 0
        assert any_loss.lookup(keys).prefix == 2
        assert read(any_loss, keys) == [(LOSSY, True)] * 2
        with (
            any_loss.load(keys, deadline=deadline_in(20)) as lease,
            Client(daemon.addresses[0], options, session=client.session) as worker,
        ):
            found = worker.find_lease(lease.lease_id)
            assert found is not None
            assert found.lossy == {0, 1}
        any_loss.save([(keys[2], EXACT)], parent=keys[1], deadline=deadline_in(20))  # behind them
        assert read(any_loss, keys) == [(LOSSY, True)] * 2 + [(EXACT, True)]
        assert exact.lookup(keys[2:]).prefix == 0
        assert exact.save([(key, EXACT) for key in keys], parent=None, deadline=deadline_in(20)) == 3
        assert read(exact, keys) == read(any_loss, keys) == [(EXACT, False)] * 3


def test_a_daemon_that_cannot_tell_them_apart_gives_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of before: it skips the field that it does not know."""
    daemon = start()
    with Client(daemon.addresses[0]) as client:
        exact, any_loss = client.namespace(SPEC), client.namespace(SPEC, takes_lossy=True)
        keys = exact.keys([1] * SPEC.block_tokens)

        def old(message: d.OpenNamespace) -> d.OpenNamespace:
            return msgspec.structs.replace(message, lossless=msgspec.UNSET)

        make = d.OpenNamespace
        mine = {**vars(d), "OpenNamespace": lambda **fields: old(make(**fields))}
        # the client's alone: the daemon makes a table of its requests for each connection
        monkeypatch.setattr("kvferry.client.namespace.d", SimpleNamespace(**mine))
        assert fill(exact, keys, EXACT, lossy=False) == 1
        assert exact.lookup(keys).prefix == len(exact.load(keys, deadline=deadline_in(20))) == 0
        assert client.counters.refused_reads == 2
        assert read(any_loss, keys) == [(EXACT, False)]


def test_a_daemon_that_names_lossy_blocks_to_who_takes_none_breaks_the_protocol(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start()
    with Client(daemon.addresses[0]) as client:
        namespace = client.namespace(SPEC)
        keys = namespace.keys([1] * SPEC.block_tokens)
        fill(namespace, keys, EXACT, lossy=False)
        monkeypatch.setattr("kvferry.daemon.service._lossy", lambda _: (0,))
        with pytest.raises(ProtocolError, match="lossy blocks"):
            namespace.load(keys, deadline=deadline_in(20))


def test_blocks_of_a_peer_are_what_they_were_there(tmp_path: Path) -> None:
    """A reader gets only what it takes, and an exact block takes the place of a lossy one at the peer too."""
    urls = [f"unix://{tmp_path}/{name}.sock" for name in "ab"]
    sockets = [f"daemon.socket={tmp_path}/{name}.sock" for name in "ab"]
    peer = f"store.tiers=peer:?peers={urls[1]}&timeout=5s&write=write_through"

    def daemon(*assignments: str) -> Daemon:
        more = ["daemon.listen=none", "store.dram_capacity=8MiB", *assignments]
        return Daemon(load_config(None, assignments=more).config)

    with (
        closing(daemon(sockets[1], "daemon.disk=none")) as theirs,
        closing(daemon(sockets[0], peer)) as ours,
        Client(urls[0]) as client,
        Client(urls[1]) as there,
    ):
        exact, any_loss = client.namespace(SPEC), client.namespace(SPEC, takes_lossy=True)
        keys = exact.keys([1] * 2 * SPEC.block_tokens)
        assert fill(exact, keys, LOSSY, lossy=True) == 2
        assert client.flush(deadline=deadline_in(20))
        assert there.namespace(SPEC).lookup(keys).prefix == 0
        assert read(there.namespace(SPEC, takes_lossy=True), keys) == [(LOSSY, True)] * 2
        ours.store_of("default").evict(8 << 20)
        assert len(exact.load(keys, deadline=deadline_in(20))) == 0
        assert read(any_loss, keys) == [(LOSSY, True)] * 2
        ours.store_of("default").evict(8 << 20)

        assert exact.save([(key, EXACT) for key in keys], parent=None, deadline=deadline_in(20)) == 2
        assert client.flush(deadline=deadline_in(20))
        wait_until(lambda: read(there.namespace(SPEC), keys) == [(EXACT, False)] * 2)
        ours.store_of("default").evict(8 << 20)
        assert read(exact, keys) == [(EXACT, False)] * 2
        assert theirs.store_of("default").stats().entries == 2
