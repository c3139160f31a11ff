"""What is saved while its keys are being removed is not lost by the removal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvferry.core.keys import BlockKey
from kvferry.core.memory import DRAM
from kvferry.store.level import LevelOptions
from kvferry.store.options import StoreOptions
from kvferry.store.policies import OnEvict, WriteBack, WriteThrough
from kvferry.store.tier import TierEntry
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.fake_tier import FakeTier
from kvferry.testing.store_calls import chain, loaded, settle

SPEC = small_spec("removed")
N = SPEC.block_nbytes
BLOCKS = 4
Policy = type[WriteThrough | WriteBack | OnEvict]


class SlowRemovals(FakeTier):
    """Removals wait for ``let_go``, once they have said so; ``on_scan`` is called before a scan."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let_go = threading.Event(), threading.Event()
        self.on_scan: Callable[[], object] = lambda: None
        self.fault = self._wait

    def _wait(self, verb: str, _key: BlockKey) -> None:
        if verb == "remove":
            self.asked.set()
            assert self.let_go.wait(20)

    def scan(self) -> Iterator[TierEntry]:
        self.on_scan()
        return super().scan()


def make(tier: FakeTier, policy: Policy, *, remove_s: float = 20.0) -> TieredStore:
    options = StoreOptions(remove_s=remove_s)
    return TieredStore(2 * BLOCKS * N, [(tier, LevelOptions(write=policy()))], options=options)


def evict_all(store: TieredStore) -> None:
    store.evict(2 * BLOCKS * N)
    assert store.stats().entries == 0


@pytest.mark.parametrize("policy", [WriteThrough, WriteBack, OnEvict])
def test_what_was_written_meanwhile_is_written_again(policy: Policy) -> None:
    tier = SlowRemovals()
    store = make(tier, policy)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, BLOCKS)
    save_blocks(ns, keys)
    assert settle(store)
    thread = threading.Thread(target=ns.remove, args=(keys,), name="test-remove")
    thread.start()
    assert tier.asked.wait(20)
    assert save_blocks(ns, keys) == BLOCKS
    assert settle(store), "the copies are made, and go with the removal"
    tier.let_go.set()
    thread.join(20)
    assert ns.lookup(keys).tiers == (DRAM,) * BLOCKS
    assert settle(store)
    evict_all(store)
    assert loaded(ns, keys) == BLOCKS
    store.close()


@pytest.mark.parametrize("policy", [WriteBack, OnEvict])
def test_what_is_being_written_meanwhile_is_written_again(policy: Policy) -> None:
    tier = SlowRemovals()
    tier.let_go.set()
    store = make(tier, policy)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, BLOCKS)
    written, go_on, wanted = list[BlockKey](), threading.Event(), threading.Event()

    def on_write(key: BlockKey) -> None:
        written.append(key)
        if len(written) == BLOCKS:  # the others of the batch are in the tier, and nobody has been told
            wanted.set()
            assert go_on.wait(20)

    tier.on_write = on_write

    def save_from_within() -> None:
        tier.on_scan = lambda: None
        save_blocks(ns, keys)
        if policy is OnEvict:
            store.evict(2 * BLOCKS * N)
        assert wanted.wait(20)

    tier.on_scan = save_from_within
    ns.clear()  # forgets memory, then asks the tier what it has
    go_on.set()
    assert settle(store)
    evict_all(store)
    assert loaded(ns, keys) == BLOCKS
    assert store.stats().pinned_nbytes == 0
    store.close()


def test_what_is_hidden_already_is_counted_by_no_later_removal() -> None:
    """It is in the tier until its removal comes to it: a second one found it there, and counted it again."""
    tier = SlowRemovals()
    tier.let_go.set()
    store = make(tier, WriteBack, remove_s=0)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, BLOCKS)
    save_blocks(ns, keys)
    assert settle(store)
    tier.let_go.clear()
    assert ns.remove(keys[:3]) == 3, "left to the writer"
    assert tier.asked.wait(20)
    tier.fault = lambda _verb, _key: None  # the second goes through while the writer is in the first
    store.options = StoreOptions(remove_s=20)
    assert ns.clear() == 1
    tier.let_go.set()
    assert settle(store)
    assert (ns.clear(), tier.held()) == (0, set())
    store.close()


def test_a_removal_left_to_the_writer_takes_no_later_save_with_it() -> None:
    tier = SlowRemovals()
    tier.let_go.set()
    store = make(tier, WriteBack, remove_s=0)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, BLOCKS)

    def save_from_within() -> None:
        tier.on_scan = lambda: None
        save_blocks(ns, keys)
        assert settle(store)

    tier.on_scan = save_from_within
    ns.clear()
    assert settle(store)
    assert tier.calls["remove"] == 1
    evict_all(store)
    assert loaded(ns, keys) == BLOCKS
    store.close()
