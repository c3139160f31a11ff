from __future__ import annotations

from collections.abc import Callable

from kvferry.device.base import Device, DeviceBytes
from kvferry.device.cpu import CpuDevice
from kvferry.testing.devices import DeviceSuite
from kvferry.testing.sim_device import SimDevice


class TestCpu(DeviceSuite):
    def make_device(self) -> Device:
        return CpuDevice()


class TestSim(DeviceSuite):
    def make_device(self) -> Device:
        return SimDevice()

    def end_device(self, device: Device) -> None:
        assert isinstance(device, SimDevice)
        device.synchronize()
        device.close()

    def kernel(self, device: Device, target: DeviceBytes, byte: int, seconds: float = 0.0) -> None:
        assert isinstance(device, SimDevice)
        device.kernel(target, byte, seconds)

    def gate(self, device: Device) -> Callable[[], None]:
        assert isinstance(device, SimDevice)
        return device.gate().set

    def set_latency(self, device: Device, seconds: float) -> None:
        assert isinstance(device, SimDevice)
        device.fixed_s = seconds
