from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.core.diagnosis import Finding
from kvferry.device import device_probes, diagnosis

_KINDS = {"musa": ("pymtml", "0x1ed5"), "cuda": ("pynvml", "0x10de")}


def _found(kind: str) -> list[Finding]:
    return [one for _, name, probe in device_probes() if name == kind for one in probe()]


@pytest.fixture(autouse=True)
def bus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(diagnosis, "_PCI", tmp_path)
    return tmp_path


def _plug(bus: Path, vendor: str, kind: str = "0x030200") -> None:
    place = bus / f"0000:0{len(list(bus.iterdir()))}:00.0"
    place.mkdir()
    (place / "vendor").write_text(f"{vendor}\n")
    (place / "class").write_text(f"{kind}\n")


def _library(
    monkeypatch: pytest.MonkeyPatch, module: str, devices: int, error: Exception | None = None
) -> list[str]:
    calls: list[str] = []

    def init() -> None:
        calls.append("init")
        if error is not None:
            raise error

    fake = SimpleNamespace(
        nvmlInit=init,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlSystemGetDriverVersion=lambda: b"3.1",
        nvmlDeviceGetCount=lambda: devices,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetName=lambda _handle: "MTT S5000",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMemoryInfo=lambda _handle: SimpleNamespace(total=80 << 30, used=16 << 30),
    )
    monkeypatch.setitem(sys.modules, module, fake)
    return calls


@pytest.mark.parametrize("kind", _KINDS)
def test_devices_are_listed(monkeypatch: pytest.MonkeyPatch, bus: Path, kind: str) -> None:
    module, vendor = _KINDS[kind]
    calls = _library(monkeypatch, module, 2)
    _plug(bus, vendor)
    found = _found(kind)
    assert [one.name for one in found] == [f"{kind}:0", f"{kind}:1"]
    assert "MTT S5000, 64 GiB of 80 GiB free, driver 3.1, GPU-1" in found[1].value
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("plugged", [True, False])
def test_a_missing_driver_is_told_from_a_missing_device(
    monkeypatch: pytest.MonkeyPatch, bus: Path, kind: str, plugged: bool
) -> None:
    module, vendor = _KINDS[kind]
    calls = _library(monkeypatch, module, 0, OSError("cannot open libx.so.1\nmore"))
    _plug(bus, "0x8086")
    _plug(bus, vendor, "0x020000")  # a NIC of that vendor is no GPU
    if plugged:
        _plug(bus, vendor)
    (found,) = _found(kind)
    assert found.level == ("warn" if plugged else "ok")
    assert ("driver is missing or not loaded: cannot open libx.so.1" in found.value) == plugged
    assert bool(found.remedy) == plugged
    assert calls == ["init"]


def test_a_driver_without_a_device_points_to_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    _library(monkeypatch, "pynvml", 0)
    (found,) = _found("cuda")
    assert (found.level, found.remedy) == ("warn", "container: --gpus all")


def test_a_driver_that_stops_answering_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _library(monkeypatch, "pymtml", 1)

    def lost(_handle: object) -> None:
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr(sys.modules["pymtml"], "nvmlDeviceGetMemoryInfo", lost)
    (found,) = _found("musa")
    assert "does not answer: GPU is lost" in found.value
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize("plugged", [True, False])
def test_without_the_python_library(monkeypatch: pytest.MonkeyPatch, bus: Path, plugged: bool) -> None:
    monkeypatch.setitem(sys.modules, "pymtml", None)
    if plugged:
        _plug(bus, "0x1ed5")
    (found,) = _found("musa")
    assert found.remedy == "pip install mthreads-ml-py"
    assert found.level == ("warn" if plugged else "ok")


def test_the_real_libraries_never_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for kind in _KINDS:
        assert _found(kind)


@pytest.mark.parametrize(
    ("name", "versions", "text"),
    [
        ("cpu", {}, ""),
        ("tpu:0", {}, "there is no such device"),
        ("musa:0", {}, "torch is not installed"),
        ("musa:0", {"torch": "2.6.0"}, "torch 2.6.0, 2.7 or newer is needed"),
        ("musa:0", {"torch": "2.9.1"}, "torch_musa is not installed; install that of torch 2.9.1"),
        ("musa:0", {"torch": "2.9.1", "torch_musa": "2.7.1"}, "torch_musa 2.7.1 beside torch 2.9.1"),
        ("cuda:0", {"torch": "2.9.1+cpu"}, "torch 2.9.1+cpu is built for the CPU"),
        ("cuda:0", {"torch": "2.9.1"}, "the driver does not answer (no libx.so)"),
        ("musa:2", {"torch": "2.9.1", "torch_musa": "2.9.1.post2"}, "the driver has 2 such devices"),
        ("musa:1", {"torch": "2.9.1", "torch_musa": "2.9.1.post2"}, ""),
    ],
)
def test_what_a_configured_device_lacks_is_said_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, versions: dict[str, str], text: str
) -> None:
    monkeypatch.setattr(diagnosis, "_version", versions.get)
    _library(monkeypatch, "pymtml", 2)
    _library(monkeypatch, "pynvml", 0, OSError("no libx.so"))
    _, _, probe = diagnosis.configured_device_probe("model.device", name)
    (found,) = probe()
    assert found.level == ("fail" if text else "ok")
    assert text in found.value
    assert not text or "model.device=cpu" in found.remedy
