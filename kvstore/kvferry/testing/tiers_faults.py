"""The part of the tier suite about threads, damage and a failing medium."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.store.tier import BlockRead, ReadOutcome, Tier, TierNamespace, WriteOutcome
from kvferry.testing.blocks import wait_until
from kvferry.testing.tiers_common import (
    BLOCKS,
    HIT,
    MISS,
    SPEC,
    STORED,
    Damage,
    TierFixtures,
    chain,
    closing,
    opened,
    outcomes,
    read,
    write,
    write_outcomes,
)

__all__ = ["TierFaults"]

CORRUPT, FAILED = ReadOutcome.CORRUPT, ReadOutcome.FAILED


class TierFaults(TierFixtures):
    """See :class:`kvferry.testing.tiers.TierSuite`."""

    @pytest.mark.parametrize("how", ["flip", "truncate", "empty", "swap"])
    @pytest.mark.parametrize("again", [False, True], ids=["running", "restarted"])
    def test_damage_is_never_served(self, tmp_path: Path, how: Damage, again: bool) -> None:
        """A damaged block is corrupt once and a miss from then on; the others are served."""
        tier = self.make_tier(tmp_path, BLOCKS)
        with closing(tier):
            namespace = opened(tier, SPEC)
            keys = chain(namespace, 1, 6)
            write(tier, namespace, keys)
            self.damage(tier, namespace, keys[2], how, keys[4])
            if again and not tier.persistent:
                pytest.skip("the tier is not persistent")
            if not again:
                self._damaged(tier, namespace, keys)
        if again:
            with closing(self.make_tier(tmp_path, BLOCKS)) as tier:
                self._damaged(tier, opened(tier, SPEC), keys)

    @staticmethod
    def _damaged(tier: Tier, namespace: TierNamespace, keys: list[BlockKey]) -> None:
        first = outcomes(read(tier, namespace, keys))
        assert first[2] in (CORRUPT, MISS)
        assert first[:2] + first[3:] == [HIT] * 5
        assert outcomes(read(tier, namespace, keys))[2] is MISS
        assert tier.contains(namespace, keys[2:3], deadline=deadline_in(20)) == [False]
        assert write_outcomes(write(tier, namespace, keys))[2] is STORED
        assert outcomes(read(tier, namespace, keys)) == [HIT] * 6
        usage = tier.usage()
        assert usage.used_nbytes <= usage.capacity_nbytes or not usage.capacity_nbytes

    def test_another_parent_is_corrupt(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        """The parent that the caller names is compared with the stored one."""
        write(tier, namespace, keys)
        wanted = (keys[0], keys[0], None)
        blocks = [
            BlockRead(key, page_aligned(SPEC.block_nbytes), parent)
            for key, parent in zip(keys[1:4], wanted, strict=True)
        ]
        results = tier.read_into(namespace, blocks, deadline=deadline_in(20))
        assert outcomes(results) == [HIT, CORRUPT, CORRUPT]
        assert all(r.reason for r in results[1:])

    def test_what_somebody_else_removed_is_a_miss(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        """No error on read, on removal or on eviction; the bytes are given back; it can be written again."""
        before = tier.usage().used_nbytes
        write(tier, namespace, keys)
        for key in keys[:3]:
            self.lose(tier, namespace, key)
        assert outcomes(read(tier, namespace, keys[:1])) == [MISS]
        tier.remove(namespace, keys, deadline=deadline_in(20))
        assert tier.usage().entries == 0
        assert outcomes(read(tier, namespace, keys)) == [MISS] * 6
        assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 6
        for key in keys[:3]:
            self.lose(tier, namespace, key)
        for number in range(10, 10 + 2 * BLOCKS):  # evicts all of them
            assert write_outcomes(write(tier, namespace, chain(namespace, number, 4))) == [STORED] * 4
        usage = tier.usage()
        assert before <= usage.used_nbytes
        assert usage.used_nbytes <= usage.capacity_nbytes or not usage.capacity_nbytes

    def test_reads_fail_as_results_and_recover(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        """An I/O error costs at most the blocks that were asked for."""
        write(tier, namespace, keys)
        with self.fault(tier, "read"):
            results = read(tier, namespace, keys[:3])
            assert set(outcomes(results)) <= {FAILED, CORRUPT, MISS}
            assert all(r.reason for r in results if r.outcome is not MISS)
        assert outcomes(read(tier, namespace, keys[3:])) == [HIT] * 3
        assert set(write_outcomes(write(tier, namespace, keys[:3]))) <= {STORED, WriteOutcome.PRESENT}
        assert outcomes(read(tier, namespace, keys)) == [HIT] * 6

    @pytest.mark.parametrize("kind", ["write", "full"])
    def test_writes_fail_as_results_and_recover(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey], kind: str
    ) -> None:
        """Nothing is left of a failed write, not even room; what was there is served."""
        write(tier, namespace, keys[:2])
        used = tier.usage().used_nbytes
        with self.fault(tier, "write" if kind == "write" else "full"):
            results = write(tier, namespace, keys[2:])
            assert set(write_outcomes(results)) <= {WriteOutcome.FAILED, WriteOutcome.REFUSED}
            assert all(r.reason for r in results)
            assert not any(tier.contains(namespace, keys[2:], deadline=deadline_in(20)))
            assert outcomes(read(tier, namespace, keys[2:])) == [MISS] * 4
            if kind == "write":  # when full it may have tried to make room
                assert outcomes(read(tier, namespace, keys[:2])) == [HIT] * 2
        assert tier.usage().used_nbytes - used < 16 * 4096  # folders may have been made

        def recovered() -> bool:
            write(tier, namespace, keys)
            return outcomes(read(tier, namespace, keys)) == [HIT] * 6

        wait_until(recovered, 30)

    def test_a_hanging_medium_does_not_hold_up_the_caller(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        """The call ends at its deadline and says whose buffers are not free yet."""
        write(tier, namespace, keys)
        with self.fault(tier, "stall"):
            start = time.monotonic()
            results = read(tier, namespace, keys, seconds=0.3)
            assert time.monotonic() - start < 10
            assert set(outcomes(results)) == {FAILED}
            flying = [r.in_flight for r in results if r.in_flight is not None]
            assert flying or not tier.indexed  # from a remote store who reads takes the bytes himself
            assert not any(event.is_set() for event in flying)
        assert all(event.wait(20) for event in flying)
        assert outcomes(read(tier, namespace, keys)) == [HIT] * 6

    def test_threads_see_a_miss_or_the_right_bytes(self, tier: Tier, namespace: TierNamespace) -> None:
        """Many threads write, read, remove and evict the same few keys."""
        keys = [key for number in range(BLOCKS) for key in chain(namespace, number, 3)]
        problems: list[str] = []
        stop = deadline_in(1.5)

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                while time.monotonic() < stop:
                    some = rng.sample(keys, 4)
                    kind = rng.randrange(8)
                    if kind < 4:
                        results = read(tier, namespace, some)
                        problems.extend(str(r) for r in results if r.outcome not in (HIT, MISS))
                    elif kind < 7:
                        write(tier, namespace, some)
                    else:
                        tier.remove(namespace, some, deadline=deadline_in(20))
                    usage = tier.usage()
                    if 0 < usage.capacity_nbytes < usage.used_nbytes:
                        problems.append(f"{usage.used_nbytes} bytes used of {usage.capacity_nbytes}")
            except BaseException as error:
                problems.append(repr(error))
                raise

        threads = [threading.Thread(target=work, args=(seed,), name=f"suite-{seed}") for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not problems, problems[:3]
        tier.remove(namespace, keys, deadline=deadline_in(20))
        assert tier.usage().entries == 0
