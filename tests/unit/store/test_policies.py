from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvferry.core.chains import Block, ChainIndex
from kvferry.core.errors import UnknownPluginError
from kvferry.core.eviction import Entry, EvictionPolicy, LRUPolicy
from kvferry.core.keys import BlockKey
from kvferry.core.segments import Slot
from kvferry.store import policies
from kvferry.store.policies import (
    AlwaysAdmit,
    NeverPromote,
    S3FIFOPolicy,
    SecondHitAdmit,
    SecondHitPromote,
)

NS = b"n" * 32
NBYTES = 4096


class Cache:
    """A cache of so many blocks that asks its policy what goes; blocks are named by one letter."""

    def __init__(self, blocks: int, policy: Callable[[int], EvictionPolicy]) -> None:
        self.blocks = blocks
        self.policy = policy(blocks * NBYTES)
        self.index: ChainIndex[Block] = ChainIndex(NS, NBYTES)

    def _key(self, name: str) -> BlockKey:
        return BlockKey(name.encode() * 32)

    def evict(self, pinned: str = "") -> str:
        keys = {self._key(p) for p in pinned}
        steps = self.policy.victims(NBYTES, lambda e: e.key in keys)
        found = ""
        for entry in steps:
            self.remove(entry)
            found += chr(entry.key[0])
        return found

    def remove(self, entry: Entry) -> None:
        tail = self.index.discard(self.index.entries[entry.key])
        self.policy.removed(entry)
        if tail is not None:
            self.policy.released(tail)

    def get(self, name: str, parent: str = "") -> str:
        """One request; returns what had to go for it."""
        found = self.index.entries.get(self._key(name))
        if found is not None:
            self.policy.accessed([found])
            return ""
        gone = self.evict() if len(self.index.entries) >= self.blocks else ""
        above = self._key(parent) if parent else None
        block = Block(self.index, self._key(name), above, Slot(0, 0, NBYTES, 0))
        self.index.add(block)
        self.policy.inserted(block)
        return gone

    @property
    def held(self) -> str:
        return "".join(sorted(chr(k[0]) for k in self.index.entries))


def test_s3fifo_follows_the_trace_worked_out_by_hand() -> None:
    # 10 blocks: the small queue has one. The oldest is left in "small …", the newest right.
    cache = Cache(10, S3FIFOPolicy)
    for name in "abcdefghij":  # small a..j
        assert cache.get(name) == ""
    for name in "aab":  # a used twice, b once
        cache.get(name)
    assert cache.get("k") == "b", "a moves to main (used twice), b goes: small c..jk, main a, ghost b"
    assert cache.get("l") == "c", "small d..jkl, ghosts bc"
    assert cache.get("b") == "d", "b is a ghost: main ab, small e..jkl, ghosts bcd"
    for name in "mnopqrs":  # each evicts the oldest of small: e f g h i j k
        cache.get(name)
    assert cache.held == "ablmnopqrs"
    for name in "ll":
        cache.get(name)
    assert cache.get("t") == "m", "l moves to main: abl; small n..t"
    assert cache.get("d") == "n", "d is a ghost: main abld, small o..t"
    for name, gone in zip("efghij", "opqrst", strict=True):  # ghosts too: main abldefghij
        assert cache.get(name) == gone
    assert cache.held == "abdefghijl", "small is empty"
    cache.get("a")
    assert cache.get("u") == "b", "main: a was used and goes round, b is the next; small u"
    assert cache.get("v") == "u", "small has its tenth: u goes from there"
    assert cache.get("w") == "v"
    assert cache.held == "adefghijlw"


def test_s3fifo_outlives_a_scan() -> None:
    scanned, lru = Cache(20, S3FIFOPolicy), Cache(20, LRUPolicy)
    hot, scan = "abcdefgh", [chr(n) for n in range(0x30, 0x60)]
    for cache in (scanned, lru):
        for _ in range(4):
            for name in hot:
                cache.get(name)
        for name in scan:
            cache.get(name)
    assert set(hot) <= set(scanned.held)
    assert not set(hot) & set(lru.held)


@pytest.mark.parametrize("policy", [LRUPolicy, S3FIFOPolicy])
def test_chains_shrink_from_their_end(policy: Callable[[int], EvictionPolicy]) -> None:
    cache = Cache(6, policy)
    for name, parent in zip("abcxyz", ["", "a", "b", "", "x", "y"], strict=True):
        cache.get(name, parent)
    gone = "".join(cache.evict() for _ in range(6))
    assert sorted(gone) == list("abcxyz")
    for chain in ("cba", "zyx"):
        assert [n for n in gone if n in chain] == list(chain)


@pytest.mark.parametrize("policy", [LRUPolicy, S3FIFOPolicy])
def test_pinned_tails_leave_inner_blocks(policy: Callable[[int], EvictionPolicy]) -> None:
    cache = Cache(4, policy)
    for name, parent in zip("abcd", ["", "a", "b", "c"], strict=True):
        cache.get(name, parent)
    assert cache.evict(pinned="d") == "c"
    assert cache.evict(pinned="d") == "b"
    cache.policy.released(cache.index.entries[BlockKey(b"d" * 32)])
    assert cache.evict() == "d"
    assert cache.evict() == "a"
    assert cache.evict() == ""


@pytest.mark.parametrize("policy", [LRUPolicy, S3FIFOPolicy])
def test_evictions_are_lazy_and_stop_at_what_was_asked(policy: Callable[[int], EvictionPolicy]) -> None:
    cache = Cache(8, policy)
    for name in "abcdefgh":
        cache.get(name)
    steps: Iterator[Entry] = cache.policy.victims(3 * NBYTES, lambda _: False)
    cache.remove(next(steps))
    assert len(cache.held) == 7
    for entry in steps:
        cache.remove(entry)
    assert len(cache.held) == 5


def test_second_hit_admits_and_promotes_the_second_time() -> None:
    for ask in (SecondHitAdmit().admit, SecondHitPromote().promote):
        assert [ask(NS, BlockKey(k * 32)) for k in (b"a", b"b", b"a", b"a")] == [False, False, True, True]
        assert not ask(b"m" * 32, BlockKey(b"a" * 32)), "another namespace, another block"
    assert AlwaysAdmit().admit(NS, BlockKey(b"a" * 32))
    assert not NeverPromote().promote(NS, BlockKey(b"a" * 32))


def test_what_second_hit_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_SEEN_KEYS", 8)
    policy = SecondHitAdmit()
    for n in range(100):
        assert not policy.admit(NS, BlockKey(bytes([n]) * 32))
    assert policy.admit(NS, BlockKey(bytes([99]) * 32))
    assert not policy.admit(NS, BlockKey(bytes([0]) * 32))
    assert len(policy._seen._new) + len(policy._seen._old) <= 8


def test_policies_are_plug_ins() -> None:
    assert policies.eviction_policy("s3fifo") is S3FIFOPolicy
    assert policies.eviction_policy("lru") is LRUPolicy
    assert isinstance(policies.admission_policy("second_hit"), SecondHitAdmit)
    assert isinstance(policies.promotion_policy("second_hit"), SecondHitPromote)
    modes = {n: policies.write_policy(n) for n in ("write_through", "write_back", "on_evict")}
    assert {n: (p.when, p.full) for n, p in modes.items()} == {
        "write_through": ("commit", "wait"),
        "write_back": ("commit", "drop"),
        "on_evict": ("evict", "wait"),
    }
    with pytest.raises(UnknownPluginError, match="did you mean lru"):
        policies.eviction_policy("lru2")
