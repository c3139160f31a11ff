"""The host as a device: the same calls without a GPU. Copies are done when the call returns."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from kvferry.core.arena import available_memory
from kvferry.core.buffers import ByteArray, page_aligned, write_into
from kvferry.core.errors import CapacityError, DeviceError
from kvferry.device.base import Device, DeviceBytes, Event, MemoryInfo, Stream

__all__ = ["CpuDevice", "HostBytes"]


class HostBytes:
    """Host memory in the shape of :class:`~kvferry.device.base.DeviceBytes`; a slice is a view."""

    __slots__ = ("array",)

    def __init__(self, array: ByteArray) -> None:
        self.array = array

    def numel(self) -> int:
        """How many bytes."""
        return self.array.nbytes

    def __getitem__(self, index: slice, /) -> HostBytes:
        return HostBytes(self.array[index])


class _Now:
    """Stream and event of a device whose work is done when it is queued."""

    def record(self, stream: object = None, /) -> None:
        """Nothing is open."""

    def wait_event(self, event: object, /) -> None:
        """Nothing is open."""

    def query(self) -> bool:
        """Everything is done."""
        return True

    def synchronize(self) -> None:
        """Nothing is open."""


_NOW = _Now()


class CpuDevice(Device):
    """The host's memory as device memory."""

    kind: ClassVar[str] = "cpu"
    asynchronous: ClassVar[bool] = False

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def empty(self, nbytes: int) -> HostBytes:
        """See :meth:`Device.empty`; page-aligned and populated."""
        try:
            return HostBytes(np.frombuffer(page_aligned(nbytes), np.uint8))
        except OSError as error:
            free = available_memory()
            raise CapacityError(f"{nbytes} bytes of host memory, {free} are available: {error}") from error

    def new_stream(self, priority: int = 0) -> Stream:
        """See :meth:`Device.new_stream`."""
        del priority
        return _NOW

    def current_stream(self) -> Stream:
        """See :meth:`Device.current_stream`."""
        return _NOW

    def event(self) -> Event:
        """See :meth:`Device.event`."""
        return _NOW

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """See :meth:`Device.use`."""
        return contextlib.nullcontext(stream)

    def copy(self, dst: DeviceBytes, src: DeviceBytes, stream: Stream) -> None:
        """See :meth:`Device.copy`; the GIL is released meanwhile."""
        del stream
        assert isinstance(dst, HostBytes)
        assert isinstance(src, HostBytes)
        if dst.numel() != src.numel():
            raise ValueError(f"copy of {src.numel()} bytes into {dst.numel()}")
        write_into(dst.array, 0, src.array.data)

    def host_bytes(self, view: memoryview) -> HostBytes:
        """See :meth:`Device.host_bytes`."""
        return HostBytes(np.frombuffer(view, np.uint8))

    def memory_of(self, owner: Any) -> tuple[HostBytes, int]:  # noqa: ANN401
        """See :meth:`Device.memory_of`; of :class:`HostBytes` only."""
        if not isinstance(owner, HostBytes):
            raise DeviceError(f"{self.name}: {type(owner).__name__} is no memory of it")
        return owner, int(owner.array.ctypes.data)

    def host_register(self, view: memoryview) -> None:
        """Nothing to do."""

    def host_unregister(self, view: memoryview) -> None:
        """Nothing to do."""

    def memory(self) -> MemoryInfo:
        """Of the host: what is available, and all."""
        return MemoryInfo(available_memory(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def synchronize(self) -> None:
        """Nothing is open."""
