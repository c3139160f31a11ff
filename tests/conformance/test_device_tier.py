from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, OverloadedError
from kvferry.core.keys import BlockKey
from kvferry.device.base import Device
from kvferry.device.cpu import CpuDevice
from kvferry.device.registry import open_device
from kvferry.device.tickets import CopyTicket
from kvferry.store.device import DeviceTier, DeviceTierOptions
from kvferry.store.tier import ReadOutcome, Tier, TierNamespace, WriteOutcome
from kvferry.testing.blocks import wait_until
from kvferry.testing.gated_device import GatedDevice
from kvferry.testing.tiers import TierSuite
from kvferry.testing.tiers_common import (
    SPEC,
    Damage,
    Fault,
    chain,
    opened,
    outcomes,
    read,
    write,
    write_outcomes,
)


class _DeviceTierSuite(TierSuite):
    def make_device(self) -> Device:
        raise NotImplementedError

    def make_tier(self, medium: Path, blocks: int) -> Tier:
        options = DeviceTierOptions(
            device="given", capacity_nbytes=blocks * SPEC.block_nbytes, page_nbytes=4096, slots=2,
            slot_nbytes=16384,
        )  # fmt: skip
        return DeviceTier("device", options, self.make_device())

    def damage(
        self, tier: Tier, namespace: TierNamespace, key: BlockKey, how: Damage, other: BlockKey
    ) -> None:
        assert isinstance(tier, DeviceTier)
        page = self._bytes_of(tier, namespace, key)
        if how == "swap":
            page[:] = self._bytes_of(tier, namespace, other)
        elif how == "flip":
            page[777] ^= 4
        else:
            page[0 if how == "empty" else len(page) // 2 :] = bytes(len(page) // (1 if how == "empty" else 2))

        blocks = tier.table.indexes[namespace].entries[key].pages
        for number, at in enumerate(blocks):
            part = tier.memory[at * 4096 : (at + 1) * 4096]
            tier.engine.copy_in([(part, page[number * 4096 : (number + 1) * 4096])]).wait(deadline_in(20))

    def _bytes_of(self, tier: DeviceTier, namespace: TierNamespace, key: BlockKey) -> memoryview:
        found = page_aligned(SPEC.block_nbytes)
        for number, at in enumerate(tier.table.indexes[namespace].entries[key].pages):
            part = tier.memory[at * 4096 : (at + 1) * 4096]
            place = found[number * 4096 : (number + 1) * 4096]
            tier.engine.copy_out([(part, place)]).wait(deadline_in(20))
        return found

    def fault(self, tier: Tier, kind: Fault) -> AbstractContextManager[object]:
        assert isinstance(tier, DeviceTier)
        if kind == "stall":
            return self.stalled(tier)
        verb = "copy_out" if kind == "read" else "copy_in"
        return patch.object(tier.engine, verb, side_effect=OverloadedError("too many copies wait"))

    def stalled(self, tier: DeviceTier) -> AbstractContextManager[object]:
        del tier
        pytest.skip("its copies are done when they are asked for")


class TestCpu(_DeviceTierSuite):
    def make_device(self) -> Device:
        return CpuDevice()


class TestSim(_DeviceTierSuite):
    @pytest.fixture(autouse=True)
    def _devices(self) -> Iterator[None]:
        self._made: list[GatedDevice] = []
        yield
        for device in self._made:
            device.open_all()
            device.close()

    def make_device(self) -> Device:
        self._made.append(GatedDevice())
        return self._made[-1]

    @contextmanager
    def _stalled(self, tier: DeviceTier, device: GatedDevice) -> Iterator[None]:
        """The first read asked for is in the device's hands, however busy this machine is."""
        ask, stream, first = tier.engine.copy_out, device.new_stream(), [True]

        def copy_out(*args: Any, **options: Any) -> CopyTicket:
            ticket = ask(*args, **options)
            if first and first.pop():
                ticket.order(stream, deadline_in(20))  # waits until it is queued
            return ticket

        device.out.clear()
        with patch.object(tier.engine, "copy_out", copy_out):
            yield
        device.out.set()

    def stalled(self, tier: DeviceTier) -> AbstractContextManager[object]:
        assert isinstance(tier.device, GatedDevice)
        return self._stalled(tier, tier.device)

    def test_a_page_is_nobodys_while_its_block_is_read(self, tier: Tier, namespace: TierNamespace) -> None:
        """Not even when the reader left at his deadline: what is written next goes elsewhere."""
        assert isinstance(tier, DeviceTier)
        first = chain(namespace, 1, 16)
        write(tier, namespace, first)
        with self.stalled(tier):
            (late,) = read(tier, namespace, first[:1], seconds=0.1)
            assert late.outcome is ReadOutcome.FAILED
            assert late.in_flight is not None
            pages = set(tier.table.indexes[namespace].entries[first[0]].pages)
            tier.remove(namespace, first, deadline=deadline_in(20))
            others = chain(namespace, 2, 16)
            assert set(write_outcomes(write(tier, namespace, others))) == {WriteOutcome.STORED}
            stored = tier.table.indexes[namespace].entries
            assert len(stored) == 15
            assert not pages & {page for block in stored.values() for page in block.pages}
        assert late.in_flight.wait(20)
        write(tier, namespace, others)
        assert set(outcomes(read(tier, namespace, others))) == {ReadOutcome.HIT}

    def test_a_dead_device_is_told_and_fails_as_results(self, tier: Tier, namespace: TierNamespace) -> None:
        assert isinstance(tier, DeviceTier)
        keys = chain(namespace, 1, 2)
        write(tier, namespace, keys)
        device = self._made[-1]
        device.fail(RuntimeError("an illegal memory access"))
        wait_until(lambda: bool(device.errors), 20)
        results = read(tier, namespace, keys)
        assert {result.outcome for result in results} == {ReadOutcome.FAILED}
        assert "illegal memory access" in results[0].reason
        usage = tier.usage()
        assert not usage.healthy
        assert "illegal memory access" in usage.status["problem"]
        device.errors.clear()


def test_it_is_a_plug_in_with_options() -> None:
    tier = DeviceTier.from_options("spare", {"device": "cpu", "capacity": "1MiB", "page": "4KiB"})
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 3)
    write(tier, namespace, keys)
    assert set(outcomes(read(tier, namespace, keys))) == {ReadOutcome.HIT}
    assert tier.usage().status["device"] == "cpu:0"
    tier.close()
    assert open_device("sim:1").name == "sim:1"


def test_a_device_without_the_room_is_said_with_the_remedy() -> None:
    options = DeviceTierOptions(device="given", capacity_nbytes=64 << 20)
    device = GatedDevice(total_nbytes=1 << 20)
    with pytest.raises(CapacityError, match=r"tier far: it takes 64 MiB .* 1 MiB are free: lower its"):
        DeviceTier("far", options, device)
    device.close()
