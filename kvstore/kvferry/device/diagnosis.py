"""Which GPUs there are, through the vendors' management libraries; why not, where there are none.

Both libraries speak NVML's language: that of Moore Threads has its calls under the same names. The driver of
a device that the PCI bus shows may be missing; that is told apart from a machine without any.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kvferry.core.diagnosis import Finding, Probe
from kvferry.core.install_hint import install_hint
from kvferry.core.units import format_nbytes
from kvferry.device.registry import DEVICES

__all__ = ["configured_device_probe", "device_probes"]

_PCI: Final = Path("/sys/bus/pci/devices")
_GPU_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")  # displays, 3D, accelerators
_WHY: Final = "device memory is copied from and to it"


@dataclass(frozen=True)
class _Vendor:
    """How a vendor's GPUs are found.

    Attributes:
        kind: As torch calls the device.
        name: Of the vendor.
        module: The management library in Python, with NVML's calls.
        distribution: What brings it.
        pci: The vendor's number on the bus.
        driver: How to get the driver.
        container: How a container is given devices.
    """

    kind: str
    name: str
    module: str
    distribution: str
    pci: str
    driver: str
    container: str


_VENDORS: Final = (
    _Vendor(
        "musa", "Moore Threads", "pymtml", "mthreads-ml-py", "0x1ed5",
        "install the MT driver of the MUSA SDK (it brings libmtml.so), then check with mthreads-gmi",
        "container: --runtime=mthreads, MTHREADS_VISIBLE_DEVICES=all",
    ),
    _Vendor(
        "cuda", "NVIDIA", "pynvml", "nvidia-ml-py", "0x10de",
        "install the NVIDIA driver (it brings libnvidia-ml.so.1), then check with nvidia-smi",
        "container: --gpus all",
    ),
)  # fmt: skip


def device_probes() -> list[tuple[str, str, Probe]]:
    """A probe a kind of device."""
    return [("devices", one.kind, partial(_look, one)) for one in _VENDORS]


def configured_device_probe(option: str, name: str) -> tuple[str, str, Probe]:
    """A probe of a device that the configuration asks for; torch is not loaded for it, which takes too long.

    Args:
        option: What asks for it.
        name: Of the device.
    """

    def look() -> Iterator[Finding]:
        why, lacking = f"the configuration asks for it ({option})", _lacking(name)
        if not lacking:
            yield Finding("tiers", option, f"{name}: torch and the driver are there", why=why)
            return
        remedy = f"do what it says, or {option}=cpu; all that needs no device works"
        yield Finding("tiers", option, f"{name}: {lacking}", "fail", why, remedy)

    return "tiers", option, look


def _lacking(name: str) -> str:
    """What a device needs and is not there, with the remedy; empty: nothing."""
    kind, _, number = name.partition(":")
    vendor = next((one for one in _VENDORS if one.kind == kind), None)
    if vendor is None:
        return "" if kind in DEVICES.names() else f"there is no such device; there are {DEVICES.names()}"
    torch = _version("torch")
    if torch is None:
        return f"torch is not installed: {install_hint('torch')}"
    if tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < (2, 7):
        return f"torch {torch}, 2.7 or newer is needed"
    if kind == "musa":
        musa = _version("torch_musa")
        if musa is None:
            return (
                f"torch_musa is not installed; install that of torch {torch}, which comes with the MUSA SDK"
            )
        if _base(musa) != _base(torch):
            return f"torch_musa {musa} beside torch {torch}: install both of one version"
    elif torch.endswith("+cpu"):
        return f"torch {torch} is built for the CPU: install its CUDA build"
    return _lacking_driver(vendor, int(number) if number.isdecimal() else 0)


def _lacking_driver(vendor: _Vendor, number: int) -> str:
    try:
        library: Any = importlib.import_module(vendor.module)
        library.nvmlInit()
        count = int(library.nvmlDeviceGetCount())
        library.nvmlShutdown()
    except Exception as error:  # noqa: BLE001 - the library's own classes
        return f"the driver does not answer ({error}): {vendor.driver}"
    return "" if number < count else f"the driver has {count} such devices; {vendor.container}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _base(version: str) -> list[str]:
    return re.findall(r"\d+", version)[:3]


def _look(vendor: _Vendor) -> Iterator[Finding]:
    on_bus = _count_on_bus(vendor.pci)
    seen = f"{on_bus} on the PCI bus" if on_bus else "none on the PCI bus"
    try:
        library: Any = importlib.import_module(vendor.module)
    except ImportError as error:
        yield Finding(
            "devices", vendor.kind, f"{seen}; not known, {vendor.module} cannot be imported: {error}",
            "warn" if on_bus else "ok", _WHY, f"pip install {vendor.distribution}",
        )  # fmt: skip
        return
    try:
        library.nvmlInit()
    except Exception as error:  # noqa: BLE001 - its own classes, and OSError where a library is missing
        reason = str(error).splitlines()[0]
        if on_bus:
            yield Finding(
                "devices", vendor.kind, f"{seen}, but the driver is missing or not loaded: {reason}",
                "warn", _WHY, f"{vendor.driver}; {vendor.container}",
            )  # fmt: skip
        else:
            yield Finding("devices", vendor.kind, f"no {vendor.name} device, and no driver", why=_WHY)
        return
    try:
        yield from _list(vendor, library, seen)
    except Exception as error:  # noqa: BLE001 - the library's own classes
        text = f"{seen}; the driver does not answer: {error}"
        yield Finding("devices", vendor.kind, text, "warn", _WHY, vendor.driver)
    finally:
        library.nvmlShutdown()


def _list(vendor: _Vendor, library: Any, seen: str) -> Iterator[Finding]:  # noqa: ANN401
    driver = _text(library.nvmlSystemGetDriverVersion())
    count = int(library.nvmlDeviceGetCount())
    if not count:
        text = f"driver {driver} is there, no device is ({seen})"
        yield Finding("devices", vendor.kind, text, "warn", _WHY, vendor.container)
    for number in range(count):
        handle = library.nvmlDeviceGetHandleByIndex(number)
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        free = int(memory.total) - int(memory.used)
        size = f"{format_nbytes(free)} of {format_nbytes(int(memory.total))} free"
        name = _text(library.nvmlDeviceGetName(handle))
        uuid = _text(library.nvmlDeviceGetUUID(handle))
        text = f"{name}, {size}, driver {driver}, {uuid}"
        yield Finding("devices", f"{vendor.kind}:{number}", text, why=_WHY)


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _count_on_bus(number: str) -> int:
    """How many GPUs of a vendor the kernel sees, with or without a driver."""
    count = 0
    try:
        for place in _PCI.iterdir():
            if (place / "vendor").read_text().strip() == number:
                count += (place / "class").read_text().startswith(_GPU_CLASSES)
    except OSError:  # no PCI bus, or it changes just now
        pass
    return count
