"""``TieredStore`` against a plain model: a set of keys, since the bytes of a key are known.

In calm weather (no fault is made) the store must agree with the model to the block: a key in ``must`` is
found, one in neither set is not. A block that a fault may have lost is in ``may`` until it is removed. The
far tier has no bound, so in calm weather nothing is ever lost, whatever memory and the near tier evict.

Which rules may run depends on the rules before alone, never on time: breakers have a clock that the rules
move, a storm begins when nothing is under way, and rules without anything to do do nothing. Writers and
prefetches run meanwhile all the same, and what they make of a storm the model finds out when it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import ClassVar

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
from kvferry.store.level import LevelOptions
from kvferry.store.tiered import StoreOptions, TieredStore
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.testing.fake_tier import Fault
from kvferry.testing.weather import FAULTS, DiskWeather, FakeWeather, Weather

SMALL, OTHER, BIG = small_spec("model"), small_spec("model-other"), small_spec("model-big", pages=3)
PAGES = 9  # memory: four blocks, or three big ones
LONGEST = 3  # blocks of a chain saved in one call: three big ones still fit
LONG = 7  # blocks of a chain saved in several calls: more than memory holds
Name = tuple[int, BlockKey]
spaces = st.sampled_from((0, 0, 1))
chains = st.integers(0, 4)
runs = st.tuples(st.integers(0, LONGEST - 1), st.integers(1, LONGEST)).map(
    lambda r: (r[0], min(LONGEST, r[0] + r[1]))
)
stops = st.one_of(st.integers(1, LONGEST), st.just(LONG))


class StoreMachine(RuleBasedStateMachine):
    steps = 0
    failed: ClassVar[list[BaseException]] = []  # of teardowns

    def __init__(self) -> None:
        super().__init__()
        self.near = self.make_near()
        self.far = FakeWeather("far")
        self.must: set[Name] = set()
        self.may: set[Name] = set()
        self.undead: set[Name] = set()
        self.reads: list[ReadLease] = []
        self.writes: list[tuple[int, WriteLease]] = []
        self.pinned = False
        self.calm = True
        self.stormy = False
        self.mixed = False
        self.now = 0.0
        self.specs = (SMALL, OTHER)

    def make_near(self) -> Weather:
        return FakeWeather("near", 8 * 4096)

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
        def make() -> TieredStore:
            near = LevelOptions(write=near_write(), admission=admission(), promotion=promotion())
            far = LevelOptions(write=far_write(), promotion=promotion())
            return TieredStore(
                PAGES * 4096,
                [(self.near.tier, near), (self.far.tier, far)],
                eviction=eviction,
                lease_s=3600,
                options=StoreOptions(prefetch_timeout_s=0.2, room_wait_s=20),
            )

        self.make = make
        self.mixed = mixed  # blocks of two sizes may find room only in pieces
        self.specs = (SMALL, BIG if mixed else OTHER)
        self.open()
        self.stormy = stormy

    def open(self) -> None:
        self.store = self.make()
        self.close_breakers()

    def close_breakers(self) -> None:
        for level in self.store.levels:
            level.reads, level.writes = (
                Breaker(level.name, work=work, clock=lambda: self.now) for work in ("reads", "writes")
            )

    def settle(self) -> bool:
        """Wait until nothing is under way; whether nothing was lost on its way down."""
        wait_until(lambda: self.store._prefetching == 0, 90)
        return self.store.flush(deadline=deadline_in(20))

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
        known, held = self.must | self.may, self.far.tier.held()
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
        self.save_run(space, keys[run[0] :], parent)

    def save_run(self, space: int, keys: list[BlockKey], parent: BlockKey | None) -> None:
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

    @rule(space=spaces, number=chains, batch=st.integers(1, LONGEST))
    def save_long(self, space: int, number: int, batch: int) -> None:
        """A chain longer than memory, batch by batch."""
        keys = self.keys(space, number, LONG)
        for start in range(0, LONG, batch):
            self.save_run(space, keys[start : start + batch], keys[start - 1] if start else None)

    @rule(space=spaces, first=chains)
    def load_all(self, space: int, first: int) -> None:
        """Every chain of a namespace."""
        for number in range(first, first + 5):
            self.load(space, number % 5, LONGEST, hold=False)

    @rule(space=spaces, number=chains, stop=stops)
    def lookup(self, space: int, number: int, stop: int) -> None:
        keys = self.keys(space, number, stop)
        for key, tier in zip(keys, self.ns(space).lookup(keys).tiers, strict=True):
            self.check_presence((space, key), tier is not None)

    def check_presence(self, name: Name, found: bool) -> None:
        if not found:
            assert not self.calm or name not in self.must, "lost"
        else:
            assert name in self.must | self.may, "came back"

    @rule(space=spaces, number=chains, stop=stops, hold=st.booleans())
    def load(self, space: int, number: int, stop: int, hold: bool) -> None:
        ns, keys = self.ns(space), self.keys(space, number, stop)
        short = self.held or not self.calm
        if not short:  # what a prefetch holds leaves less room
            wait_until(lambda: self.store._prefetching == 0, 90)
        prefix = ns.lookup(keys).prefix
        lease = ns.load(keys, deadline=deadline_in(0.02 if short else 20))
        assert lease.keys == tuple(keys[: len(lease)])
        for key in lease.keys:
            self.check_presence((space, key), True)
        room = self.store.arena.capacity_nbytes // ns.spec.block_nbytes
        sure = sum(1 for _ in takewhile(lambda key: (space, key) in self.must, keys))
        assert short or self.mixed or len(lease) >= min(sure, room), "shorter than it must be"
        assert short or len(lease) <= min(prefix, room)
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

    @rule()
    def release(self) -> None:
        if not self.reads:
            return
        lease = self.reads.pop(0)
        self.check_bytes(lease)
        lease.release()

    @rule(space=spaces, number=chains, stop=st.integers(1, 2))
    def reserve(self, space: int, number: int, stop: int) -> None:
        if self.writes:
            return
        keys = self.keys(space, number, stop)
        try:
            lease = self.ns(space).reserve(keys, parent=None, deadline=deadline_in(0.02))
        except CapacityError:
            self.blur()
            return
        self.writes.append((space, lease))
        self.blur()

    @rule(commit=st.booleans())
    def end_write(self, commit: bool) -> None:
        if not self.writes:
            return
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

    @precondition(lambda self: self.calm)
    @rule(space=spaces, number=chains, during=st.sampled_from(("read", "remove")), everything=st.booleans())
    def load_and_remove_at_once(self, space: int, number: int, during: str, everything: bool) -> None:
        """Blocks are removed while they are read, or asked for while they are removed."""
        self.save(space, number, (0, LONGEST))
        self.save_long(1 - space, number, 2)  # out of memory with them
        self.settle()
        ns, keys = self.ns(space), self.keys(space, number, LONGEST)

        def load() -> None:
            ns.load(keys, deadline=deadline_in(0.02)).release()

        def remove() -> None:
            ns.clear() if everything else ns.remove(keys)

        outer, inner = (load, remove) if during == "read" else (remove, load)
        inner_is_done = [self.near.meanwhile(during, inner), self.far.meanwhile(during, inner)]
        outer()
        self.near.heal()
        self.far.heal()
        if during == "read" and not any(event.is_set() for event in inner_is_done):
            remove()
        assert ns.lookup(keys).tiers == (None,) * LONGEST, "came back"
        self.forget({n for n in self.must | self.may if n[0] == space and (everything or n[1] in keys)})

    @rule(space=spaces, number=chains, wait=st.booleans())
    def prefetch(self, space: int, number: int, wait: bool) -> None:
        self.ns(space).prefetch(self.keys(space, number, LONGEST))
        if wait and self.calm and not self.held:
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
        assert {key for _, key in self.must} <= self.far.tier.held()

    @precondition(lambda self: self.stormy and self.calm)
    @rule(near=st.booleans(), what=st.sampled_from(FAULTS), every=st.booleans(), space=spaces)
    def storm(self, near: bool, what: tuple[str, Fault], every: bool, space: int) -> None:
        self.settle()  # else a removal from before might fail now
        self.calm = False
        (self.near if near else self.far).hurt(what, every=every)
        verb, _ = what
        if verb == "read":
            self.load_all(space=space, first=0)
        else:
            self.save_all(space=space, first=0)

    @precondition(lambda self: not self.calm)
    @rule(seconds=st.sampled_from((1.0, 60.0)))
    def time_passes(self, seconds: float) -> None:
        """Breakers let somebody try."""
        self.now += seconds

    @precondition(lambda self: not self.calm)
    @rule()
    def calm_down(self) -> None:
        self.near.heal()
        self.far.heal()
        self.settle()
        self.close_breakers()
        self.settle()  # what was not written at an open breaker
        self.blur()
        self.calm = True

    @precondition(lambda self: self.calm)
    @rule()
    def reopen(self) -> None:
        self.end_all()
        self.store.close()
        self.near.reopen()
        self.far.reopen()
        self.open()
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
        near = self.near.tier.usage()
        assert near.used_nbytes <= near.capacity_nbytes
        for lease in self.reads:
            self.check_bytes(lease)

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self.finish()
        except BaseException as error:
            StoreMachine.failed.append(error)
            raise
        finally:
            self.near.close()

    def finish(self) -> None:
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


class DiskMachine(StoreMachine):
    """The same with real files near."""

    def make_near(self) -> Weather:
        return DiskWeather("near", 128 << 10)

    @precondition(lambda self: self.stormy and self.calm)
    @rule(space=spaces, number=chains, everything=st.booleans())
    def remove_while_it_is_away(self, space: int, number: int, everything: bool) -> None:
        self.save_all(space, number)
        self.flush()
        self.storm(near=True, what=("read", Fault.LOST), every=True, space=space)
        if everything:
            self.clear(space)
        else:
            self.remove(space, number, (0, LONGEST))
        self.calm_down()
        self.lookup(space, number, LONGEST)


class EncodedMachine(DiskMachine):
    """The same with a codec, so that files have other sizes and go another way."""

    def make_near(self) -> Weather:
        return DiskWeather("near", 128 << 10, "zstd")


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def _run(machine: type[StoreMachine], examples: int, steps: int, *, derandomize: bool) -> None:
    StoreMachine.failed.clear()
    options = settings(max_examples=examples, stateful_step_count=steps, derandomize=derandomize)
    run_state_machine_as_test(machine, settings=settings(options, suppress_health_check=CHECKS))
    if StoreMachine.failed:  # Hypothesis drops what a teardown raises after an example that was too long
        raise StoreMachine.failed[0]


@pytest.mark.parametrize(
    ("machine", "examples"), [(StoreMachine, 60), (DiskMachine, 20), (EncodedMachine, 15)]
)
def test_a_tiered_store_agrees_with_the_model(machine: type[StoreMachine], examples: int) -> None:
    _run(machine, examples, 30, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [StoreMachine, DiskMachine, EncodedMachine])
def test_a_tiered_store_agrees_with_the_model_for_long(machine: type[StoreMachine]) -> None:
    StoreMachine.steps = 0
    while StoreMachine.steps < 20_000:
        _run(machine, 200, 60, derandomize=False)
