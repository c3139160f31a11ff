"""The thin layer over devices: what kvferry asks of one, whichever it is.

Device memory is spoken of as flat bytes (:class:`DeviceBytes`): kvferry only moves KV, so nothing here
computes on a device, and kernels that some back ends lack (sums and compares of ``uint8``, fp8) are never
needed. For ``musa`` and ``cuda`` a :class:`DeviceBytes` is a one-dimensional ``uint8`` tensor.

Copies are asynchronous and ordered only within their stream. Who needs an order between streams records
an event on one and lets the other wait for it; a wait takes the event as it is recorded at that moment,
and a wait for an event that was never recorded does nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

__all__ = ["Device", "DeviceBytes", "Event", "MemoryInfo", "Stream"]


class DeviceBytes(Protocol):
    """Contiguous bytes of a device, or host bytes as the device layer wants them: a slice is a view."""

    def numel(self) -> int:
        """How many bytes."""
        ...

    def __getitem__(self, index: slice, /) -> DeviceBytes: ...


class Event(Protocol):
    """A point in a stream. Recorded again it means the new point; waits queued before keep the old one."""

    def record(self, stream: Any = ..., /) -> None:  # noqa: ANN401 - each back end takes its own streams
        """Set the point behind everything queued in ``stream`` so far."""
        ...

    def query(self) -> bool:
        """Whether the stream has passed the point; true if it was never recorded."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the stream has passed the point. For tests: no deadline exists for it."""
        ...


class Stream(Protocol):
    """A queue of a device's work, done in order."""

    def wait_event(self, event: Any, /) -> None:  # noqa: ANN401 - each back end takes its own events
        """Let what is queued from now on wait, on the device, for the event as it is recorded now."""
        ...

    def query(self) -> bool:
        """Whether everything queued is done."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until everything queued is done. For tests: no deadline exists for it."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of a device in bytes."""

    free_nbytes: int
    total_nbytes: int


class Device(ABC):
    """One device. Thread safe; the current stream and device are a thread's own.

    Attributes:
        kind: As torch calls it, and the name of the plug-in: ``musa``, ``cuda``, ``cpu``.
        index: Which of its kind.
        asynchronous: Whether copies go on behind the caller; else :meth:`copy` returns when it is done.
    """

    kind: ClassVar[str]
    asynchronous: ClassVar[bool] = True
    index: int

    @property
    def name(self) -> str:
        """As people write it: ``musa:0``."""
        return f"{self.kind}:{self.index}"

    @abstractmethod
    def empty(self, nbytes: int) -> DeviceBytes:
        """New memory of the device, with whatever is in it; freed with its last view.

        Not for steady state: an allocation may wait for the whole device.

        Raises:
            CapacityError: If the device has not got so much.
            DeviceError: If the device failed.
        """

    @abstractmethod
    def new_stream(self, priority: int = 0) -> Stream:
        """A stream that is ordered with no other, the default one included."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that this thread's work goes to now."""

    @abstractmethod
    def event(self) -> Event:
        """A new event, not recorded."""

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """While open, this thread's device is this one and its stream ``stream``; the old ones come back."""

    @abstractmethod
    def copy(self, dst: DeviceBytes, src: DeviceBytes, stream: Stream) -> None:
        """Queue a copy of equally many bytes, one side the host's.

        It goes on behind the caller if the host's side lies within *one* registration (see
        :meth:`host_register`); else the call blocks until the bytes are there. Both sides must live, and
        the source keep its bytes, until an event recorded behind the copy has come.

        Raises:
            ValueError: If the sizes differ.
            DeviceError: If the device failed, now or earlier: such errors stay.
        """

    @abstractmethod
    def host_bytes(self, view: memoryview) -> DeviceBytes:
        """Host memory as :meth:`copy` takes it, without a copy; it keeps ``view``'s memory alive.

        Args:
            view: Flat and writable.
        """

    @abstractmethod
    def memory_of(self, owner: Any) -> tuple[DeviceBytes, int]:  # noqa: ANN401 - each back end its own arrays
        """All memory behind an array of this device, without a copy, and the address of its first byte.

        Raises:
            DeviceError: If the array is of another device.
        """

    @abstractmethod
    def host_register(self, view: memoryview) -> None:
        """Pin host memory for asynchronous copies. A whole arena at once: a copy must not cross two.

        Raises:
            DeviceError: If the driver refuses; the reason is the driver's own.
        """

    @abstractmethod
    def host_unregister(self, view: memoryview) -> None:
        """Unpin what was registered under the same address; waits for the whole device."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Free and total memory of the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work of all streams is done. For tests and shut-down."""
