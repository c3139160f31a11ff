from __future__ import annotations

from kvferry.device.base import Device
from kvferry.device.cpu import CpuDevice
from kvferry.testing.device_hooks import SimHooks
from kvferry.testing.devices import DeviceSuite
from kvferry.testing.sim_device import SimDevice


class TestCpu(DeviceSuite):
    def make_device(self) -> Device:
        return CpuDevice()


class TestSim(SimHooks, DeviceSuite):
    def set_latency(self, device: Device, seconds: float) -> None:
        assert isinstance(device, SimDevice)
        device.fixed_s = seconds
