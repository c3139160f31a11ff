"""Saves through staging memory: what a client puts there, and what the daemon takes from there."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.client import Client, ClientOptions
from kvferry.client.line import Line
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    ConnectionClosedError,
    KVFerryError,
    ProtocolError,
    StoreError,
)
from kvferry.core.staging import MappedStaging, StagingMemory
from kvferry.daemon import Daemon
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.wire import daemon_messages as d

SPEC = small_spec("staging")
LARGE = small_spec("staging-large", pages=128)  # three of them are more than is sent in one frame
PAGE = mmap.PAGESIZE
Start = Callable[..., Daemon]


def sealed(nbytes: int, *seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    for seal in seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    return fd


# ---- the memory --------------------------------------------------------------------------------------


def test_pieces_are_used_again_once_nobody_looks_at_them() -> None:
    memory = StagingMemory(8 * PAGE)
    first = memory.piece(3 * PAGE - 5)
    assert first is not None
    assert len(first.view) == 3 * PAGE - 5
    part = first.view[PAGE:]
    second = memory.piece(5 * PAGE)
    assert second is not None
    assert second.offset == 3 * PAGE
    assert memory.piece(1) is None
    del first
    assert memory.piece(1) is None, "a part of it is still looked at"
    del part
    again = memory.piece(2 * PAGE)
    assert again is not None
    assert again.offset == 0
    assert memory.used_nbytes == 7 * PAGE
    memory.close()
    assert memory.piece(1) is None
    second.view[:] = bytes(5 * PAGE)  # the memory goes with its last view


def test_memory_is_taken_as_it_is_needed_and_can_neither_shrink_nor_grow() -> None:
    memory = StagingMemory(64 << 20)
    assert memory.taken_nbytes == 0
    piece = memory.piece(100)
    assert piece is not None
    assert os.fstat(memory.fd).st_blocks * 512 == memory.taken_nbytes <= 4 << 20
    for nbytes in (0, 128 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert memory.piece((64 << 20) + 1) is None
    memory.close()


def test_the_daemon_maps_it_for_reading_and_copies_no_further_than_it_goes() -> None:
    memory = StagingMemory(4 * PAGE)
    piece = memory.piece(2 * PAGE)
    assert piece is not None
    piece.view[:] = np.random.default_rng(5).bytes(2 * PAGE)
    mapped = MappedStaging(memory.fd, memory.nbytes)
    memory.close()
    into = np.zeros(2 * PAGE, np.uint8)
    mapped.copy(piece.offset, into.data)
    assert bytes(into) == bytes(piece.view)
    for offset in (3 * PAGE, -1, 1 << 62):
        with pytest.raises(ProtocolError, match="of staging memory of"):
            mapped.copy(offset, into.data)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: os.open("/dev/zero", os.O_RDWR), "no memfd"),
        (lambda: os.pipe()[0], "no memfd"),
        (lambda: sealed(PAGE), "not sealed against shrinking"),
        (lambda: sealed(PAGE, fcntl.F_SEAL_GROW), "not sealed against shrinking"),
        (lambda: sealed(PAGE, fcntl.F_SEAL_SHRINK), "of 4096 bytes, not 8192"),
    ],
)
def test_what_could_hurt_a_reader_is_not_mapped(make: Callable[[], int], what: str) -> None:
    fd = make()
    try:
        with pytest.raises(ProtocolError, match=what):
            MappedStaging(fd, 2 * PAGE)
    finally:
        os.close(fd)


def test_huge_pages_are_not_mapped() -> None:
    try:
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        os.ftruncate(fd, 2 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as error:
        pytest.skip(f"no huge pages here: {error}")
    with pytest.raises(ProtocolError, match="huge pages"):
        MappedStaging(fd, 2 << 20)
    os.close(fd)


def test_a_client_without_memory_to_stage_in_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(StoreError, match="Too many open files"):
        StagingMemory(PAGE)


# ---- through a daemon --------------------------------------------------------------------------------


def frames_with_payload(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the payloads that the client sends with commits from now on."""
    sent: list[int] = []
    with client.link.line(deadline_in(20)) as line:
        kind = type(line.channel)
    call = kind.call

    def counted(self: Any, message: Any, *args: Any, **options: Any) -> Any:
        if isinstance(message, d.CommitBlocks):
            sent.append(sum(map(len, options.get("payload", ()))))
        return call(self, message, *args, **options)

    monkeypatch.setattr(kind, "call", counted)
    return sent


def test_saves_go_through_staging_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start("daemon.arena=copy", "store.dram_capacity=8MiB")
    with Client(daemon.addresses[0]) as client:
        sent = frames_with_payload(client, monkeypatch)
        ns = client.namespace(LARGE)
        keys = ns.keys(range(6 * LARGE.block_tokens))
        assert save_blocks(ns, keys[:3]) == 3
        lease = ns.reserve(keys[3:], parent=keys[2], deadline=deadline_in(20))
        for index in range(3):
            lease.view(index)[:] = block_bytes(keys[3 + index], LARGE.block_nbytes)
        stored, held = lease.publish()
        with held:
            assert bytes(held.view(2)) == block_bytes(keys[5], LARGE.block_nbytes)
        assert stored == 3
        assert sent == [0, 0], "no byte of a block crosses the socket"
        with ns.load(keys, deadline=deadline_in(20)) as found:
            assert [bytes(found.view(index)) for index in range(6)] == [
                block_bytes(key, LARGE.block_nbytes) for key in keys
            ]
        memory = client.link.staging.memory
        assert memory is not None
        del lease, held
        wait_until(lambda: memory.used_nbytes == 0)


def test_a_block_does_not_change_with_the_memory_it_was_staged_in(start: Start) -> None:
    """A client that writes on after the commit writes its own memory."""
    daemon = start("daemon.arena=copy")
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        keys = ns.keys(range(2 * SPEC.block_tokens))
        lease = ns.reserve(keys, parent=None, deadline=deadline_in(20))
        views = [lease.view(index) for index in range(2)]
        for key, view in zip(keys, views, strict=True):
            view[:] = block_bytes(key, SPEC.block_nbytes)
        assert lease.commit() == 2
        for view in views:
            view[:] = bytes(len(view))
        with ns.load(keys, deadline=deadline_in(20)) as found:
            assert bytes(found.view(1)) == block_bytes(keys[1], SPEC.block_nbytes)


def test_what_finds_no_room_there_is_sent(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start("daemon.arena=copy", "store.dram_capacity=8MiB")
    options = ClientOptions(staging_nbytes=4 * LARGE.block_nbytes)
    with Client(daemon.addresses[0], options) as client:
        sent = frames_with_payload(client, monkeypatch)
        ns = client.namespace(LARGE)
        keys = ns.keys(range(8 * LARGE.block_tokens))
        assert save_blocks(ns, keys[:5]) == 5
        assert save_blocks(ns, keys[5:], parent=keys[4]) == 3
        assert sent == [5 * LARGE.block_nbytes, 0]
        with ns.load(keys, deadline=deadline_in(20)) as found:
            assert [bytes(found.view(index)) for index in range(8)] == [
                block_bytes(key, LARGE.block_nbytes) for key in keys
            ]


def test_nothing_is_staged_where_slots_are_written_or_memory_is_not_shared(start: Start) -> None:
    daemon = start("store.dram_capacity=8MiB")
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(LARGE)
        save_blocks(ns, ns.keys(range(3 * LARGE.block_tokens)))
        assert client.link.staging.memory is None
        with (
            client.link.line(deadline_in(20)) as line,
            pytest.raises(KVFerryError, match="who may not write"),
        ):
            line.call(d.OfferStaging(nbytes=PAGE), d.Done, deadline_in(20))
    daemon.close()
    daemon = start("daemon.arena=copy", "store.dram_capacity=8MiB")
    with Client(daemon.addresses[0], ClientOptions(share_memory=False)) as client:
        ns = client.namespace(LARGE)
        save_blocks(ns, ns.keys(range(3 * LARGE.block_tokens)))
        assert client.link.staging.memory is None


def offer(line: Line, fd: int, nbytes: int) -> None:
    line.call(d.OfferStaging(nbytes=nbytes), d.Done, deadline_in(20))
    line.channel.send_descriptors([fd], deadline_in(20))
    line.channel.expect(d.Done, deadline_in(20))


@pytest.mark.parametrize("offsets", [(), (0,), (0, 2 * PAGE, 4 * PAGE), (0, 3 * PAGE), (1 << 63, 0)])
def test_a_commit_of_what_is_not_there_stores_nothing(start: Start, offsets: tuple[int, ...]) -> None:
    daemon = start("daemon.arena=copy")
    memory = StagingMemory(4 * PAGE)
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        keys = ns.keys(range(2 * SPEC.block_tokens))
        lease = ns.reserve(keys, parent=None, deadline=deadline_in(20))
        staged = b"".join(offset.to_bytes(8, "little") for offset in offsets)
        wrong = d.CommitBlocks(lease=lease.number, timeout_s=20, staged=staged)
        with client.link.line(deadline_in(20)) as line:
            offer(line, memory.fd, memory.nbytes)
            with pytest.raises(ProtocolError, match="staging memory"):
                line.call(wrong, d.Stored, deadline_in(20))
        assert ns.lookup(keys).prefix == 0


def test_memory_that_is_not_safe_ends_the_connection_and_nothing_else(start: Start) -> None:
    daemon = start("daemon.arena=copy")
    fd = sealed(PAGE)
    with Client(daemon.addresses[0]) as client, Client(daemon.addresses[0]) as other:
        with client.link.line(deadline_in(20)) as line, pytest.raises((ConnectionClosedError, ProtocolError)):
            offer(line, fd, PAGE)
        assert save_blocks(other.namespace(SPEC), other.namespace(SPEC).keys(range(8))) == 2
    os.close(fd)
