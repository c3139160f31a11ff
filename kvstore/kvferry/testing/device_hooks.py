"""What the suites of devices and of pools on them ask of whoever runs them; see :class:`DeviceHooks`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvferry.core.buffers import page_aligned
from kvferry.device.base import Device, DeviceBytes
from kvferry.testing.sim_device import SimDevice

__all__ = ["DeviceHooks", "SimHooks", "filled"]


class DeviceHooks:
    """The device of a suite, and what its tests do to it.

    A device that is not asynchronous needs :meth:`make_device` alone; the tests of what can go wrong between
    streams are skipped for it.
    """

    @abstractmethod
    def make_device(self) -> Device:
        """The device; it may be the same one for every test."""

    def end_device(self, device: Device) -> None:
        """Called after each test."""
        device.synchronize()

    def kernel(self, device: Device, target: DeviceBytes, byte: int, seconds: float = 0.0) -> None:
        """Queue on the current stream what takes ``seconds`` and then writes ``byte`` all over ``target``."""
        del seconds
        source = device.host_bytes(filled(target.numel(), byte))
        device.copy(target, source, device.current_stream())

    def gate(self, device: Device) -> Callable[[], None]:
        """Let the current stream stand still behind what is queued there, until the result is called."""
        raise NotImplementedError

    @contextmanager
    def shut_gate(self, device: Device) -> Iterator[Callable[[], None]]:
        """A :meth:`gate`, which is open at the end at the latest."""
        open_gate = self.gate(device)
        try:
            yield open_gate
        finally:
            open_gate()

    def set_latency(self, device: Device, seconds: float) -> None:
        """Let every copy take so long, or up to so long at random, as the suite says."""


class SimHooks(DeviceHooks):
    """Those of the simulated device, but for :meth:`set_latency`. Stands before the suite among the bases."""

    def make_device(self) -> Device:
        """A new one."""
        return SimDevice()

    def end_device(self, device: Device) -> None:
        """Its threads end."""
        assert isinstance(device, SimDevice)
        device.synchronize()
        device.close()

    def kernel(self, device: Device, target: DeviceBytes, byte: int, seconds: float = 0.0) -> None:
        """One that the device makes."""
        assert isinstance(device, SimDevice)
        device.kernel(target, byte, seconds)

    def gate(self, device: Device) -> Callable[[], None]:
        """One of the current stream."""
        assert isinstance(device, SimDevice)
        return device.gate().set


def filled(nbytes: int, byte: int) -> memoryview:
    """Page-aligned host memory, all of it ``byte``."""
    view = page_aligned(nbytes)
    view[:] = bytes([byte]) * nbytes
    return view
