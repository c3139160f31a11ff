import gc
import os
import pickle
import threading
import time

import msgspec
import numpy as np
import pytest

from kvferry.core import leases, memory
from kvferry.core.arena import ArenaMap
from kvferry.core.blockstore import ReadLease, WriteLease
from kvferry.core.clock import deadline_in
from kvferry.core.errors import LeaseExpiredError, StoreError
from kvferry.core.leases import LeaseState, LeaseTicket, MappedReadLease, SlotReadLease
from kvferry.core.memory import MemoryStore
from kvferry.core.sessions import Session
from kvferry.core.write_leases import SlotWriteLease
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec

SPEC = small_spec("leases")
N = SPEC.block_nbytes


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(8 * N)


def loaded(store: MemoryStore, blocks: int = 2) -> SlotReadLease:
    ns = store.namespace(SPEC)
    keys = ns.keys([1] * (blocks * SPEC.block_tokens))
    save_blocks(ns, keys)
    return ns.load(keys, deadline=deadline_in(20))


def reserved(store: MemoryStore, session: Session, blocks: int = 2, number: int = 2) -> SlotWriteLease:
    ns = store.for_session(session).namespace(SPEC)
    return ns.reserve(ns.keys([number] * (blocks * SPEC.block_tokens)), parent=None, deadline=deadline_in(20))


class Clock:
    """What the store and its leases take for the time: ahead of the real one as far as a test says."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK.ahead = 0.0
    for module in (leases, memory):
        monkeypatch.setattr(module, "time", CLOCK)


def past(lease: SlotReadLease | SlotWriteLease) -> None:
    CLOCK.ahead += lease.expires_at - CLOCK.monotonic()


def test_the_classes_are_what_the_protocol_says(store: MemoryStore) -> None:
    read: ReadLease = loaded(store)
    write: WriteLease = reserved(store, store.session)
    assert read.lease_id != write.lease_id
    assert repr(read).startswith("<read lease r-")
    assert "2, active" in repr(write)


def test_a_ticket_is_plain_data_that_another_process_can_check(store: MemoryStore) -> None:
    lease = loaded(store)
    ticket = lease.ticket()
    assert pickle.loads(pickle.dumps(ticket)) == ticket
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=LeaseTicket)
    assert again == ticket
    mapped = MappedReadLease(ArenaMap.from_fds(store.layout(), store.arena.descriptors()), again)
    assert len(mapped) == 2
    for index, key in enumerate(lease.keys):
        assert mapped.view(index).readonly
        assert mapped.view(index) == block_bytes(key, N)
    mapped.check()
    store.namespace(SPEC).clear()
    mapped.check()
    lease.release()  # nobody holds the removed blocks any more: their slots are freed
    with pytest.raises(LeaseExpiredError, match="used again"):
        mapped.check()


def test_a_mapped_lease_is_over_at_its_deadline_without_the_owner() -> None:
    store = MemoryStore(8 * N)
    lease = loaded(store)
    mapped = MappedReadLease(ArenaMap.from_fds(store.layout(), store.arena.descriptors()), lease.ticket())
    past(lease)
    with pytest.raises(LeaseExpiredError, match="past its deadline"):
        mapped.check()


def test_of_two_releases_at_once_one_wins(store: MemoryStore) -> None:
    lease, other = loaded(store), loaded(store)
    outcomes: list[str] = []
    gate = threading.Barrier(8)

    def release() -> None:
        gate.wait(60)
        try:
            lease.release()
            outcomes.append("released")
        except LeaseExpiredError:
            outcomes.append("refused")

    threads = [threading.Thread(target=release, name=f"kvferry-test-{n}") for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["refused"] * 7 + ["released"]
    assert store.end_read(lease) is False
    assert store.stats().pinned_nbytes == 2 * N
    other.release()


def test_a_lease_is_resolved_by_its_own_session_only(store: MemoryStore) -> None:
    mine, other = Session("mine"), Session("other")
    write = reserved(store, mine)
    assert store.for_session(mine).find_lease(write.lease_id) is write
    assert store.for_session(other).find_lease(write.lease_id) is None
    read = loaded(store)
    assert store.find_lease(read.lease_id, store.session) is read
    read.release()
    assert store.find_lease(read.lease_id, store.session) is None


def test_check_finds_a_slot_that_was_used_again(store: MemoryStore) -> None:
    lease = loaded(store)
    store.arena.free(lease.slots[1])  # what must never happen to a leased slot
    with pytest.raises(LeaseExpiredError, match="used again"):
        lease.check()


def test_an_error_on_its_way_is_not_hidden_by_the_lease() -> None:
    store = MemoryStore(8 * N)
    late = loaded(store)
    past(late)
    with pytest.raises(ZeroDivisionError), late:
        raise ZeroDivisionError
    assert late.state is LeaseState.ENDED
    with pytest.raises(LeaseExpiredError), loaded(store) as lease:
        past(lease)
    with loaded(store) as lease:
        lease.release()


def test_a_deadline_while_another_hand_writes() -> None:
    store = MemoryStore(8 * N)
    lease = reserved(store, store.session)
    with lease.writing():
        past(lease)
        assert store.stats().quarantined_nbytes == 2 * N
        with pytest.raises(LeaseExpiredError):
            lease.commit()
        assert store.stats().quarantined_nbytes == 2 * N
    assert store.stats().used_nbytes == 0
    lease = reserved(store, store.session)
    with lease.writing():
        past(lease)
        assert store.stats().expired_leases == 2
    assert store.stats().used_nbytes == 0, "the transport's completion ends the quarantine"


@pytest.mark.parametrize("end", ["release", "commit", "publish", "abort"])
def test_a_lease_that_its_holder_ends_too_late_counts_as_expired(end: str) -> None:
    store = MemoryStore(8 * N)
    lease = loaded(store) if end == "release" else reserved(store, store.session)
    past(lease)
    if end == "abort":
        lease.abort()  # type: ignore[union-attr]
    else:
        with pytest.raises(LeaseExpiredError):
            getattr(lease, end)()
    stats = store.stats()
    assert (stats.expired_leases, stats.leases, stats.pinned_nbytes, stats.quarantined_nbytes) == (1, 0, 0, 0)
    in_time = reserved(store, store.session)
    in_time.record.expires_at += 60
    in_time.abort()
    assert store.stats().expired_leases == 1
    store.close()
    in_time.abort()


def test_the_session_process_may_still_write_after_the_transport_did() -> None:
    store = MemoryStore(8 * N)
    lease = reserved(store, Session("client", pid=os.getpid()))
    with lease.writing():
        past(lease)
        store.poll()
    assert store.stats().quarantined_nbytes == 2 * N
    lease.abort()
    assert store.stats().used_nbytes == 0


def test_the_end_of_a_session_ends_its_leases_and_no_others(store: MemoryStore) -> None:
    session = Session("engine")
    view = store.for_session(session)
    read = loaded(store)
    ns = view.namespace(SPEC)
    theirs = ns.load(list(read.keys), deadline=deadline_in(20))
    write, written = reserved(store, session), reserved(store, session, number=3)
    with written.writing():
        view.close()
        assert store.stats().leases == 1
        assert store.stats().quarantined_nbytes == 2 * N
    assert store.stats().used_nbytes == 2 * N
    for call in (theirs.check, theirs.release, write.commit, written.commit):
        with pytest.raises(LeaseExpiredError):
            call()
    read.release()
    with pytest.raises(StoreError, match="engine has ended"):
        ns.load([], deadline=deadline_in(20))
    with pytest.raises(StoreError, match="engine has ended"):
        reserved(store, session)
    assert view.stats().expired_leases == 0
    assert view.poll() == []
    assert view.flush(deadline=0)


def test_a_commit_of_a_session_that_has_ended_in_another_store() -> None:
    session = Session("engine")
    store = MemoryStore(8 * N, session=session)
    lease = reserved(store, session)
    session._ended = True  # between the end and the store's being told
    with pytest.raises(LeaseExpiredError, match="session has ended"):
        lease.commit()
    assert store.stats().used_nbytes == 0


def test_a_store_that_is_gone_is_not_told() -> None:
    session = Session("engine")
    store = MemoryStore(8 * N, session=session)
    other = MemoryStore(8 * N, session=session)
    other.close()
    del store
    session.end()


def test_many_short_leases_leave_no_deadlines_behind(store: MemoryStore) -> None:
    for _ in range(300):
        loaded(store).release()
    table = store._pool.reads
    assert len(table._deadlines) <= 64 + 1
    assert table.next_deadline() is None
    assert list(table) == []


def test_a_write_lease_that_is_dropped_is_aborted_when_no_view_of_it_is_left() -> None:
    """Its slots would be in quarantine for as long as the process lives."""
    store = MemoryStore(4 * N)
    lease = reserved(store, store.session)
    view = lease.view(1)[16:32]
    array = np.frombuffer(view, np.uint8)
    del lease, view
    assert (store.stats().leases, store.stats().pinned_nbytes) == (1, 2 * N)
    array[:] = 255  # the bytes are still its own
    del array
    stats = store.stats()
    assert (stats.leases, stats.pinned_nbytes, stats.quarantined_nbytes, stats.used_nbytes) == (0, 0, 0, 0)
    store.close()


def test_an_expired_write_lease_that_is_dropped_leaves_the_quarantine() -> None:
    store = MemoryStore(4 * N)
    lease = reserved(store, store.session)
    view = lease.view(0)
    past(lease)
    assert store.stats().quarantined_nbytes == 2 * N
    del lease
    assert store.stats().quarantined_nbytes == 2 * N
    del view
    assert store.stats().quarantined_nbytes == 0
    store.close()


@pytest.mark.parametrize("tell", ["ticket", "slots", "lease_id"])
def test_a_write_lease_of_which_others_were_told_is_in_quarantine_though_it_is_dropped(tell: str) -> None:
    store = MemoryStore(4 * N)
    lease = reserved(store, store.session)
    told = lease.record.lease_id
    _ = lease.ticket() if tell == "ticket" else getattr(lease, tell)
    del lease
    CLOCK.ahead += store.lease_s
    assert store.stats().quarantined_nbytes == 2 * N
    gc.collect()
    assert store.stats().quarantined_nbytes == 2 * N
    found = store.find_lease(told, store.session)
    assert isinstance(found, SlotWriteLease)
    found.abort()
    assert store.stats().used_nbytes == 0
    store.close()


def test_a_write_lease_that_is_dropped_while_others_write_ends_with_their_writing() -> None:
    store = MemoryStore(4 * N)
    lease = reserved(store, store.session)
    writing = lease.writing()
    writing.__enter__()
    del lease
    assert store.stats().used_nbytes == 2 * N
    writing.__exit__(None, None, None)
    del writing
    assert store.stats().used_nbytes == 0
    store.close()


def test_who_waits_for_room_gets_that_of_a_lease_that_is_dropped() -> None:
    store = MemoryStore(2 * N)
    leases = [reserved(store, store.session)]
    waits = threading.Event()
    before = store._wait_for_room

    def wait_for_room(now: float, deadline: float) -> None:
        waits.set()
        before(now, deadline)

    store._wait_for_room = wait_for_room  # type: ignore[method-assign]

    def drop() -> None:
        assert waits.wait(30)
        leases.clear()

    thread = threading.Thread(target=drop)
    thread.start()
    ns = store.namespace(SPEC)
    with ns.reserve(ns.keys([9] * SPEC.block_tokens), parent=None, deadline=deadline_in(30)) as lease:
        assert len(lease) == 1
    thread.join()
    store.close()
