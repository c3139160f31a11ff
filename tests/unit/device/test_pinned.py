"""Memory that cannot be pinned (C113), and what is said of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvferry.core.buffers import PAGE_NBYTES, page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, DeviceError, OverloadedError
from kvferry.device import CopyEngine
from kvferry.device.pinned import PinnedSlots
from kvferry.testing.gated_device import GatedDevice
from kvferry.testing.sim_device import SimDevice


@pytest.fixture
def tight() -> Iterator[SimDevice]:
    device = SimDevice(max_pinned_nbytes=2 * PAGE_NBYTES)
    yield device
    device.close()


def test_pageable_memory_goes_on_with_one_line(tight: SimDevice, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    here, back = page_aligned(9 * PAGE_NBYTES), page_aligned(9 * PAGE_NBYTES)
    here[:] = bytes(range(256)) * (len(here) // 256)
    with closing(CopyEngine(tight, slots=2, slot_nbytes=PAGE_NBYTES)) as engine:
        (line,) = [record.getMessage() for record in caplog.records]  # out fits, in does not
        for part in ("8 KiB", "are free", "RLIMIT_MEMLOCK", "device.slots", "pageable"):
            assert part in line
        memory = tight.empty(len(here))
        engine.copy_in([(memory, here)]).wait(deadline_in(20))
        engine.copy_out([(memory, back)]).wait(deadline_in(20))
        assert back == here
        assert not engine.register(here)
    assert tight.pinned_nbytes == 0


def test_or_it_stops_and_leaves_nothing_pinned(tight: SimDevice) -> None:
    with pytest.raises(DeviceError, match="RLIMIT_MEMLOCK"):
        CopyEngine(tight, slots=2, slot_nbytes=PAGE_NBYTES, on_pin_failure="stop")
    assert tight.pinned_nbytes == 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"slots": 0},
        {"slot_nbytes": 100},
        {"slot_nbytes": PAGE_NBYTES + 1},
        {"max_copies": 0},
        {"slots": 1 << 40},
    ],
)
def test_sizes_that_cannot_be(tight: SimDevice, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        CopyEngine(
            tight,
            slots=sizes.get("slots", 1),
            slot_nbytes=sizes.get("slot_nbytes", PAGE_NBYTES),
            max_copies=sizes.get("max_copies", 1),
        )


def test_a_second_release_takes_nothing_from_who_has_the_slot_now(tight: SimDevice) -> None:
    with closing(PinnedSlots(tight, threading.Condition(), 1, PAGE_NBYTES, "stop")) as slots:
        first = slots.take()
        assert first is not None
        first.release()
        second = slots.take()
        assert second is not None
        with pytest.raises(RuntimeError, match="twice"):
            first.release()
        assert slots.take() is None
        second.release()


def test_requests_are_bounded(tight: SimDevice) -> None:
    tight.fixed_s = 0.05
    memory, here = tight.empty(PAGE_NBYTES), page_aligned(PAGE_NBYTES)
    engine = CopyEngine(tight, slots=1, slot_nbytes=PAGE_NBYTES, max_copies=1, max_requests=3)
    with closing(engine), pytest.raises(OverloadedError, match="try again"):  # noqa: PT012 - one of many
        for _ in range(1000):
            engine.copy_out([(memory, here)])


def test_a_dead_device_fails_everything_with_the_cause() -> None:
    device = GatedDevice()
    memory, here = device.empty(PAGE_NBYTES), page_aligned(PAGE_NBYTES)
    device.out.clear()  # so that none of the copies ends before
    with closing(CopyEngine(device, slots=1, slot_nbytes=PAGE_NBYTES)) as engine:
        tickets = [engine.copy_out([(memory, here)]) for _ in range(3)]
        device.errors.append(RuntimeError("an illegal memory access"))
        device.out.set()
        for ticket in tickets:
            with pytest.raises(DeviceError, match="an illegal memory access"):
                ticket.wait(deadline_in(20))
        assert engine.error is not None
        with pytest.raises(DeviceError, match="failed before"):
            engine.copy_in([(memory, here)])
