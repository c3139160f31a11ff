"""MUSA and CUDA through torch's own device modules.

``torch_musa`` is never imported by name: torch loads it through its backend entry point. Calls that exist
under one name everywhere are used (``torch.get_device_module``); the memory calls of ``torch.accelerator``
are not, since several releases of torch_musa lack them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, cast

from kvferry.core.buffers import address_of
from kvferry.core.errors import CapacityError, DeviceError, PluginUnavailableError
from kvferry.core.install_hint import install_hint
from kvferry.core.units import format_nbytes
from kvferry.device.base import Device, DeviceBytes, Event, MemoryInfo, Stream

try:
    import torch
except ImportError as error:
    raise PluginUnavailableError(f"devices need torch >= 2.7: {install_hint('torch')}") from error

__all__ = ["CudaDevice", "MusaDevice", "TorchDevice"]

_OLDEST: Final = (2, 7)


@contextlib.contextmanager
def _mapped(what: str) -> Iterator[None]:
    """Torch's errors, all of them ``RuntimeError``, as ours."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{what}: {str(error).splitlines()[0]}") from error


class TorchDevice(Device):
    """A device that torch has a module for.

    Args:
        index: Which of its kind, as torch counts them (``MUSA_VISIBLE_DEVICES`` renumbers).

    Raises:
        PluginUnavailableError: If torch is too old, or its build or plug-in for the device is missing.
        DeviceError: If there is no such device.
    """

    remedy: ClassVar[str]
    """How a torch with this device is had."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self._mod: Any = _module(self.kind, self.remedy)
        count = int(self._mod.device_count())
        if not 0 <= index < count:
            raise DeviceError(f"{self.name}: there are {count} such devices; see `kvferry doctor`")
        self._dev = torch.device(self.kind, index)

    def empty(self, nbytes: int) -> DeviceBytes:
        """See :meth:`Device.empty`."""
        with _mapped(f"{self.name}: {nbytes} bytes of memory"):
            try:
                return cast("DeviceBytes", torch.empty(nbytes, dtype=torch.uint8, device=self._dev))
            except torch.OutOfMemoryError as error:
                memory = self.memory()
                raise CapacityError(
                    f"{self.name}: {format_nbytes(nbytes)} asked, {format_nbytes(memory.free_nbytes)} of "
                    f"{format_nbytes(memory.total_nbytes)} are free; configure fewer blocks, or leave more "
                    "beside the engine's own pool"
                ) from error

    def new_stream(self, priority: int = 0) -> Stream:
        """See :meth:`Device.new_stream`; a pool of 32 a device and priority stands behind it."""
        with _mapped(f"{self.name}: a stream"):
            return cast("Stream", self._mod.Stream(device=self._dev, priority=priority))

    def current_stream(self) -> Stream:
        """See :meth:`Device.current_stream`."""
        return cast("Stream", self._mod.current_stream(self._dev))

    def event(self) -> Event:
        """See :meth:`Device.event`; without timing, which costs more."""
        return cast("Event", self._mod.Event(enable_timing=False))

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """See :meth:`Device.use`."""
        return cast("AbstractContextManager[object]", self._mod.stream(stream))

    def copy(self, dst: DeviceBytes, src: DeviceBytes, stream: Stream) -> None:
        """See :meth:`Device.copy`."""
        if dst.numel() != src.numel():
            raise ValueError(f"copy of {src.numel()} bytes into {dst.numel()}")
        with _mapped(f"{self.name}: a copy of {src.numel()} bytes"), self._mod.stream(stream):
            cast("torch.Tensor", dst).copy_(cast("torch.Tensor", src), non_blocking=True)

    def host_bytes(self, view: memoryview) -> DeviceBytes:
        """See :meth:`Device.host_bytes`."""
        return cast("DeviceBytes", torch.frombuffer(view, dtype=torch.uint8))

    def memory_of(self, owner: Any) -> tuple[DeviceBytes, int]:  # noqa: ANN401
        """See :meth:`Device.memory_of`: the storage of a tensor."""
        if not isinstance(owner, torch.Tensor) or owner.device != self._dev:
            where = getattr(owner, "device", type(owner).__name__)
            raise DeviceError(f"{self.name}: an array on {where} is no memory of it")
        storage = owner.untyped_storage()
        count = storage.nbytes() // owner.element_size()
        with _mapped(f"{self.name}: a view of {storage.nbytes()} bytes"):
            flat = owner.as_strided((count,), (1,), 0).view(torch.uint8)
        return cast("DeviceBytes", flat), storage.data_ptr()

    def host_register(self, view: memoryview) -> None:
        """See :meth:`Device.host_register`: ``cudaHostRegister`` or its namesake."""
        with _mapped(f"{self.name}: pinning {len(view)} bytes"), self._mod.device(self._dev):
            _succeed(self._runtime("HostRegister")(address_of(view), len(view), 0))

    def host_unregister(self, view: memoryview) -> None:
        """See :meth:`Device.host_unregister`."""
        with _mapped(f"{self.name}: unpinning {len(view)} bytes"), self._mod.device(self._dev):
            _succeed(self._runtime("HostUnregister")(address_of(view)))

    def memory(self) -> MemoryInfo:
        """See :meth:`Device.memory`."""
        with _mapped(f"{self.name}: asking for its memory"):
            return MemoryInfo(*map(int, self._mod.mem_get_info(self._dev)))

    def synchronize(self) -> None:
        """See :meth:`Device.synchronize`."""
        with _mapped(f"{self.name}: waiting for it"):
            self._mod.synchronize(self._dev)

    def _runtime(self, call: str) -> Any:  # noqa: ANN401 - a function of the vendor's runtime
        """A function of the vendor's runtime, which torch hands out as ``cudart()`` or ``musart()``."""
        return getattr(getattr(self._mod, f"{self.kind}rt")(), f"{self.kind}{call}")


class CudaDevice(TorchDevice):
    """An NVIDIA GPU."""

    kind: ClassVar[str] = "cuda"
    remedy: ClassVar[str] = "install torch's CUDA build and the NVIDIA driver"


class MusaDevice(TorchDevice):
    """A Moore Threads GPU, the MTT S5000 first."""

    kind: ClassVar[str] = "musa"
    remedy: ClassVar[str] = (
        "install torch_musa of the same version as torch (2.7.1 to 2.11.0; wheels for Python 3.10 and 3.12 "
        "come with the MUSA SDK, not from PyPI)"
    )


def _module(kind: str, remedy: str) -> Any:  # noqa: ANN401 - a module of torch's
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < _OLDEST:
        raise PluginUnavailableError(f"device {kind}: torch {torch.__version__}, 2.7 or newer is needed")
    try:
        module: Any = torch.get_device_module(kind)
    except (RuntimeError, AttributeError, ValueError) as error:
        raise PluginUnavailableError(
            f"device {kind}: torch {torch.__version__} knows no {kind}; {remedy}"
        ) from error
    if not module.is_available():
        raise PluginUnavailableError(
            f"device {kind}: torch {torch.__version__} finds none; {remedy}, then see `kvferry doctor`"
        )
    return module


def _succeed(result: object) -> None:
    """Raise for a code other than success; the runtimes give an enumeration or a number."""
    code = int(getattr(result, "value", result))  # type: ignore[call-overload]
    if code:
        raise RuntimeError(f"error {code} of the driver ({result})")
