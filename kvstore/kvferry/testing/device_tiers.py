"""Conformance suite of a tier on a device; see :class:`DeviceTierSuite`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final
from unittest.mock import patch

import pytest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import OverloadedError
from kvferry.core.keys import BlockKey
from kvferry.device.base import Device
from kvferry.device.tickets import CopyPart, CopyTicket
from kvferry.store.device import DeviceTier, DeviceTierOptions
from kvferry.store.tier import ReadOutcome, Tier, TierNamespace, WriteOutcome
from kvferry.testing.device_hooks import DeviceHooks
from kvferry.testing.tiers import TierSuite
from kvferry.testing.tiers_common import (
    SPEC,
    Damage,
    Fault,
    chain,
    outcomes,
    read,
    write,
    write_outcomes,
)

__all__ = ["DeviceTierSuite"]

_PAGE: Final = 4096
_AMPLE_S: Final = 20.0


class DeviceTierSuite(DeviceHooks, TierSuite):
    """What a :class:`~kvferry.store.device.DeviceTier` must do on every device, beside what every tier must.

    Inherit it in a test class and give the :class:`DeviceHooks`.
    """

    @pytest.fixture(autouse=True)
    def made_devices(self) -> Iterator[list[Device]]:
        """Those of the tiers of a test, in the order in which they were made."""
        self._made: list[Device] = []
        yield self._made
        for device in self._made:
            self.end_device(device)

    def make_tier(self, medium: Path, blocks: int) -> Tier:
        """See :class:`~kvferry.testing.tiers_common.TierFixtures`."""
        del medium
        options = DeviceTierOptions(
            device="given", capacity_nbytes=blocks * SPEC.block_nbytes, page_nbytes=_PAGE, slots=2,
            slot_nbytes=16384,
        )  # fmt: skip
        self._made.append(self.make_device())
        return DeviceTier("device", options, self._made[-1])

    def damage(
        self, tier: Tier, namespace: TierNamespace, key: BlockKey, how: Damage, other: BlockKey
    ) -> None:
        """See :class:`~kvferry.testing.tiers_common.TierFixtures`."""
        assert isinstance(tier, DeviceTier)
        block = page_aligned(SPEC.block_nbytes)
        self._copy(tier, tier.engine.copy_out, namespace, other if how == "swap" else key, block)
        if how == "flip":
            block[777] ^= 4
        elif how != "swap":
            kept = 0 if how == "empty" else len(block) // 2
            block[kept:] = bytes(len(block) - kept)
        self._copy(tier, tier.engine.copy_in, namespace, key, block)

    @staticmethod
    def _copy(
        tier: DeviceTier,
        copy: Callable[[list[CopyPart]], CopyTicket],
        namespace: TierNamespace,
        key: BlockKey,
        block: memoryview,
    ) -> None:
        parts: list[CopyPart] = []
        for number, page in enumerate(tier.table.indexes[namespace].entries[key].pages):
            here = block[number * _PAGE : (number + 1) * _PAGE]
            parts.append((tier.memory[page * _PAGE : (page + 1) * _PAGE], here))
        copy(parts).wait(deadline_in(_AMPLE_S))

    def fault(self, tier: Tier, kind: Fault) -> AbstractContextManager[object]:
        """See :class:`~kvferry.testing.tiers_common.TierFixtures`."""
        assert isinstance(tier, DeviceTier)
        if kind == "stall":
            return self._stalled(tier)
        verb = "copy_out" if kind == "read" else "copy_in"
        return patch.object(tier.engine, verb, side_effect=OverloadedError("too many copies wait"))

    @contextmanager
    def _stalled(self, tier: DeviceTier) -> Iterator[None]:
        """Copies out wait on the device; the first is in its hands, however busy this machine is."""
        device = tier.device
        if not device.asynchronous:
            pytest.skip("its copies are done when they are asked for")
        ask, stream, first = tier.engine.copy_out, device.new_stream(), [True]

        def copy_out(parts: list[CopyPart], done: Callable[[CopyTicket], None]) -> CopyTicket:
            ticket = ask(parts, after=[event], done=done)
            if first and first.pop():
                ticket.order(stream, deadline_in(_AMPLE_S))  # waits until it is queued
            return ticket

        with device.use(device.new_stream()), self.shut_gate(device):
            event = device.event()
            event.record(device.current_stream())
            with patch.object(tier.engine, "copy_out", copy_out):
                yield

    def test_a_page_is_nobodys_while_its_block_is_read(self, tier: Tier, namespace: TierNamespace) -> None:
        """Not even when the reader left at his deadline: what is written next goes elsewhere."""
        assert isinstance(tier, DeviceTier)
        first = chain(namespace, 1, 16)
        write(tier, namespace, first)
        with self._stalled(tier):
            (late,) = read(tier, namespace, first[:1], seconds=0.1)
            assert late.outcome is ReadOutcome.FAILED
            assert late.in_flight is not None
            pages = set(tier.table.indexes[namespace].entries[first[0]].pages)
            tier.remove(namespace, first, deadline=deadline_in(_AMPLE_S))
            others = chain(namespace, 2, 16)
            assert set(write_outcomes(write(tier, namespace, others))) == {WriteOutcome.STORED}
            stored = tier.table.indexes[namespace].entries
            assert len(stored) == 15
            assert not pages & {page for block in stored.values() for page in block.pages}
        assert late.in_flight.wait(_AMPLE_S)
        write(tier, namespace, others)
        assert set(outcomes(read(tier, namespace, others))) == {ReadOutcome.HIT}
