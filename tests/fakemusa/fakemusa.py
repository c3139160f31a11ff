"""The fake MUSA device: builds the C++ backend once and gives torch a ``musa`` module like torch_musa's.

One import changes torch for the whole process, so it is imported only in processes of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration, cpp_extension

_SOURCE = Path(__file__).with_name("fakemusa.cpp")
_CACHE = Path(__file__).parents[2] / ".cache"


def build() -> Path:
    """The extension, compiled unless it was before with the same source, torch and Python."""
    what = f"{_SOURCE.read_text()}{torch.__version__}{sys.version}"
    target = _CACHE / f"fakemusa-{hashlib.sha256(what.encode()).hexdigest()[:16]}" / "fakemusa_c.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")
    abi = int(torch.compiled_with_cxx11_abi())
    lib = Path(torch.__file__).with_name("lib")
    command = [
        "g++", "-O1", "-g0", "-fPIC", "-shared", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        "-DTORCH_EXTENSION_NAME=fakemusa_c", *(f"-I{path}" for path in cpp_extension.include_paths()),
        f"-I{sysconfig.get_paths()['include']}", str(_SOURCE), "-o", str(unfinished),
        f"-L{lib}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{lib}",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=900)
    unfinished.rename(target)
    return target


def load() -> Any:
    """The built extension as a module."""
    spec = importlib.util.spec_from_file_location("fakemusa_c", build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = load()
backend_registration.rename_privateuse1_backend("musa")


class Stream(torch.Stream):
    def __new__(cls, device: object = None, priority: int = 0, **kw: Any) -> Any:
        if "stream_id" in kw:
            return super().__new__(cls, **kw)
        return super().__new__(cls, device=torch.device("musa", _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(
            cls, device="musa", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


class _Runtime:
    """The part of MUSA's runtime that torch_musa hands out."""

    @staticmethod
    def musaHostRegister(address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return int(native.host_register(address, nbytes))

    @staticmethod
    def musaHostUnregister(address: int) -> int:  # noqa: N802
        return int(native.host_unregister(address))


def _index(device: object) -> int:
    if device is None:
        return int(native.get_device())
    if isinstance(device, int):
        return device
    made = torch.device(device)  # type: ignore[call-overload]
    return int(native.get_device()) if made.index is None else int(made.index)


@contextlib.contextmanager
def _stream(stream: torch.Stream) -> Iterator[torch.Stream]:
    with stream:
        yield stream


@contextlib.contextmanager
def _device(device: object) -> Iterator[None]:
    before = native.get_device()
    native.set_device(_index(device))
    try:
        yield
    finally:
        native.set_device(before)


def _module() -> types.ModuleType:
    module: Any = types.ModuleType("torch.musa")
    module.Stream, module.Event, module.stream, module.device = Stream, Event, _stream, _device
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device = native.device_count, native.get_device
    module.set_device = lambda device: native.set_device(_index(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.synchronize = lambda device=None: native.synchronize(_index(device))
    module.mem_get_info = lambda device=None: native.mem_info(_index(device))
    module.musart = lambda: _Runtime
    module.empty_cache = lambda: None
    module._sleep = lambda cycles: native.kernel(_SCRATCH, 0, cycles // 1000)  # at a GHz
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module._lazy_init = lambda: None
    return module  # type: ignore[no-any-return]


torch._register_device_module("musa", _module())  # type: ignore[no-untyped-call]
_SCRATCH = torch.empty(64, dtype=torch.uint8, device="musa")
backend_registration.generate_methods_for_privateuse1_backend(for_storage=False)
