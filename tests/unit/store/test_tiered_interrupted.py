"""Calls that end by an exception: of a signal handler in the waiting thread, or of a tier."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.level import LevelOptions
from kvferry.store.policies import OnEvict, WriteBack
from kvferry.store.tier import BlockRead, BlockWrite, ReadResult, Tier, TierNamespace, WriteResult
from kvferry.store.tiered import StoreOptions, TieredStore
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.testing.disk_usage import stored_files
from kvferry.testing.fake_tier import FakeTier, Fault
from kvferry.testing.faulty_files import Call, FaultyFiles
from kvferry.testing.store_calls import chain, loaded, settle

SPEC = small_spec("tiered")
N = SPEC.block_nbytes
MakeStore = Callable[..., TieredStore]


@contextmanager
def interrupted(error: BaseException, when: threading.Event) -> Iterator[None]:
    """A signal handler raises ``error`` in this thread, once, after ``when``."""

    raised, over = threading.Event(), threading.Event()

    def handler(_number: int, _frame: FrameType | None) -> None:
        if not raised.is_set():
            raised.set()
            raise error

    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        when.wait(60)
        # again: one that comes right before the thread waits for a lock does not end that wait
        while not (raised.is_set() or over.is_set()):
            signal.pthread_kill(main, signal.SIGUSR1)
            raised.wait(0.05)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=interrupt, name="kvferry-test")
    thread.start()
    try:
        yield
    finally:
        over.set()
        when.set()
        thread.join(30)
        signal.signal(signal.SIGUSR1, before)


def quarantined(store: TieredStore) -> int:
    return store.stats().quarantined_nbytes


@pytest.mark.parametrize("error", [TimeoutError("request timed out"), KeyboardInterrupt()], ids=repr)
def test_a_slot_whose_read_was_left_by_an_exception_is_nobodys_until_the_read_is_over(
    make_store: MakeStore, tmp_path: Path, error: BaseException
) -> None:
    files = FaultyFiles()
    disk = DiskTier("disk", DiskOptions((str(tmp_path),), 8 << 20, direct="off"), files=files)
    store = make_store(4, (disk, LevelOptions(write=OnEvict())))
    ns = store.namespace(SPEC)
    for number in range(8):
        save_blocks(ns, chain(ns, number, 1), seconds=30)
    settle(store)
    new = [chain(ns, 100 + number, 1) for number in range(3)]
    with files.stalling("preadv") as begun:
        with pytest.raises(type(error)), interrupted(error, begun):
            ns.load(chain(ns, 0, 1), deadline=deadline_in(30))
        assert quarantined(store) == N
        assert store.stats().leases == 0
        for keys in new:
            save_blocks(ns, keys, seconds=30)
    wait_until(lambda: quarantined(store) == 0)
    for keys in new:
        assert loaded(ns, keys) == 1  # compares the bytes
    assert store.stats().pinned_nbytes == 0
    for number in range(8):  # all slots are in use again, and the disk has what belongs there
        assert loaded(ns, chain(ns, number, 1)) == 1
    for keys in new:
        assert loaded(ns, keys) == 1


class Hands(FakeTier):
    """Its read and write raise while a thread of it still has the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.raises = ""
        self.go_on = threading.Event()
        self.threads: list[threading.Thread] = []
        self.read: list[bytes] = []

    def _leave(self, work: Callable[[], None]) -> None:
        def later() -> None:
            assert self.go_on.wait(30)
            work()

        self.threads.append(threading.Thread(target=later, name="kvferry-test"))
        self.threads[-1].start()
        raise OSError("on purpose, too early")

    def read_into(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], *, deadline: float
    ) -> list[ReadResult]:
        if self.raises == "read":
            into = blocks[0].into
            self._leave(lambda: into.__setitem__(slice(None), bytes(len(into))))
        return super().read_into(namespace, blocks, deadline=deadline)

    def write(
        self, namespace: TierNamespace, blocks: Sequence[BlockWrite], *, deadline: float
    ) -> list[WriteResult]:
        if self.raises == "write":
            data = blocks[0].data
            self._leave(lambda: self.read.append(bytes(data)))
        return super().write(namespace, blocks, deadline=deadline)

    def end(self) -> None:
        self.go_on.set()
        for thread in self.threads:
            thread.join(30)
        self.threads.clear()


def test_a_tier_that_raises_with_its_hand_on_the_buffer_spoils_no_block(make_store: MakeStore) -> None:
    tier = Hands()
    store = make_store(2, tier)
    ns = store.namespace(SPEC)
    for number in range(4):
        save_blocks(ns, chain(ns, number, 1))
        settle(store)
    tier.raises = "read"
    assert loaded(ns, chain(ns, 0, 1)) == 0
    assert quarantined(store) == N
    keys = chain(ns, 10, 1)
    save_blocks(ns, keys)
    tier.raises = ""
    tier.end()
    wait_until(lambda: quarantined(store) == 0)
    assert loaded(ns, keys) == 1
    assert loaded(ns, chain(ns, 0, 1)) == 1


def test_a_source_stays_while_a_tier_whose_write_raised_may_read_it(make_store: MakeStore) -> None:
    tier = Hands()
    store = make_store(2, tier)
    ns = store.namespace(SPEC)
    tier.raises = "write"
    first = chain(ns, 1, 1)
    save_blocks(ns, first)
    wait_until(lambda: store.stats().per_tier["fake"]["write_failed"] == 1)
    tier.raises = ""
    ns.remove(first)
    for number in range(2, 6):
        save_blocks(ns, chain(ns, number, 1))
        settle_but_late(store)
    tier.end()
    assert tier.read == [block_bytes(first[0], N)]
    settle(store)
    assert store.stats().pinned_nbytes == 0


def settle_but_late(store: TieredStore) -> None:
    wait_until(lambda: store._down.queued_nbytes <= N)


def test_a_tier_that_raised_before_it_began_gives_the_slots_back(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(2, (tier, LevelOptions(errors=1000)))
    ns = store.namespace(SPEC)
    for number in range(4):
        save_blocks(ns, chain(ns, number, 1))
        settle(store)
    tier.fault = lambda verb, _key: Fault.RAISE if verb == "read" else None
    for _ in range(10):
        assert loaded(ns, chain(ns, 0, 1)) == 0
    assert quarantined(store) == 0


def test_a_save_that_is_interrupted_while_it_waits_for_a_queue_leaves_nothing_pinned(
    make_store: MakeStore,
) -> None:
    tier = FakeTier()
    tier.gate.clear()
    store = make_store(16, (tier, LevelOptions(queue_nbytes=N)))
    ns = store.namespace(SPEC)
    waits = threading.Event()
    wait = store._cond.wait

    def waiting(timeout: float | None = None) -> bool:
        waits.set()
        return wait(timeout)

    store._cond.wait = waiting  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), interrupted(KeyboardInterrupt(), waits):
        save_blocks(ns, chain(ns, 1, 8), seconds=30)
    tier.gate.set()
    settle(store)
    assert store.stats().pinned_nbytes == 0
    assert store.stats().per_tier["fake"]["write_dropped"] > 0
    assert loaded(ns, chain(ns, 1, 8)) == 8, "they were saved"


@pytest.mark.parametrize("deadline", [None, "soon", float("nan"), True])
def test_a_deadline_that_is_none_is_refused_and_changes_nothing(
    make_store: MakeStore, deadline: float
) -> None:
    tier = FakeTier()
    tier.gate.clear()
    store = make_store(4, (tier, LevelOptions(queue_nbytes=N)))
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 3)
    for call in (
        lambda: ns.save([(k, block_bytes(k, N)) for k in keys], parent=None, deadline=deadline),
        lambda: ns.reserve(keys, parent=None, deadline=deadline),
        lambda: ns.load(keys, deadline=deadline),
        lambda: store.flush(deadline=deadline),
    ):
        with pytest.raises(ConfigError, match="a deadline is"):
            call()
    assert store.stats().used_nbytes == 0
    assert not store.levels[0].reads.is_open


def test_an_infinite_deadline_is_one_far_away(make_store: MakeStore) -> None:
    store = make_store(1, FakeTier())
    ns = store.namespace(SPEC)
    for number in range(4):
        save_blocks(ns, chain(ns, number, 1), seconds=float("inf"))
    assert store.flush(deadline=float("inf"))
    assert loaded(ns, chain(ns, 0, 1), float("inf")) == 1


class Wrong(FakeTier):
    """Answers what nobody asked."""

    wrong = True

    def __init__(self, verb: str) -> None:
        super().__init__("wrong")
        self.verb = verb

    def contains(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        found = super().contains(namespace, keys, deadline=deadline)
        return found[1:] if self.verb == "contains" else found

    def remove(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        found = super().remove(namespace, keys, deadline=deadline)
        return [] if self.verb == "remove" else found

    def pin(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, until: float) -> list[bool]:
        found = super().pin(namespace, keys, until=until)
        return [*found, True] if self.verb == "pin" else found

    def usage(self):  # type: ignore[no-untyped-def]  # noqa: ANN201
        return None if self.verb == "usage" else super().usage()

    def read_into(self, namespace, blocks, *, deadline):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        if self.verb == "exit":
            raise SystemExit(1)
        found = super().read_into(namespace, blocks, deadline=deadline)
        return [None] * len(blocks) if self.verb == "read" else found

    def write(self, namespace, blocks, *, deadline):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        if self.verb == "exit":
            raise SystemExit(1)
        found = super().write(namespace, blocks, deadline=deadline)
        return [None] * len(blocks) if self.verb == "write" else found


@pytest.mark.parametrize("verb", ["contains", "remove", "pin", "usage", "read", "write"])
def test_answers_that_nobody_asked_for_fail_no_call(make_store: MakeStore, verb: str) -> None:
    store = make_store(8, (Wrong(verb), LevelOptions(write=WriteBack(), pause_s=60)))
    ns = store.namespace(SPEC)
    for number in range(20):
        assert save_blocks(ns, chain(ns, number, 4), seconds=30) == 4
        store.flush(deadline=deadline_in(20))
        assert loaded(ns, chain(ns, number, 4)) == 4
    assert 0 <= loaded(ns, chain(ns, 0, 4)) <= 4
    ns.lookup([*chain(ns, 0, 4), *chain(ns, 30, 2)])
    ns.pin(chain(ns, 5, 4), ttl=0.001)
    ns.remove(chain(ns, 19, 4))
    ns.clear()
    assert ns.lookup([k for n in range(20) for k in chain(ns, n, 4)]).prefix == 0
    assert store.stats().pinned_nbytes == 0
    assert store.stats().per_tier["wrong"]["faults"] > 0 or verb == "usage"


def test_a_tier_that_exits_ends_no_thread_of_the_store(make_store: MakeStore) -> None:
    tier = Wrong("exit")
    store = make_store(8, (tier, LevelOptions(write=WriteBack(), pause_s=0.01)))
    ns = store.namespace(SPEC)
    for number in range(20):
        assert save_blocks(ns, chain(ns, number, 4), seconds=30) == 4
        settle(store)
    figures = store.stats().per_tier["wrong"]
    assert figures["healthy"] == 0
    assert figures["lost_blocks"] == 80
    assert store.stats().pinned_nbytes == 0
    tier.verb = ""

    def works() -> bool:
        save_blocks(ns, chain(ns, 50, 1), seconds=30)
        settle(store)
        ns.remove(chain(ns, 50, 1))
        return store.stats().per_tier["wrong"]["write_stored"] > 0

    wait_until(works)


def test_a_writer_whose_own_work_fails_goes_on(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(8, FakeTier())
    ns = store.namespace(SPEC)

    def write(*_args: object) -> list[WriteResult]:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(store.levels[0], "write", write)
    save_blocks(ns, chain(ns, 1, 2))
    assert not settle(store), "lost"
    assert store.stats().pinned_nbytes == 0
    monkeypatch.undo()
    save_blocks(ns, chain(ns, 2, 2))
    assert settle(store)
    assert store.stats().per_tier["fake"]["entries"] == 2
    assert [r.levelname for r in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("call", ["pwritev", "create", "rename"])
@pytest.mark.parametrize("everything", [False, True])
def test_removed_twice_during_a_late_write_is_removed(
    make_store: MakeStore, tmp_path: Path, call: Call, everything: bool
) -> None:
    files = FaultyFiles()
    disk = DiskTier("disk", DiskOptions((str(tmp_path),), 8 << 20), files=files)
    store = make_store(8, (disk, LevelOptions(write_timeout_s=0.2)))
    ns = store.namespace(SPEC)
    save_blocks(ns, chain(ns, 9, 1))  # folders are there
    settle(store)
    keys = chain(ns, 1, 1)

    def forget() -> None:
        assert (ns.clear() if everything else ns.remove(keys)) >= 1

    def failed() -> float:
        return store.stats().per_tier["disk"]["write_failed"]

    with files.stalling(call) as begun:
        save_blocks(ns, keys)
        assert begun.wait(30)
        wait_until(lambda: failed() == 1)
        forget()
        save_blocks(ns, keys)
        wait_until(lambda: failed() == 2)
        forget()
        assert ns.lookup(keys).tiers == (None,)
    store.flush(deadline=deadline_in(20))
    assert ns.lookup(keys).tiers == (None,)
    space = store._space(store._namespace(store.session, ns.spec, ns.scope))
    assert disk.contains(space, keys, deadline=deadline_in(20)) == [False]
    assert loaded(ns, keys) == 0


class Slow(FakeTier):
    def contains(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        self.until = deadline
        threading.Event().wait(max(0.0, deadline_left(deadline)))
        return super().contains(namespace, keys, deadline=deadline)


def deadline_left(deadline: float) -> float:
    return deadline - deadline_in(0)


def test_tiers_that_take_their_time_to_answer_a_lookup_have_the_callers(make_store: MakeStore) -> None:
    tiers: list[Tier | tuple[Tier, LevelOptions]] = [
        (Slow(name), LevelOptions(lookup_timeout_s=seconds)) for name, seconds in (("a", 0.2), ("b", 60.0))
    ]
    store = make_store(8, *tiers)
    ns = store.namespace(SPEC)
    for call in (
        lambda until: ns.load(chain(ns, 1, 2), deadline=until),
        lambda until: ns.save([(k, block_bytes(k, N)) for k in chain(ns, 2, 2)], parent=None, deadline=until),
        lambda until: ns.reserve(chain(ns, 3, 2), parent=None, deadline=until).abort(),
    ):
        until = deadline_in(0.05)
        call(until)
        for level in store.levels:
            assert isinstance(level.tier, Slow)
            assert level.tier.until <= until


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_close_over_a_device_that_hangs_is_bounded(make_store: MakeStore, tmp_path: Path, call: Call) -> None:
    files = FaultyFiles()
    disk = DiskTier("disk", DiskOptions((str(tmp_path),), 8 << 20, direct="off"), files=files)
    store = make_store(2, disk, close_s=0.2)
    ns = store.namespace(SPEC)
    for number in range(6):
        save_blocks(ns, chain(ns, number, 1))
        settle(store)
    with files.stalling(call) as begun:
        if call == "preadv":
            ns.prefetch(chain(ns, 0, 1))
        else:
            save_blocks(ns, chain(ns, 9, 1))
        assert begun.wait(30)
        started = deadline_in(0)
        store.close()
        assert deadline_in(0) - started < 20, "the read and the write have half a minute"


class SlowToRemove(FakeTier):
    """Takes all the time that it is given, and keeps what it cannot remove by then."""

    slow = False

    def remove(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        if self.slow and not self.gate.wait(max(0.0, deadline_left(deadline))):
            raise OSError("not by the deadline")
        return super().remove(namespace, keys, deadline=deadline)


@pytest.mark.parametrize("everything", [False, True])
def test_a_removal_has_one_bound_and_goes_on_in_the_background(everything: bool) -> None:
    near, far = SlowToRemove("near"), FakeTier("far")
    store = TieredStore(8 * N, [near, far], options=StoreOptions(remove_s=0.1))
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 4)
    save_blocks(ns, keys)
    assert settle(store)
    near.slow = True
    near.gate.clear()
    started = deadline_in(0)
    _ = ns.clear() if everything else ns.remove(keys)
    assert deadline_in(0) - started < 25
    assert ns.lookup(keys).tiers == (None,) * 4
    near.gate.set()
    store.flush(deadline=deadline_in(20))
    assert not far.held(), "removed in the background"
    assert ns.lookup(keys).tiers == (None,) * 4
    assert save_blocks(ns, keys) == 4
    assert settle(store)
    assert far.held() == set(keys)
    assert not store.levels[1].hidden._masked
    store.close()


def test_a_removal_that_is_cut_short_leaves_keys_that_can_be_saved_again(
    make_store: MakeStore, tmp_path: Path
) -> None:
    files = FaultyFiles()
    options = DiskOptions((str(tmp_path),), 8 << 20, direct="off", read_threads=1, retry_s=0.05)
    disk = DiskTier("disk", options, files=files)
    store = make_store(8, (disk, LevelOptions()))
    ns = store.namespace(SPEC)
    keys = chain(ns, 0, 4)
    save_blocks(ns, keys, seconds=30)
    settle(store)
    error = TimeoutError("request timed out")
    with files.stalling("unlink") as begun, pytest.raises(TimeoutError), interrupted(error, begun):
        ns.remove(keys)  # the first waits, the others are not begun
    wait_until(lambda: not stored_files(tmp_path))
    assert not any(ns.lookup(keys).tiers)
    assert save_blocks(ns, keys, seconds=30) == len(keys)
    settle(store)
    assert disk.usage().entries == len(keys)
    assert disk.usage().healthy
