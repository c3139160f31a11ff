"""Conformance suite of the tier contract; see :class:`TierSuite`."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey, block_keys
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, TensorSpec
from kvferry.store.tier import (
    UNKNOWN_PARENT,
    BlockRead,
    BlockWrite,
    ReadOutcome,
    Tier,
    TierNamespace,
    WriteOutcome,
)
from kvferry.testing.blocks import small_spec
from kvferry.testing.tiers_common import (
    BLOCKS,
    HIT,
    MISS,
    PRESENT,
    SPEC,
    STORED,
    TierFixtures,
    chain,
    closing,
    opened,
    outcomes,
    read,
    write,
    write_outcomes,
)
from kvferry.testing.tiers_faults import TierFaults

__all__ = ["TierSuite"]

_OTHER = small_spec("tier-suite-other")


def _spec(*tensors: TensorSpec, layers: int = 2, layout: str = "kvferry") -> KVSpec:
    layer = (LayerSpec(tensors),) * layers
    return KVSpec(model="shapes", revision="r", layers=layer, block_tokens=4, layout=layout)


_SHAPES = {dtype.value: _spec(TensorSpec("k", (4, 2, 33), dtype)) for dtype in DType} | {
    "no layers": _spec(layers=0),
    "no tensors": _spec(),
    "no elements": _spec(TensorSpec("k", (0, 8, 128), DType.BFLOAT16)),
    "scalar": _spec(TensorSpec("state", (), DType.FLOAT32), layers=1),
    "odd": _spec(TensorSpec("a", (3,), DType.INT8), TensorSpec("b", (0,), DType.BOOL), layers=5),
    "opaque": _spec(TensorSpec("k", (4, 2, 33), DType.BFLOAT16), layout="engine/pages-v3"),
    "large": small_spec("large", pages=10, layers=4),
}
_HOSTILE = (
    "../escaped", "/absolute", "a/../../b", "nul\0nul", "back\\slash", "x" * 400, "..", ".", "~", "con",
    "\ud800", "é" * 50, "A", "a", " ",
)  # fmt: skip


class TierSuite(TierFaults, TierFixtures):
    """What every tier must do. Inherit it in a test class and give :meth:`TierFixtures.make_tier`.

    The hooks ``damage``, ``lose`` and ``fault`` let the suite also see what a tier makes of a medium that
    misbehaves; without them those tests are skipped.
    """

    def test_what_was_written_is_read(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        """Equal bytes, with the parent and position they were stored with."""
        assert write_outcomes(write(tier, namespace, keys)) == [STORED] * len(keys)
        results = read(tier, namespace, keys)
        assert outcomes(results) == [HIT] * len(keys)
        assert [r.parent for r in results] == [None, *keys[:-1]]
        assert [r.position for r in results] == list(range(len(keys)))
        assert tier.usage().entries == len(keys)

    def test_a_miss_is_a_value(self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]) -> None:
        """Misses and hits mix in one batch; an empty batch is fine."""
        write(tier, namespace, keys[::2])
        assert outcomes(read(tier, namespace, keys)) == [HIT, MISS] * 3
        assert tier.contains(namespace, keys, deadline=deadline_in(20)) == [True, False] * 3
        assert read(tier, namespace, []) == []
        assert write(tier, namespace, []) == []

    def test_writing_again_changes_nothing(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        """Also twice in one batch: one of them stores it."""
        twice = write_outcomes(write(tier, namespace, [keys[0], keys[0]]))
        assert sorted(o.value for o in twice) == sorted([STORED.value, PRESENT.value])
        used = tier.usage().used_nbytes
        assert write_outcomes(write(tier, namespace, keys[:1])) == [PRESENT]
        assert tier.usage().used_nbytes == used
        assert outcomes(read(tier, namespace, keys[:1])) == [HIT]

    def test_removed_is_gone(self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]) -> None:
        """And its room is free, and it can be written again."""
        write(tier, namespace, keys)
        used = tier.usage().used_nbytes
        assert tier.remove(namespace, keys[:4], deadline=deadline_in(20)) == [True] * 4
        assert tier.remove(namespace, keys[:4], deadline=deadline_in(20)) == [False] * 4
        assert outcomes(read(tier, namespace, keys)) == [MISS] * 4 + [HIT] * 2
        assert tier.usage().entries == 2
        assert tier.usage().used_nbytes < used
        assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 4 + [PRESENT] * 2

    def test_namespaces_and_tenants_are_apart(self, tier: Tier, keys: list[BlockKey]) -> None:
        """The same key under another spec, scope or tenant is another block."""
        spaces = [
            opened(tier, SPEC),
            opened(tier, _OTHER),
            opened(tier, SPEC, "other"),
            opened(tier, SPEC, "default", KeyScope(adapter="a")),
            opened(tier, SPEC, "default", KeyScope(salt=b"")),
        ]
        write(tier, spaces[0], keys[:1])
        for space in spaces[1:]:
            assert tier.contains(space, keys[:1], deadline=deadline_in(20)) == [False]
            assert outcomes(read(tier, space, keys[:1])) == [MISS]
            assert write_outcomes(write(tier, space, keys[:1])) == [STORED]
        assert tier.remove(spaces[2], keys[:1], deadline=deadline_in(20)) == [True]
        assert outcomes(read(tier, spaces[0], keys[:1])) == [HIT]
        assert {(e.tenant, e.namespace_id, e.key) for e in tier.scan()} == {
            (s.tenant, s.namespace_id, keys[0]) for s in spaces if s is not spaces[2]
        }

    @pytest.mark.parametrize("name", sorted(_SHAPES))
    def test_every_shape_and_dtype(self, tier: Tier, name: str) -> None:
        """Bytes come back as they were, NaN payloads and padding included; nothing is too small."""
        namespace = opened(tier, _SHAPES[name])
        nbytes = namespace.spec.block_nbytes
        keys = block_keys(namespace.namespace_id, [1] * 12, 4)
        data = [bytes([255]) * nbytes, bytes(nbytes), bytes(i * 7 % 256 for i in range(nbytes))]
        blocks = [BlockWrite(k, memoryview(d), None, -1) for k, d in zip(keys, data, strict=True)]
        assert write_outcomes(tier.write(namespace, blocks, deadline=deadline_in(20))) == [STORED] * 3
        reads = [BlockRead(key, memoryview(bytearray(nbytes))) for key in keys]
        assert outcomes(tier.read_into(namespace, reads, deadline=deadline_in(20))) == [HIT] * 3
        assert [bytes(r.into) for r in reads] == data

    def test_buffers_need_no_alignment(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        """Aligned is fast, all else works."""
        nbytes = SPEC.block_nbytes
        memory = page_aligned(2 * nbytes)
        memory[1 : nbytes + 1] = source = bytes(range(256)) * (nbytes // 256)
        block = BlockWrite(keys[0], memory[1 : nbytes + 1], None, 0)
        assert write_outcomes(tier.write(namespace, [block], deadline=deadline_in(20))) == [STORED]
        target = page_aligned(2 * nbytes)
        result = tier.read_into(
            namespace, [BlockRead(keys[0], target[3 : nbytes + 3])], deadline=deadline_in(20)
        )
        assert outcomes(result) == [HIT]
        assert bytes(target) == bytes(3) + source + bytes(nbytes - 3)

    def test_room_is_made_by_eviction(self, tier: Tier, namespace: TierNamespace) -> None:
        """The cap holds at every moment; what was written last is there."""
        for number in range(BLOCKS * 5):
            keys = chain(namespace, number, 4)
            assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 4
            usage = tier.usage()
            assert usage.used_nbytes <= usage.capacity_nbytes or not usage.capacity_nbytes
            assert outcomes(read(tier, namespace, keys)) == [HIT] * 4
        if tier.usage().capacity_nbytes:
            assert tier.usage().entries < BLOCKS * 20

    def test_a_block_larger_than_the_tier_is_refused(self, tier: Tier) -> None:
        """And nothing is evicted for it in vain."""
        capacity = tier.usage().capacity_nbytes
        if not capacity:
            pytest.skip("the tier has no cap of its own")
        small, huge = opened(tier, SPEC), opened(tier, small_spec("huge", pages=capacity // 4096 + 1))
        keys = chain(small, 1, 4)
        write(tier, small, keys)
        data = memoryview(random.Random(1).randbytes(huge.spec.block_nbytes))  # no codec helps
        block = BlockWrite(chain(huge, 1, 1)[0], data, None, 0)
        assert write_outcomes(tier.write(huge, [block], deadline=deadline_in(20))) == [WriteOutcome.REFUSED]
        assert outcomes(read(tier, small, keys)) == [HIT] * 4

    def test_pinned_blocks_stay(self, tier: Tier, namespace: TierNamespace) -> None:
        """Until they are unpinned, or their time is over."""
        keys = chain(namespace, 1, 4)
        write(tier, namespace, keys)
        if not tier.pin(namespace, keys, until=deadline_in(60))[0]:
            pytest.skip("this tier cannot pin")
        assert tier.pin(namespace, chain(namespace, 2, 1), until=deadline_in(60)) == [False]
        for number in range(10, 10 + BLOCKS * 3):
            write(tier, namespace, chain(namespace, number, 4))
        assert outcomes(read(tier, namespace, keys)) == [HIT] * 4
        tier.unpin(namespace, keys[:2])
        tier.pin(namespace, keys[2:], until=time.monotonic())
        tier.unpin(namespace, keys[2:])
        for number in range(100, 100 + BLOCKS * 3):
            write(tier, namespace, chain(namespace, number, 4))
        assert MISS in outcomes(read(tier, namespace, keys))

    def test_what_is_full_of_pins_refuses(self, tier: Tier, namespace: TierNamespace) -> None:
        """Refused is no fault, and passes when the pins end."""
        pinned: list[BlockKey] = []
        for number in range(BLOCKS * 10):
            keys = chain(namespace, number, 1)
            result = write_outcomes(write(tier, namespace, keys))
            if result == [WriteOutcome.REFUSED]:
                break
            assert result == [STORED]
            if not tier.pin(namespace, keys, until=deadline_in(60))[0]:
                pytest.skip("this tier cannot pin")
            pinned += keys
        else:
            pytest.fail("everything is pinned, and still there was room")
        tier.unpin(namespace, pinned)
        assert write_outcomes(write(tier, namespace, chain(namespace, 9999, 1))) == [STORED]

    def test_scan_tells_of_every_entry(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        """With what it takes up, and its parent once that is known."""
        write(tier, namespace, keys)
        found = {entry.key: entry for entry in tier.scan()}
        assert set(found) == set(keys)
        assert sum(entry.nbytes for entry in found.values()) <= tier.usage().used_nbytes
        for position, key in enumerate(keys):
            parent = keys[position - 1] if position else None
            assert found[key].parent == (parent if found[key].verified else UNKNOWN_PARENT)

    def test_wrong_use_raises(self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]) -> None:
        """A wrong size or key is a mistake of the caller, not a miss."""
        nbytes, soon = SPEC.block_nbytes, deadline_in(20)
        small, good = page_aligned(nbytes - 1), page_aligned(nbytes)
        for blocks in ([BlockRead(keys[0], small)], [BlockRead(BlockKey(b"short"), good)]):
            with pytest.raises(ConfigError):
                tier.read_into(namespace, blocks, deadline=soon)
        with pytest.raises(ConfigError):
            tier.read_into(namespace, [BlockRead(keys[0], memoryview(bytes(nbytes)))], deadline=soon)
        for block in (
            BlockWrite(keys[0], small, None, 0),
            BlockWrite(BlockKey(b""), good, None, 0),
            BlockWrite(keys[0], good, UNKNOWN_PARENT, 0),
        ):
            with pytest.raises(ConfigError):
                tier.write(namespace, [block], deadline=soon)
        with pytest.raises(ConfigError):
            type(tier).from_options("suite", {"no_such_option": 1})

    def test_past_deadlines_fail(self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]) -> None:
        """As results, and at once."""
        write(tier, namespace, keys[:3])
        start = time.monotonic()
        for result in read(tier, namespace, keys[:3], seconds=-1):
            assert result.outcome in (ReadOutcome.FAILED, HIT)
            assert result.reason or result.outcome is HIT
        for answer in write(tier, namespace, keys[3:], seconds=-1):
            assert answer.outcome in (WriteOutcome.FAILED, STORED)
        assert time.monotonic() - start < 5

    def test_a_closed_tier_fails_quietly(self, tmp_path: Path) -> None:
        """No exception for a thread that comes late."""
        tier = self.make_tier(tmp_path, BLOCKS)
        namespace = opened(tier, SPEC)
        keys = chain(namespace, 1, 2)
        write(tier, namespace, keys)
        tier.close()
        assert set(outcomes(read(tier, namespace, keys))) == {ReadOutcome.FAILED}
        assert set(write_outcomes(write(tier, namespace, keys))) == {WriteOutcome.FAILED}
        assert tier.contains(namespace, keys, deadline=deadline_in(20)) == [False, False]

    def test_a_persistent_tier_finds_its_blocks_again(self, tmp_path: Path) -> None:
        """All of them, with parents, before the namespace is opened and after; counted in its usage.

        One that is not indexed may have to be told of the tenant first, and knows no more than names.
        """
        with closing(self.make_tier(tmp_path, BLOCKS)) as tier:
            if not tier.persistent:
                pytest.skip("the tier is not persistent")
            namespace = opened(tier, SPEC)
            keys = chain(namespace, 1, 6)
            write(tier, namespace, keys)
            assert tier.flush(deadline=deadline_in(20))
            used = tier.usage().used_nbytes
        with closing(self.make_tier(tmp_path, BLOCKS)) as tier:
            if not tier.indexed:
                opened(tier, SPEC)
            assert {e.key for e in tier.scan()} == set(keys)
            assert tier.usage().entries == 6
            assert tier.usage().used_nbytes == used
            namespace = opened(tier, SPEC)
            assert tier.contains(namespace, keys, deadline=deadline_in(20)) == [True] * 6
            results = read(tier, namespace, keys)
            assert outcomes(results) == [HIT] * 6
            assert [r.parent for r in results] == [None, *keys[:-1]]
            assert all(e.verified for e in tier.scan()) or not tier.indexed

    def test_a_namespace_is_found_again_after_many_others(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        """What a tier forgets of namespaces that were not used for long is known again at the next use."""
        write(tier, namespace, keys[:3])
        for number in range(1500):
            opened(tier, SPEC, namespace.tenant, KeyScope(salt=b"%d" % number))
        assert tier.contains(namespace, keys[:3], deadline=deadline_in(20)) == [True] * 3
        assert outcomes(read(tier, namespace, keys[:3])) == [HIT] * 3
        assert {e.key for e in tier.scan() if e.namespace_id == namespace.namespace_id} == set(keys[:3])
        assert tier.remove(namespace, keys[:3], deadline=deadline_in(20)) == [True] * 3

    @pytest.mark.parametrize("name", _HOSTILE, ids=[f"{n[:12]!a}" for n in _HOSTILE])
    def test_hostile_names(self, tier: Tier, tmp_path: Path, name: str) -> None:
        """Stored apart from all others, or refused; nothing appears outside the tier's own folder."""
        (tmp_path / "witness").write_text("untouched")
        before = set(tmp_path.parent.iterdir())
        spec = KVSpec(model=name, revision=name, layers=SPEC.layers, block_tokens=4, group=name, layout=name)
        for tenant in (name, "default"):
            try:
                namespace = opened(
                    tier, spec, tenant, KeyScope(name, name, name.encode("utf-8", "surrogatepass"))
                )
            except ConfigError:
                continue
            keys = chain(namespace, 1, 2)
            assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 2
            assert outcomes(read(tier, namespace, keys)) == [HIT] * 2
        assert set(tmp_path.parent.iterdir()) == before
        assert (tmp_path / "witness").read_text() == "untouched"
