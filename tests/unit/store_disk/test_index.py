from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import deque

from kvferry.core.clock import deadline_in
from kvferry.core.eviction import LRUPolicy
from kvferry.core.keys import BlockKey
from kvferry.store.disk.entries import DiskEntry, NamespaceIndex
from kvferry.store.disk.index import DiskIndex
from kvferry.store.disk.removals import Removals


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def filled(entries: int, capacity: int = 1000, nbytes: int = 10) -> tuple[DiskIndex, NamespaceIndex]:
    index = DiskIndex(capacity, LRUPolicy())
    home = index.namespace("default", bytes(32))
    for number in range(entries):
        store(index, home, number, nbytes=nbytes)
    return index, home


def store(
    index: DiskIndex,
    home: NamespaceIndex,
    number: int,
    parent: int | None = None,
    nbytes: int = 10,
    root: int = 0,
) -> DiskEntry:
    assert index.begin_writes(home, [key(number)])[0] is True
    assert index.reserve(nbytes) == []
    entry = DiskEntry(home, key(number), None if parent is None else key(parent), nbytes, root)
    index.end_writes(home, [(key(number), entry)])
    return entry


def take(index: DiskIndex, home: NamespaceIndex, wanted: BlockKey) -> DiskEntry | None:
    taken: deque[DiskEntry] = deque()
    assert index.take(home, [wanted], taken) == [bool(taken)]
    return taken[0] if taken else None


def test_room_is_taken_or_victims_are_chosen() -> None:
    index, home = filled(10, capacity=100)
    assert index.used_nbytes == 100
    victims = index.reserve(15)
    assert victims is not None
    assert [v.key for v in victims] == [key(0), key(1)]
    assert index.used_nbytes == 100  # until their files are gone
    assert index.contains(home, [key(0), key(2)]) == [False, True]
    for victim in victims:
        index.gone(victim, victim.nbytes)
    assert index.reserve(15) == []
    assert index.used_nbytes == 95
    assert index.reserve(101) is None  # never fits: nothing is evicted for it
    assert index.entry_count == 8


def test_the_tail_of_a_chain_goes_first() -> None:
    index, home = filled(0, capacity=40)
    for number in range(4):
        store(index, home, number, parent=number - 1 if number else None)
    order = []
    while victims := index.evict(10):
        order += [int.from_bytes(v.key, "big") for v in victims]
        for victim in victims:
            index.gone(victim, victim.nbytes)
    assert order == [3, 2, 1, 0]


def test_a_parent_that_is_learned_later_counts() -> None:
    index, home = filled(0, capacity=100)
    loaded = index.load([(home, key(n), 10) for n in (2, 1, 0)], 0)  # the tail was written longest ago
    assert index.resisting() == []
    for entry, parent in zip(loaded, (1, 0, None), strict=True):
        assert not entry.verified
        index.learn(entry, None if parent is None else key(parent), -1 if parent is None else parent, None)
    assert loaded[0].parent is loaded[1].key  # one object a key
    victims = index.evict(10)
    assert victims is not None
    assert victims[0].key == key(2)


def test_who_is_read_or_pinned_stays() -> None:
    index, home = filled(3, capacity=30)
    assert index.begin_reads(home, [key(0)]) != [None]
    assert index.pin(home, [key(1), key(9)], deadline_in(60)) == [True, False]
    victims = index.evict(30)
    assert victims is not None
    assert [v.key for v in victims] == [key(2)]
    assert index.evict(30) is None
    index.unpin(home, [key(1)])
    entry = home.entries[key(0)]
    index.end_reads([entry])
    victims = index.evict(30)
    assert victims is not None
    assert {v.key for v in victims} == {key(0), key(1)}


def test_one_directory_can_be_emptied() -> None:
    index, home = filled(0, capacity=100)
    for number in range(6):
        store(index, home, number, root=number % 2)
    victims = index.evict(1000, root=1)
    assert victims is not None
    assert [v.root for v in victims] == [1, 1, 1]
    for victim in victims:
        index.gone(victim, victim.nbytes)
    assert index.drop_root(0) == 3
    assert (index.entry_count, index.used_nbytes) == (0, 0)


def test_a_key_is_written_by_one_and_not_while_its_file_goes() -> None:
    index, home = filled(1)
    assert index.begin_writes(home, [key(0)])[0] is False
    entry = take(index, home, key(0))
    assert entry is not None
    going = index.begin_writes(home, [key(0)])[0]
    assert not isinstance(going, bool)
    assert not going.is_set()
    index.gone(entry, 10)
    assert going.is_set()
    assert index.begin_writes(home, [key(0)])[0] is True
    writing = index.begin_writes(home, [key(0)])[0]
    assert not isinstance(writing, bool)
    index.end_writes(home, [(key(0), None)])
    assert writing.is_set()
    assert index.used_nbytes == 0


def test_a_block_found_twice_is_told() -> None:
    index, home = filled(1)
    loaded = index.load([(home, key(0), 10), (home, key(1), 10)], 1)
    doubles = index.resisting()
    assert [e.key for e in loaded] == [key(1)]
    assert [(e.key, e.root) for e in doubles] == [(key(0), 1)]
    assert index.used_nbytes == 30


def test_a_block_that_is_removed_while_its_eviction_fails_does_not_come_back() -> None:
    index, home = filled(1)
    victims = index.evict(10)
    assert victims is not None
    assert take(index, home, key(0)) is None
    assert not index.put_back(victims[0])
    assert index.contains(home, [key(0)]) == [False]
    assert (index.resisting(), index.used_nbytes) == (victims, 10)


def test_who_names_all_entries_names_those_whose_eviction_may_fail() -> None:
    index, home = filled(3)
    victims = index.evict(10)
    assert victims is not None
    assert {entry.key for entry in index.snapshot(home)} == {key(0), key(1), key(2)}
    removed = take(index, home, key(1))
    assert removed is not None
    assert {entry.key for entry in index.snapshot(home)} == {key(0), key(2)}  # that one never comes back
    assert index.put_back(victims[0])
    index.gone(removed, 10)
    assert {entry.key for entry in index.snapshot(home)} == {key(0), key(2)}


def test_a_removal_that_is_given_up_is_done_later() -> None:
    """Wherever the exception has ended it."""
    index, home = filled(2)
    not_begun, begun = home.entries[key(0)], take(index, home, key(1))
    assert begun is not None
    for entry in (not_begun, begun):
        index.abandon(entry)
    assert index.contains(home, [key(0), key(1)]) == [False, False]
    assert index.resisting() == [not_begun, begun]
    for entry in (not_begun, begun):
        assert index.rediscard(entry)
        index.cleared(entry, removed=True)
    assert index.begin_writes(home, [key(0), key(1)]) == [True, True]
    assert (index.used_nbytes, index.entry_count) == (0, 0)


def test_a_file_in_another_directory_is_not_replaced_by_a_new_write() -> None:
    index, home = filled(1)
    entry = take(index, home, key(0))
    assert entry is not None
    index.resist(entry)
    store(index, home, 0, root=1)
    assert index.resisting() == [entry]
    assert index.rediscard(entry) is True
    found = take(index, home, key(0))
    assert found is not None
    index.gone(found, 10)
    assert not isinstance(index.begin_writes(home, [key(0)])[0], bool)  # not while the old file goes
    index.cleared(entry, removed=True)
    assert index.begin_writes(home, [key(0)])[0] is True
    assert index.used_nbytes == 0


def test_a_write_cancels_a_removal_that_was_not_carried_out() -> None:
    index, home = filled(0)
    index.drop_root(0)
    for number in range(3):
        assert take(index, home, key(number)) is None
    store(index, home, 1, root=1)
    taken = take(index, home, key(2))
    assert taken is None
    index.drop_root(1)
    loaded = index.load([(home, key(n), 10) for n in range(3)], 0)
    assert [entry.key for entry in loaded] == [key(1)]


def test_removals_that_are_remembered_are_bounded() -> None:
    removals, home, other = Removals(max_keys=2), NamespaceIndex("t", b"a"), NamespaceIndex("t", b"b")
    removals.absent.update((0, 1))
    for number in range(3):
        removals.add_absent(home, key(number))
    assert not removals._keys
    removals.add(1, other, key(0))
    found = removals.find(1)
    assert found is not None
    assert found.has(home, key(9))  # all of the namespace, rather than one that comes back
    assert found.has(other, key(0))
    assert not found.has(other, key(1))
    assert removals.find(1) is None


def test_an_entry_takes_little_memory() -> None:
    """With its key, the policy's links, and its share of the dict."""
    script = textwrap.dedent(
        """
        import os
        from kvferry.core.eviction import LRUPolicy
        from kvferry.store.disk.entries import DiskEntry
        from kvferry.store.disk.index import DiskIndex

        def rss():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

        count, parent = 100_000, None
        index = DiskIndex(1 << 50, LRUPolicy())
        home = index.namespace("default", bytes(32))
        before = rss()
        for number in range(count):
            key = os.urandom(32)
            index.begin_writes(home, [key])
            index.end_writes(home, [(key, DiskEntry(home, key, parent, 70000 + number % 3, 0))])
            parent = key
        print((rss() - before) / count)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert float(done.stdout) <= 400
