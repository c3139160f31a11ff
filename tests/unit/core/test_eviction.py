from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.core.chains import Block, ChainIndex
from kvferry.core.eviction import Entry, EntryList, LRUPolicy
from kvferry.core.keys import BlockKey
from kvferry.core.segments import Slot


class Shelf:
    """An index with its policy, as a tier drives them; blocks are named by one letter."""

    def __init__(self) -> None:
        self.index: ChainIndex[Block] = ChainIndex(b"n" * 32, 4096)
        self.policy = LRUPolicy()

    def __getitem__(self, name: str) -> Block:
        return self.index.entries[BlockKey(name.encode() * 32)]

    def put(self, names: str, parent: str = "") -> None:
        above = [parent, *names]
        for name, over in reversed(list(zip(names, above, strict=False))):
            key = BlockKey(name.encode() * 32)
            block = Block(
                self.index, key, BlockKey(over.encode() * 32) if over else None, Slot(0, 0, 4096, 0)
            )
            self.index.add(block)
            self.policy.inserted(block)

    def use(self, names: str) -> None:
        self.policy.accessed([self[n] for n in reversed(names)])

    def drop(self, entry: Entry) -> None:
        assert isinstance(entry, Block)
        tail = self.index.discard(entry)
        self.policy.removed(entry)
        if tail is not None:
            self.policy.released(tail)

    def evict(self, count: int, pinned: Callable[[Entry], bool] = lambda _: False) -> str:
        found = ""
        for entry in self.policy.victims(count * 4096, pinned):
            self.drop(entry)
            found += chr(entry.key[0])
        return found


def test_tails_go_before_heads_and_the_oldest_chain_first() -> None:
    shelf = Shelf()
    shelf.put("abc")
    shelf.put("xyz")
    shelf.use("a")
    assert shelf.evict(2) == "cb"
    assert shelf.evict(9) == "zyxa", "a was used since"


def test_a_chain_that_grew_block_by_block_still_shrinks_from_its_end() -> None:
    shelf = Shelf()
    for name, parent in zip("abcd", " abc", strict=True):
        shelf.put(name, parent.strip())
    assert shelf.evict(3) == "dcb"
    shelf.put("b", "a")
    assert shelf.evict(9) == "ba"


def test_pinned_entries_are_passed_over_and_are_the_oldest_when_released() -> None:
    shelf = Shelf()
    for name in "abc":
        shelf.put(name)
    held = {shelf["a"]}
    assert shelf.evict(1, held.__contains__) == "b"
    assert shelf.evict(1, held.__contains__) == "c"
    shelf.put("d")
    shelf.policy.released(shelf["a"])
    assert shelf.evict(1) == "a"


def test_inner_entries_go_when_every_tail_is_pinned_deepest_first() -> None:
    shelf = Shelf()
    for name, parent in zip("abcd", " abc", strict=True):
        shelf.put(name, parent.strip())
    shelf.put("xy")
    held = {shelf["d"], shelf["y"]}
    assert shelf.evict(2, held.__contains__) == "cb"
    assert shelf.evict(9, held.__contains__) == "ax"
    assert shelf.evict(9, held.__contains__) == ""


def test_rings_and_own_parents_are_evicted() -> None:
    shelf = Shelf()
    for name, parent in zip("abc", "bca", strict=True):
        shelf.put(name, parent)
    shelf.put("o", "o")
    assert sorted(shelf.evict(9)) == ["a", "b", "c", "o"]
    assert not shelf.index.entries
    assert not shelf.index._orphans


def test_equal_foreign_keys_of_two_namespaces_are_not_mixed_up() -> None:
    shelf, other = Shelf(), Shelf()
    other.policy = shelf.policy
    shelf.put("ab")
    other.put("ab")
    held = {shelf["b"], other["b"]}
    found = list(shelf.policy.victims(9 * 4096, held.__contains__))
    assert {id(e.index) for e in found} == {id(shelf.index), id(other.index)}


def test_children_are_counted_whether_or_not_the_parent_is_there() -> None:
    shelf = Shelf()
    shelf.put("b", "a")
    shelf.put("c", "a")
    shelf.put("a")
    assert shelf["a"].children == 2
    shelf.drop(shelf["a"])
    shelf.drop(shelf["b"])
    shelf.put("a")
    assert shelf["a"].children == 1
    shelf.drop(shelf["c"])
    assert shelf["a"].children == 0
    assert [e.key[:1] for e in shelf.index.chain(shelf["a"].key)] == [b"a"]
    assert shelf.evict(9) == "a"
    assert not shelf.index._orphans


def test_a_list_keeps_its_order_through_every_change() -> None:
    shelf = Shelf()
    shelf.put("abcd")
    entries = [shelf[n] for n in "abcd"]
    for entry in entries:
        shelf.policy.removed(entry)
    chosen = EntryList()
    chosen.append(entries[1])
    chosen.prepend(entries[0])
    chosen.append(entries[2])
    assert list(chosen) == entries[:3]
    assert chosen.oldest is entries[0]
    chosen.unlink(entries[1])
    assert list(chosen) == [entries[0], entries[2]]
    chosen.unlink(entries[0])
    chosen.unlink(entries[2])
    assert chosen.oldest is None


@pytest.mark.parametrize("used", ["", "a", "ab", "ba", "abab", "cab"])
def test_use_keeps_every_entry_listed_once(used: str) -> None:
    shelf = Shelf()
    for name in "abc":
        shelf.put(name)
    shelf.policy.accessed([shelf[n] for n in used])
    assert sorted(shelf.evict(9)) == ["a", "b", "c"]


def test_more_drops_than_holds_raise() -> None:
    from kvferry.core.errors import StoreError
    from kvferry.core.memory import MemoryStore
    from kvferry.testing.blocks import save_blocks, small_spec

    store = MemoryStore(8 * 4096)
    ns = store.namespace(small_spec("drops"))
    keys = ns.keys([1] * 4)
    save_blocks(ns, keys)
    block = store._pool.get(ns.namespace_id, keys[0])
    assert block is not None
    with pytest.raises(StoreError, match="more than it was held"):
        store._pool.drop(block)
