"""``TieredStore`` against a plain model: a set of keys, since the bytes of a key are known.

In calm weather (no fault is made) the store must agree with the model to the block: a key in ``must`` is
found, one in neither set is not. A block that a fault may have lost is in ``may`` until it is removed. The
far tier has no bound, so in calm weather nothing is ever lost, whatever memory and the near tier evict.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.core.blockstore import Namespace, ReadLease, WriteLease
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError
from kvferry.core.eviction import EvictionPolicy
from kvferry.core.keys import BlockKey
from kvferry.store import policies
from kvferry.store.breaker import Breaker
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.level import LevelOptions
from kvferry.store.tier import Tier
from kvferry.store.tiered import StoreOptions, TieredStore
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.testing.fake_tier import FakeTier, Fault
from kvferry.testing.faulty_files import Call, FaultyFiles

SMALL, OTHER, BIG = small_spec("model"), small_spec("model-other"), small_spec("model-big", pages=3)
PAGES = 9  # memory: four blocks, or three big ones
LONGEST = 3  # blocks of a chain: three big ones still fit
Name = tuple[int, BlockKey]
FAULTS = [
    *(("read", f) for f in (Fault.FAIL, Fault.CORRUPT, Fault.LOST, Fault.LATE, Fault.RAISE)),
    *(("write", f) for f in (Fault.FAIL, Fault.REFUSE, Fault.LATE, Fault.RAISE)),
    *(("contains", Fault.RAISE), ("remove", Fault.RAISE)),
]

spaces = st.sampled_from((0, 0, 1))
chains = st.integers(0, 4)
runs = st.tuples(st.integers(0, LONGEST - 1), st.integers(1, LONGEST)).map(
    lambda r: (r[0], min(LONGEST, r[0] + r[1]))
)
CALLS: list[Call] = ["open_read", "preadv", "create", "pwritev", "rename", "unlink"]
# what takes the whole directory away, where the near tier is a disk
AWAY = [("read", Fault.LOST), ("contains", Fault.RAISE), ("remove", Fault.RAISE)]


class StoreMachine(RuleBasedStateMachine):
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.near: Tier = self.make_near()
        self.far = FakeTier("far")
        self.must: set[Name] = set()
        self.may: set[Name] = set()
        self.undead: set[Name] = set()
        self.reads: list[ReadLease] = []
        self.writes: list[tuple[int, WriteLease]] = []
        self.pinned = False
        self.calm = True
        self.stormy = False
        self.mixed = False
        self.specs = (SMALL, OTHER)

    @initialize(
        stormy=st.booleans(),
        mixed=st.booleans(),
        eviction=st.sampled_from((policies.LRUPolicy, policies.S3FIFOPolicy)),
        near_write=st.sampled_from((policies.WriteThrough, policies.WriteBack, policies.OnEvict)),
        far_write=st.sampled_from((policies.WriteThrough, policies.WriteBack, policies.OnEvict)),
        admission=st.sampled_from((policies.AlwaysAdmit, policies.SecondHitAdmit)),
        promotion=st.sampled_from((policies.AlwaysPromote, policies.SecondHitPromote, policies.NeverPromote)),
    )
    def start(
        self,
        stormy: bool,
        mixed: bool,
        eviction: Callable[[int], EvictionPolicy],
        near_write: type[policies.WriteThrough | policies.WriteBack | policies.OnEvict],
        far_write: type[policies.WriteThrough | policies.WriteBack | policies.OnEvict],
        admission: type[policies.AlwaysAdmit | policies.SecondHitAdmit],
        promotion: type[policies.AlwaysPromote | policies.SecondHitPromote | policies.NeverPromote],
    ) -> None:
        self.make = lambda: TieredStore(
            PAGES * 4096,
            [
                (self.near, LevelOptions(write=near_write(), admission=admission(), promotion=promotion())),
                (self.far, LevelOptions(write=far_write(), promotion=promotion())),
            ],
            eviction=eviction,
            lease_s=3600,
            options=StoreOptions(prefetch_timeout_s=0.2),
        )
        self.mixed = mixed  # blocks of two sizes may find room only in pieces
        self.specs = (SMALL, BIG if mixed else OTHER)
        self.store = self.make()  # type: ignore[no-untyped-call]
        self.stormy = stormy

    # ---- the near tier -----------------------------------------------------------------------------

    def make_near(self) -> Tier:
        return FakeTier("near", 8 * 4096)

    def reopen_near(self) -> None:
        assert isinstance(self.near, FakeTier)
        self.near.reopen()

    def hurt_near(self, what: tuple[str, Fault], odd: bool) -> None:
        assert isinstance(self.near, FakeTier)
        hurt(self.near, what, odd)

    def heal_near(self) -> None:
        assert isinstance(self.near, FakeTier)
        heal(self.near)

    # ---- the model ---------------------------------------------------------------------------------

    def ns(self, space: int) -> Namespace:
        return self.store.namespace(self.specs[space])

    def keys(self, space: int, number: int, stop: int) -> list[BlockKey]:
        """Chains 0 and 1, and 2 and 3, share their first block."""
        size = self.specs[space].block_tokens
        return self.ns(space).keys(([number // 2] * size + [number] * (stop - 1) * size)[: stop * size])

    def forget(self, names: set[Name]) -> None:
        self.must -= names
        self.may -= names

    def blur(self) -> None:
        """After something that a fault may have spoiled: only what the far tier holds is sure."""
        if self.calm:
            return
        self.store.flush(deadline=deadline_in(0.05))
        known, held = self.must | self.may, self.far.held()
        sure = {name for name in known if name[1] in held}
        self.must, self.may = sure, known - sure

    @property
    def held(self) -> bool:
        return bool(self.reads or self.writes or self.pinned)

    # ---- rules ---------------------------------------------------------------------------------------

    @rule(space=spaces, number=chains, run=runs)
    def save(self, space: int, number: int, run: tuple[int, int]) -> None:
        keys = self.keys(space, number, run[1])
        parent = keys[run[0] - 1] if run[0] else None
        keys = keys[run[0] :]
        names = {(space, key) for key in keys}
        try:
            stored = save_blocks(
                self.ns(space), keys, parent=parent, seconds=0.02 if self.held or not self.calm else 20
            )
        except CapacityError:
            assert self.held or not self.calm or self.mixed
            self.blur()
            return
        if self.calm:
            assert len(names - self.must - self.may - self.undead) <= stored <= len(names - self.must)
        self.undead -= names
        self.must |= names - self.may if self.calm else set()
        self.may |= names - self.must
        self.blur()

    @rule(space=spaces, first=chains)
    def save_all(self, space: int, first: int) -> None:
        """Whole chains, one after another: more than memory holds."""
        for number in range(first, first + 4):
            self.save(space, number % 5, (0, LONGEST))

    @rule(space=spaces, first=chains)
    def load_all(self, space: int, first: int) -> None:
        """Every chain of a namespace."""
        for number in range(first, first + 5):
            self.load(space, number % 5, LONGEST, hold=False)

    @rule(space=spaces, number=chains, stop=st.integers(1, LONGEST))
    def lookup(self, space: int, number: int, stop: int) -> None:
        keys = self.keys(space, number, stop)
        for key, tier in zip(keys, self.ns(space).lookup(keys).tiers, strict=True):
            self.check_presence((space, key), tier is not None)

    def check_presence(self, name: Name, found: bool) -> None:
        if not found:
            assert not self.calm or name not in self.must, "lost"
        else:
            assert name in self.must | self.may, "came back"

    @rule(space=spaces, number=chains, stop=st.integers(1, LONGEST), hold=st.booleans())
    def load(self, space: int, number: int, stop: int, hold: bool) -> None:
        ns, keys = self.ns(space), self.keys(space, number, stop)
        prefix = ns.lookup(keys).prefix
        short = self.held or not self.calm
        lease = ns.load(keys, deadline=deadline_in(0.02 if short else 20))
        assert lease.keys == tuple(keys[: len(lease)])
        for key in lease.keys:
            self.check_presence((space, key), True)
        assert short or len(lease) == prefix or (self.mixed and len(lease) < prefix)
        self.check_bytes(lease)
        if hold and len(self.reads) < 2:
            self.reads.append(lease)
        else:
            lease.release()
        self.blur()

    @staticmethod
    def check_bytes(lease: ReadLease) -> None:
        for index, key in enumerate(lease.keys):
            view = lease.view(index)
            assert view == block_bytes(key, len(view))
        lease.check()

    @precondition(lambda self: self.reads)
    @rule()
    def release(self) -> None:
        lease = self.reads.pop(0)
        self.check_bytes(lease)
        lease.release()

    @precondition(lambda self: not self.writes)
    @rule(space=spaces, number=chains, stop=st.integers(1, 2))
    def reserve(self, space: int, number: int, stop: int) -> None:
        keys = self.keys(space, number, stop)
        try:
            lease = self.ns(space).reserve(keys, parent=None, deadline=deadline_in(0.02))
        except CapacityError:
            self.blur()
            return
        self.writes.append((space, lease))
        self.blur()

    @precondition(lambda self: self.writes)
    @rule(commit=st.booleans())
    def end_write(self, commit: bool) -> None:
        space, lease = self.writes.pop()
        if not commit:
            lease.abort()
            return
        for index, key in enumerate(lease.keys):
            view = lease.view(index)
            view[:] = block_bytes(key, len(view))
        lease.commit()
        names = {(space, key) for key in lease.keys}
        self.undead -= names
        self.must |= names - self.may if self.calm else set()
        self.may |= names - self.must
        self.blur()

    @rule(space=spaces, number=chains, run=runs)
    def remove(self, space: int, number: int, run: tuple[int, int]) -> None:
        keys = self.keys(space, number, run[1])[run[0] :]
        names = {(space, key) for key in keys}
        count = self.ns(space).remove(keys)
        if self.calm:
            assert len(names & self.must) <= count <= len(names & (self.must | self.may | self.undead))
        else:
            self.undead |= names
        self.forget(names)
        assert self.ns(space).lookup(keys).prefix == 0

    @rule(space=spaces)
    def clear(self, space: int) -> None:
        names = {name for name in self.must | self.may if name[0] == space}
        count = self.ns(space).clear()
        if self.calm:
            assert count >= len(names & self.must)
        else:
            self.undead |= names
        self.forget(names)

    @rule(space=spaces, number=chains)
    def prefetch(self, space: int, number: int) -> None:
        self.ns(space).prefetch(self.keys(space, number, LONGEST))
        if self.calm and not self.held:
            wait_until(lambda: self.store._prefetching == 0, 30)
            assert all(completion.kind == "prefetch" for completion in self.store.poll())

    @rule(space=spaces, number=chains)
    def pin(self, space: int, number: int) -> None:
        keys = self.keys(space, number, 1)
        if self.ns(space).pin(keys, ttl=600):
            self.pinned = True
        elif self.calm:
            assert (space, keys[0]) not in self.must

    @rule()
    def unpin(self) -> None:
        for space in range(2):
            for number in range(5):
                self.ns(space).unpin(self.keys(space, number, 1))
        wait_until(lambda: self.store._prefetching == 0, 90)
        for space in range(2):  # a prefetch may have pinned meanwhile
            for number in range(5):
                self.ns(space).unpin(self.keys(space, number, 1))
        self.pinned = False

    @precondition(lambda self: self.calm)
    @rule()
    def flush(self) -> None:
        self.store.flush(deadline=deadline_in(20))
        assert {key for _, key in self.must} <= self.far.held()

    @precondition(lambda self: self.stormy and self.calm)
    @rule(near=st.booleans(), what=st.sampled_from(FAULTS), odd=st.booleans(), space=spaces)
    def storm(self, near: bool, what: tuple[str, Fault], odd: bool, space: int) -> None:
        self.calm = False
        if near:
            self.hurt_near(what, odd)
        else:
            hurt(self.far, what, odd)
        verb, _ = what
        if verb == "read":
            self.load_all(space=space, first=0)
        else:
            self.save_all(space=space, first=0)

    @precondition(lambda self: not self.calm)
    @rule()
    def calm_down(self) -> None:
        self.heal_near()
        heal(self.far)
        wait_until(lambda: self.store._prefetching == 0, 90)
        wait_until(lambda: self.store.flush(deadline=deadline_in(10)) or not self.store._copying, 30)
        for level in self.store.levels:
            level.reads, level.writes = Breaker(level.name), Breaker(level.name)
        self.store.flush(deadline=deadline_in(10))
        self.blur()
        self.calm = True

    @precondition(lambda self: self.calm)
    @rule()
    def reopen(self) -> None:
        self.end_all()
        self.store.close()
        self.reopen_near()
        self.far.reopen()
        self.store = self.make()  # type: ignore[no-untyped-call]
        self.may |= self.undead  # a tier that could not remove them gives them to the next store
        self.undead = set()

    # ---- always --------------------------------------------------------------------------------------

    def end_all(self) -> None:
        for lease in self.reads:
            self.check_bytes(lease)
            lease.release()
        for _, write in self.writes:
            write.abort()
        self.reads, self.writes = [], []
        self.unpin()

    @invariant()
    def keeps_its_bounds(self) -> None:
        if not hasattr(self, "store"):
            return
        StoreMachine.steps += 1
        stats = self.store.stats()
        assert stats.used_nbytes <= stats.capacity_nbytes
        near = self.near.usage()
        assert near.used_nbytes <= near.capacity_nbytes
        for lease in self.reads:
            self.check_bytes(lease)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        if not self.calm:
            self.calm_down()
        self.end_all()
        for space in range(2):
            self.ns(space).clear()
            assert self.ns(space).lookup(self.keys(space, 0, LONGEST)).prefix == 0
        self.store.flush(deadline=deadline_in(20))
        stats = self.store.stats()
        assert (stats.pinned_nbytes, stats.used_nbytes, stats.leases) == (0, 0, 0)
        for allocator in self.store.arena._allocators:
            assert allocator.runs() == [(0, allocator.pages)]
        self.store.close()


def hurt(tier: FakeTier, what: tuple[str, Fault], odd: bool) -> None:
    verb, fault = what
    tier.late = threading.Event()
    tier.fault = lambda v, key: fault if v == verb and (odd or key[0] % 2) else None


def heal(tier: FakeTier) -> None:
    tier.fault = lambda _verb, _key: None
    tier.late.set()  # and left so: a write may just be about to return it


class DiskMachine(StoreMachine):
    """The same with real files near, whose system calls fail, and whose directory goes away for a while."""

    def __init__(self) -> None:
        self.folder = TemporaryDirectory()
        self.files = FaultyFiles()
        self.trouble = ExitStack()
        super().__init__()

    def make_near(self) -> Tier:
        options = DiskOptions((f"{self.folder.name}/disk",), 128 << 10, direct="off", retry_s=0.01)
        return DiskTier("near", options, files=self.files)

    def reopen_near(self) -> None:
        self.near = self.make_near()

    def hurt_near(self, what: tuple[str, Fault], odd: bool) -> None:
        if what in AWAY:
            Path(self.folder.name, "disk").rename(Path(self.folder.name, "away"))
            assert isinstance(self.near, DiskTier)
            for root in self.near._state.roots:
                assert self.near._state.check_vanished(root)
            return
        number = FAULTS.index(what)
        code = errno.ENOSPC if odd else errno.EIO
        self.trouble.enter_context(self.files.failing(CALLS[number % len(CALLS)], error=code))

    @precondition(lambda self: self.stormy and self.calm)
    @rule(space=spaces, number=chains, everything=st.booleans())
    def remove_while_it_is_away(self, space: int, number: int, everything: bool) -> None:
        self.save_all(space, number)
        self.flush()
        self.storm(near=True, what=AWAY[0], odd=True, space=space)
        if everything:
            self.clear(space)
        else:
            self.remove(space, number, (0, LONGEST))
        self.calm_down()
        self.lookup(space, number, LONGEST)

    def heal_near(self) -> None:
        self.trouble.close()  # a disk that was full finds out at its next write
        disk, away = Path(self.folder.name, "disk"), Path(self.folder.name, "away")
        if away.exists():
            away.rename(disk)

        def settled() -> bool:
            """It is up, and what could not be removed is gone."""
            files = [name for _, _, names in os.walk(disk) for name in names if name.endswith(".safetensors")]
            found = self.near.usage()
            return not any(name.endswith(": down") for name in found.status) and found.entries == len(files)

        wait_until(settled, 30)

    def teardown(self) -> None:
        super().teardown()
        self.near.close()
        self.folder.cleanup()


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def _run(machine: type[StoreMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=CHECKS,
            print_blob=True,
            database=None,
        ),
    )


# Not in make test for now: about one run in twelve ends in a difference that depends on timing and is not
# understood yet. It must be found, not tolerated, before the tiered store is called done.
@pytest.mark.soak
@pytest.mark.parametrize(("machine", "examples"), [(StoreMachine, 60), (DiskMachine, 20)])
def test_a_tiered_store_agrees_with_the_model(machine: type[StoreMachine], examples: int) -> None:
    _run(machine, examples, 30)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [StoreMachine, DiskMachine])
def test_a_tiered_store_agrees_with_the_model_for_long(machine: type[StoreMachine]) -> None:
    StoreMachine.steps = 0
    while StoreMachine.steps < 20_000:
        _run(machine, 200, 60)
