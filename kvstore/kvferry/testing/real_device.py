"""The suites of devices, pools and tiers on a device of this machine, for ``kvferry bench device --check``.

Run by pytest with the device's name in ``KVFERRY_CHECK_DEVICE``. What a simulated device lets a test do to it
is done by work of the device itself here: a kernel that takes a while is a spin, or so many products of
matrices, a gate is one that takes longer than what the test looks at, and a slow copy stands behind one.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import random
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from kvferry.device import Device, open_device
from kvferry.device.base import DeviceBytes, Stream
from kvferry.testing.device_hooks import DeviceHooks
from kvferry.testing.device_pools import DevicePoolSuite
from kvferry.testing.device_tiers import DeviceTierSuite
from kvferry.testing.devices import DeviceSuite

__all__ = ["DEVICE_VARIABLE", "RealHooks", "TestDevice", "TestPool", "TestTier"]

DEVICE_VARIABLE: Final = "KVFERRY_CHECK_DEVICE"
_GATE_S: Final = 1.5
_ROWS: Final = 4096
_SPIN: Final = 1_000_000
_LARGE: Final = 1 << 30
_SOURCE: Final = 1 << 16


class _Work:
    """What keeps a stream of a torch device busy for a while."""

    def __init__(self, device: Device) -> None:
        torch: Any = importlib.import_module("torch")
        self._spin: Callable[[int], None] | None = getattr(
            torch.get_device_module(device.kind), "_sleep", None
        )
        if self._spin is None:
            self._a = torch.rand(_ROWS, _ROWS, dtype=torch.bfloat16, device=device.name)
            self._b, self._matmul = torch.empty_like(self._a), torch.matmul
        for _ in range(2):  # the first time it is loaded
            device.synchronize()
            start = time.perf_counter()
            self._do(8)
            device.synchronize()
            self._unit_s = max(1e-6, (time.perf_counter() - start) / 8)

    def __call__(self, seconds: float) -> None:
        """Queue so much of it on the current stream."""
        if seconds:
            self._do(max(1, round(seconds / self._unit_s)))

    def _do(self, units: int) -> None:
        if self._spin is not None:
            self._spin(units * _SPIN)
            return
        for _ in range(units):
            self._matmul(self._a, self._a, out=self._b)


@functools.cache
def _device() -> Device:
    return open_device(os.environ.get(DEVICE_VARIABLE, "cpu"))


@functools.cache
def _work() -> _Work:
    return _Work(_device())


class _Latency:
    """Copies of the device, each behind some work."""

    def __init__(self, device: Device) -> None:
        self._device, self._copy = device, device.copy
        self.seconds: Callable[[], float] = lambda: 0.0
        device.copy = self.copy  # type: ignore[method-assign]

    def copy(self, dst: DeviceBytes, src: DeviceBytes, stream: Stream) -> None:
        """See :meth:`Device.copy`."""
        if seconds := self.seconds():
            with self._device.use(stream):
                _work()(seconds)
        self._copy(dst, src, stream)


@functools.cache
def _latency() -> _Latency:
    return _Latency(_device())


@functools.cache
def _sources() -> list[Any]:
    """Memory of the device that is full of a byte, for each byte; made before a test looks at anything."""
    found: list[Any] = [_device().empty(_SOURCE) for _ in range(256)]
    for byte, source in enumerate(found):
        source.fill_(byte)
    _device().synchronize()
    return found


class RealHooks(DeviceHooks):
    """Those of a device of this machine, whichever it is."""

    def make_device(self) -> Device:
        """The same one for every test."""
        if _device().asynchronous:
            _work()
            _sources()
        return _device()

    def kernel(self, device: Device, target: DeviceBytes, byte: int, seconds: float = 0.0) -> None:
        """Work, and a copy on the device."""
        if not device.asynchronous:
            super().kernel(device, target, byte, seconds)
            return
        _work()(seconds)
        for start in range(0, target.numel(), _SOURCE):
            part: Any = target[start : start + _SOURCE]
            part.copy_(_sources()[byte][: part.numel()], non_blocking=True)

    def gate(self, device: Device) -> Callable[[], None]:
        """Work that takes longer than a test looks at what stands behind it; opening it waits for its end."""
        _work()(_GATE_S)
        event = device.event()
        event.record(device.current_stream())
        return event.synchronize


class TestDevice(RealHooks, DeviceSuite):
    """The device, the copy engine, pages, jobs and streams."""

    def set_latency(self, device: Device, seconds: float) -> None:
        """Each copy stands behind so much work."""
        if device.asynchronous:
            _latency().seconds = lambda: seconds

    def test_memory_is_counted(self, device: Device) -> None:
        """As torch's allocator counts it, which keeps what is freed until it is told."""
        if not device.asynchronous:
            super().test_memory_is_counted(device)
            return
        torch: Any = importlib.import_module("torch")
        module = torch.get_device_module(device.kind)
        module.empty_cache()
        before = device.memory()
        assert 0 < before.free_nbytes <= before.total_nbytes
        memory = device.empty(min(_LARGE, before.free_nbytes // 4))
        taken = memory.numel()
        assert (
            device.memory().free_nbytes <= before.free_nbytes - taken // 2
        )  # others may free some meanwhile
        del memory
        gc.collect()
        module.empty_cache()

    def test_pageable_memory_blocks_and_pinned_does_not(self, lazy: Device) -> None:
        """That of 64 KiB may, or may not."""
        pytest.skip(f"{lazy.name}: a small copy of pageable memory need not block")

    def test_freed_memory_is_somebody_elses_at_once(self, lazy: Device) -> None:
        """Nobody writes into it at once."""
        pytest.skip(f"{lazy.name}: torch's allocator leaves freed memory as it was")


class TestPool(RealHooks, DevicePoolSuite):
    """The pool."""

    def set_latency(self, device: Device, seconds: float) -> None:
        """Each copy stands behind up to so much work."""
        if device.asynchronous:
            _latency().seconds = lambda: random.random() * seconds


class TestTier(RealHooks, DeviceTierSuite):
    """The tier."""
