from __future__ import annotations

import pytest

from kvferry.core.errors import CapacityError, ConfigError
from kvferry.device.base import Device
from kvferry.device.cpu import CpuDevice
from kvferry.device.registry import open_device
from kvferry.store.device import DeviceTier, DeviceTierOptions
from kvferry.store.tier import ReadOutcome, Tier, TierNamespace
from kvferry.testing.blocks import wait_until
from kvferry.testing.device_hooks import SimHooks
from kvferry.testing.device_tiers import DeviceTierSuite
from kvferry.testing.sim_device import SimDevice
from kvferry.testing.tiers_common import SPEC, chain, opened, outcomes, read, write


class TestCpu(DeviceTierSuite):
    def make_device(self) -> Device:
        return CpuDevice()


class TestSim(SimHooks, DeviceTierSuite):
    def test_a_dead_device_is_told_and_fails_as_results(self, tier: Tier, namespace: TierNamespace) -> None:
        assert isinstance(tier, DeviceTier)
        keys = chain(namespace, 1, 2)
        write(tier, namespace, keys)
        device = tier.device
        assert isinstance(device, SimDevice)
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
    device = SimDevice(total_nbytes=1 << 20)
    with pytest.raises(CapacityError, match=r"tier far: it takes 64 MiB .* 1 MiB are free: lower its"):
        DeviceTier("far", options, device)
    device.close()


def test_a_device_that_is_not_there_is_said_with_the_tier_and_the_remedy() -> None:
    options = {"device": "tpu:0", "capacity": "1MiB"}
    with pytest.raises(
        ConfigError, match=r"tier far: its device cannot be had: .*tpu.*; everything else works"
    ):
        DeviceTier.from_options("far", options)
