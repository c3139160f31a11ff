from __future__ import annotations

import os

import pytest

from kvferry.device.base import Device
from kvferry.device.cpu import CpuDevice
from kvferry.testing.device_hooks import SimHooks
from kvferry.testing.device_pools import DevicePoolSuite
from kvferry.testing.sim_device import SimDevice


class TestCpu(DevicePoolSuite):
    def make_device(self) -> Device:
        return CpuDevice()


class TestSim(SimHooks, DevicePoolSuite):
    def set_latency(self, device: Device, seconds: float) -> None:
        assert isinstance(device, SimDevice)
        device.jitter_s = seconds

    @pytest.mark.soak
    @pytest.mark.timeout(3600)
    def test_ten_thousand_times(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("KVFERRY_POOL_STRESS", "10000"), ("KVFERRY_C004_RUNS", "200")):
            monkeypatch.setenv(name, os.environ.get(name, value))
        self.test_random_saves_loads_evictions_and_reuses(device)
        self.set_latency(device, 0.001)
        self.test_c004_a_save_right_behind_the_kernel_is_never_stale(device)
