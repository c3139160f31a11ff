"""Saves through the store in memory while other things happen between their two halves."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import pytest

from kvferry.core.arena import Arena
from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, ConfigError, LeaseExpiredError
from kvferry.core.keys import KEY_NBYTES, BlockKey
from kvferry.core.memory import MemoryStore
from kvferry.core.segments import Slot
from kvferry.core.sessions import Session
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec

SPEC = small_spec("saving")
N = SPEC.block_nbytes
WAIT_S = 30.0


def chain(ns: Namespace, number: int, blocks: int) -> list[BlockKey]:
    return ns.keys([number] * (blocks * SPEC.block_tokens))


def assert_whole(ns: Namespace, keys: Sequence[BlockKey]) -> None:
    with ns.load(keys, deadline=deadline_in(20)) as lease:
        assert [bytes(lease.view(n)) for n in range(len(lease))] == [block_bytes(key, N) for key in keys]


class PausedSave:
    """A save in a thread of its own that stands still when its first block is copied."""

    def __init__(self, ns: Namespace, keys: Sequence[BlockKey], patch: pytest.MonkeyPatch) -> None:
        self.error: BaseException | None = None
        self.fault: BaseException | None = None
        self.stored = -1
        self._reached, self._go = threading.Event(), threading.Event()
        write = Arena.write

        def halting(arena: Arena, slots: Sequence[Slot], sources: Iterable[memoryview]) -> None:
            if threading.current_thread() is not self._thread:
                return write(arena, slots, sources)
            given = list(sources)
            write(arena, slots[:1], given[:1])
            self._reached.set()
            assert self._go.wait(WAIT_S)
            if self.fault is not None:
                raise self.fault
            return write(arena, slots[1:], given[1:])

        patch.setattr(Arena, "write", halting)
        self._thread = threading.Thread(target=self._run, args=(ns, keys), name="kvferry-test")
        self._thread.start()
        assert self._reached.wait(WAIT_S)

    def _run(self, ns: Namespace, keys: Sequence[BlockKey]) -> None:
        try:
            self.stored = save_blocks(ns, keys)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def end(self, fault: BaseException | None = None) -> None:
        self.fault = fault
        self._go.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore(8 * N)
    yield store
    store.close()


def assert_empty(store: MemoryStore) -> None:
    stats = store.stats()
    assert (stats.entries, stats.used_nbytes, stats.pinned_nbytes, stats.leases) == (0, 0, 0, 0)
    assert [a.runs() for a in store.arena._allocators] == [[(0, a.pages)] for a in store.arena._allocators]


@pytest.mark.parametrize("fault", [MemoryError("short"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_in_the_middle_of_the_copy_leaves_nothing(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 4)
    save = PausedSave(ns, keys, monkeypatch)
    save.end(fault)
    assert save.error is fault
    assert ns.lookup(keys).prefix == 0
    assert_empty(store)
    assert save_blocks(ns, chain(ns, 2, 8)) == 8


def test_nobody_sees_half_a_save(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 4)
    save = PausedSave(ns, keys, monkeypatch)
    assert ns.lookup(keys).tiers == (None,) * 4
    assert len(ns.load(keys, deadline=deadline_in(20))) == 0
    assert ns.remove(keys) == 0
    assert ns.clear() == 0
    assert store.stats().pinned_nbytes == 4 * N
    save.end()
    assert (save.error, save.stored) == (None, 4)
    assert_whole(ns, keys)


def test_other_saves_evict_around_a_running_one(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 4)
    save = PausedSave(ns, keys, monkeypatch)
    for number in range(2, 8):
        assert save_blocks(ns, chain(ns, number, 3)) == 3
    others = store.for_session(Session("other")).namespace(SPEC)
    with pytest.raises(CapacityError, match=f"{4 * N} pinned"):
        save_blocks(others, chain(ns, 9, 5), seconds=0.01)
    save.end()
    assert save.stored == 4
    assert_whole(ns, keys)
    assert save_blocks(ns, chain(ns, 10, 8)) == 8


def test_who_waits_for_room_gets_that_of_a_failed_save(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns = store.namespace(SPEC)
    save = PausedSave(ns, chain(ns, 1, 4), monkeypatch)
    got: list[int] = []
    keys = chain(ns, 2, 8)
    waiter = threading.Thread(
        target=lambda: got.append(save_blocks(ns, keys, seconds=WAIT_S)), name="kvferry-test"
    )
    waiter.start()
    save.end(MemoryError("short"))
    waiter.join(WAIT_S)
    assert got == [8]
    assert_whole(ns, keys)


def test_the_faster_of_two_saves_of_a_key_wins(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 4)
    save = PausedSave(ns, keys, monkeypatch)
    assert save_blocks(ns, keys[:3]) == 3
    save.end()
    assert (save.error, save.stored) == (None, 1)
    assert store.stats().used_nbytes == 4 * N
    assert_whole(ns, keys)


def test_the_end_of_the_session_frees_slots_only_after_the_copy(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session without a process says with its end that its threads write no more; this one still does."""
    session = Session("short")
    ns, others = store.for_session(session).namespace(SPEC), store.namespace(SPEC)
    keys = chain(ns, 1, 4)
    save = PausedSave(ns, keys, monkeypatch)
    session.end()
    assert store.stats().pinned_nbytes == 4 * N
    kept = chain(ns, 2, 4)
    assert save_blocks(others, kept) == 4
    save.end()
    assert isinstance(save.error, LeaseExpiredError)
    assert others.lookup(keys).prefix == 0
    assert store.stats().used_nbytes == 4 * N
    assert_whole(others, kept)
    assert save_blocks(others, chain(ns, 3, 4)) == 4


@pytest.mark.parametrize("blocks", [1, 4], ids=["after the last block", "between blocks"])
def test_close_during_the_copy(store: MemoryStore, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    ns = store.namespace(SPEC)
    save = PausedSave(ns, chain(ns, 1, blocks), monkeypatch)
    store.close()
    save.end()
    assert save.error is not None
    assert "closed" in str(save.error)


def test_a_running_save_counts_against_the_write_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(8 * N, write_quota_nbytes=5 * N)
    ns = store.namespace(SPEC)
    save = PausedSave(ns, chain(ns, 1, 4), monkeypatch)
    with pytest.raises(CapacityError, match=f"has {4 * N} bytes"):
        ns.reserve(chain(ns, 2, 2), parent=None, deadline=deadline_in(0.01))
    other = store.for_session(Session("other")).namespace(SPEC)
    assert save_blocks(other, chain(other, 3, 2)) == 2
    lease = ns.reserve(chain(ns, 4, 1), parent=None, deadline=deadline_in(20))
    save.end()
    assert save.stored == 4
    lease.abort()
    assert save_blocks(ns, chain(ns, 5, 5)) == 5
    store.close()


def test_a_key_that_is_given_twice_is_stored_once(store: MemoryStore) -> None:
    ns = store.namespace(SPEC)
    first, second = chain(ns, 1, 2)
    blocks = [(key, block_bytes(key, N)) for key in (first, second)]
    assert ns.save([*blocks, (first, bytes(N))], parent=None, deadline=deadline_in(20)) == 2
    assert_whole(ns, [first, second])


def test_a_key_of_a_wrong_length_is_refused(store: MemoryStore) -> None:
    ns = store.namespace(SPEC)
    key, short = chain(ns, 1, 1)[0], BlockKey(bytes(KEY_NBYTES - 1))
    with pytest.raises(ConfigError, match=f"{KEY_NBYTES - 1} bytes"):
        save_blocks(ns, [key, short])
    with pytest.raises(ConfigError, match=f"{KEY_NBYTES - 1} bytes"):
        save_blocks(ns, [key], parent=short)
    assert_empty(store)


def test_a_block_larger_than_memory_is_named_as_that() -> None:
    store = MemoryStore(N // 2)
    ns = store.namespace(SPEC)
    with pytest.raises(
        CapacityError, match=rf"a block takes {N} bytes, memory has \d+ in all.*dram_capacity"
    ):
        save_blocks(ns, chain(ns, 1, 1))
    store.close()


# -- by what somebody else writes ------------------------------------------------------------------------


def filling(slots: dict[BlockKey, memoryview]) -> None:
    for key, view in slots.items():
        view[:] = block_bytes(key, N)


def test_somebody_else_writes_what_is_not_stored(store: MemoryStore) -> None:
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 4)
    save_blocks(ns, keys[:2])
    given: list[list[BlockKey]] = []

    def fill(slots: dict[BlockKey, memoryview]) -> None:
        given.append(list(slots))
        assert ns.lookup(keys).prefix == 2
        assert store.stats().pinned_nbytes == 2 * N
        filling(slots)

    for stored in (2, 0):  # the second time nothing is missing, and nobody is asked
        assert ns.save_by(keys, fill, parent=None, deadline=deadline_in(20)) == stored
    assert given == [keys[2:]]
    assert_whole(ns, keys)


def test_what_fails_while_somebody_else_writes_leaves_nothing(store: MemoryStore) -> None:
    session = Session("other")
    ns = store.for_session(session).namespace(SPEC)
    keys = chain(ns, 1, 4)

    def failing(slots: dict[BlockKey, memoryview]) -> None:
        filling(slots)
        raise TimeoutError

    def ending(slots: dict[BlockKey, memoryview]) -> None:
        filling(slots)
        session.end()

    with pytest.raises(TimeoutError):
        ns.save_by(keys, failing, parent=None, deadline=deadline_in(20))
    assert_empty(store)
    with pytest.raises(LeaseExpiredError, match="nothing of it is kept"):
        ns.save_by(keys, ending, parent=None, deadline=deadline_in(20))
    assert_empty(store)
    with pytest.raises(ConfigError):
        store.namespace(SPEC).save_by([BlockKey(b"short")], filling, parent=None, deadline=deadline_in(20))
