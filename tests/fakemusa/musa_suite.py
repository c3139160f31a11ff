"""The device suite over the fake MUSA device; run in a process of its own by ``test_fakemusa.py``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import DeviceError
from kvferry.device.base import Device, DeviceBytes
from kvferry.device.copy_engine import CopyEngine
from kvferry.device.torch_device import MusaDevice
from kvferry.testing.device_hooks import DeviceHooks
from kvferry.testing.device_pools import DevicePoolSuite
from kvferry.testing.device_tiers import DeviceTierSuite
from kvferry.testing.devices import DeviceSuite

fakemusa: Any = importlib.import_module("fakemusa")  # torch has the device from here on


class _MusaHooks(DeviceHooks):
    def make_device(self) -> Device:
        return MusaDevice()

    def kernel(self, device: Device, target: DeviceBytes, byte: int, seconds: float = 0.0) -> None:
        fakemusa.native.kernel(target, byte, int(seconds * 1e6))

    def gate(self, device: Device) -> Callable[[], None]:
        number = fakemusa.native.gate()
        return lambda: fakemusa.native.open_gates(number)


class TestFakeMusa(_MusaHooks, DeviceSuite):
    def set_latency(self, device: Device, seconds: float) -> None:
        fakemusa.native.set_latency(int(seconds * 1e6), 0)


class TestFakeMusaPool(_MusaHooks, DevicePoolSuite):
    def set_latency(self, device: Device, seconds: float) -> None:
        fakemusa.native.set_jitter(int(seconds * 1e6))


class TestFakeMusaTier(_MusaHooks, DeviceTierSuite):
    """Blocks in spare memory of the card."""


def test_the_engine_gives_the_same_tokens_with_a_pool_four_times_too_small(tmp_path: Path) -> None:
    """Evicts, demotes and promotes all the time; the weights are on the device too."""
    shared = _shared("test_device_kv")
    host = shared.tiny(tmp_path)
    shared.check_same_tokens(host, host.to("musa:0"), MusaDevice())


def test_workers_stream_out_of_pages_and_land_in_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill and decode with the model and the pages on the device, layer by layer."""
    copy, scratch = MusaDevice.copy, torch.empty(64, dtype=torch.uint8, device="musa")

    def slow(self: MusaDevice, dst: Any, src: Any, stream: Any) -> None:
        with self.use(stream):  # so that nothing has landed yet when the handoff comes
            fakemusa.native.kernel(scratch, 0, 5000)
        copy(self, dst, src, stream)

    monkeypatch.setattr(MusaDevice, "copy", slow)
    host = _shared("test_device_kv").tiny(tmp_path / "tiny")
    _shared("test_worker_device").check_workers(tmp_path / "tiny", host, "musa:0")


def _shared(name: str) -> Any:
    """A module of the engine's tests."""
    path = Path(__file__).parents[1] / "unit" / "engine" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_that_the_card_lacks_are_refused() -> None:
    """So that nothing in kvferry can need them (C115): the suite passes all the same."""
    memory = torch.empty(16, dtype=torch.uint8, device="musa")
    with pytest.raises(RuntimeError, match="not supported"):
        memory.sum()
    with pytest.raises(RuntimeError, match="not supported"):
        memory.eq(memory)


def test_from_one_device_to_another_by_the_host() -> None:
    """C117: staged, exact, and the current device is as before; a direct copy would poison the process."""
    here = page_aligned(4096)
    here[:] = bytes(range(256)) * 16
    devices = [MusaDevice(index) for index in (0, 1)]
    engines = [CopyEngine(device, slots=1, slot_nbytes=4096) for device in devices]
    memory = [device.empty(4096) for device in devices]
    between, back = page_aligned(4096), page_aligned(4096)
    soon = deadline_in(20)
    engines[0].copy_in([(memory[0], here)]).wait(soon)
    engines[0].copy_out([(memory[0], between)]).wait(soon)
    engines[1].copy_in([(memory[1], between)]).wait(soon)
    engines[1].copy_out([(memory[1], back)]).wait(soon)
    assert back == here
    assert torch.get_device_module("musa").current_device() == 0
    for engine in engines:
        engine.close()


def test_a_dead_device_fails_everything_with_the_cause() -> None:
    device = MusaDevice()
    engine = CopyEngine(device, slots=1, slot_nbytes=1 << 16)
    memory, here = device.empty(1 << 16), page_aligned(1 << 16)
    fakemusa.native.set_latency(50_000, 0)
    tickets = [engine.copy_out([(memory, here)]) for _ in range(3)]
    fakemusa.native.kill(True)
    try:
        for ticket in tickets:
            with pytest.raises(DeviceError, match="illegal memory access"):
                ticket.wait(deadline_in(20))
        with pytest.raises(DeviceError, match="failed before"):
            engine.copy_in([(memory, here)])
        engine.close()
    finally:
        fakemusa.native.kill(False)
        fakemusa.native.set_latency(0, 0)


def test_the_memory_is_torchs_own() -> None:
    """An engine's tensors are seen as bytes without a copy."""
    tensor = torch.arange(64, dtype=torch.float32).to("musa")
    flat = cast("DeviceBytes", tensor.view(torch.uint8).reshape(-1))
    device, here = MusaDevice(), page_aligned(256)
    engine = CopyEngine(device, slots=1, slot_nbytes=4096)
    event = device.event()
    event.record(device.current_stream())
    engine.copy_out([(flat, here)], after=[event]).wait(deadline_in(20))
    assert torch.frombuffer(here, dtype=torch.float32).tolist() == list(range(64))
    engine.close()


def test_a_real_devices_gates_and_slow_copies_are_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``kvferry bench device --check`` has them: so much of it, and on the right stream."""
    monkeypatch.setenv("KVFERRY_CHECK_DEVICE", "musa:0")
    real: Any = importlib.import_module("kvferry.testing.real_device")
    hooks = real.TestDevice()
    device, done = hooks.make_device(), []
    current = torch.get_device_module("musa").current_stream
    monkeypatch.setattr(real._work(), "_spin", lambda cycles: done.append((cycles, current())))
    monkeypatch.setattr(real._work(), "_unit_s", 0.001)
    memory, stream, seen = device.empty(1 << 17), device.new_stream(), page_aligned(1 << 17)
    with hooks.shut_gate(device):
        hooks.kernel(device, memory, 7, 0.25)
    device.synchronize()
    hooks.set_latency(device, 0.2)
    device.copy(device.host_bytes(seen), memory, stream)
    hooks.set_latency(device, 0.0)
    device.synchronize()
    assert set(seen) == {7}
    assert done == [(1500 * 10**6, current()), (250 * 10**6, current()), (200 * 10**6, stream)]
