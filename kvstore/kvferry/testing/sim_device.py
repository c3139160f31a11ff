"""A simulated device in plain Python: asynchronous as a GPU is, and merciless.

Each stream is a thread that does its work in order; streams are ordered by events alone. Device memory is
no buffer, so that host code which touches it fails at once. Freed memory is poisoned in the order of the
stream it was freed on, copies keep only the bytes alive and not their owner, pageable host memory blocks,
and a copy that crosses two registrations counts as pageable. What a stream's work raises stays: from then
on every call fails, as on a real device.

Beside the time that work takes, streams keep a clock of their own: what it would be if work took just as long
as was said, and nothing but streams and events ever held it up. With ``sleeps=False`` only that clock moves.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import numpy as np

from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.errors import CapacityError, DeviceError
from kvferry.device.base import Device, DeviceBytes, Event, MemoryInfo, Stream
from kvferry.device.cpu import HostBytes

__all__ = ["FREED", "SimBytes", "SimDevice", "SimEvent", "SimStream"]

FREED: Final = 0xDD
"""What freed device memory is filled with."""
_NEW: Final = 0xCD
_ADDRESS: Final = 1 << 62  # device addresses carry it: a processor that used one would fault
_WAIT_S: Final = 60.0


class SimEvent:
    """See :class:`~kvferry.device.base.Event`."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self.point: tuple[SimStream, int, list[float]] | None = None  # and the clock there, once it is passed

    def record(self, stream: SimStream | None = None, /) -> None:
        """See :meth:`Event.record`; without a stream, this thread's current one."""
        stream = stream or self._device.current_stream()
        clock: list[float] = []
        self.point = (stream, stream.push(lambda: clock.append(stream.clock)), clock)

    def query(self) -> bool:
        """See :meth:`Event.query`."""
        self._device.check()
        return self.point is None or self.point[0].passed(self.point[1])

    def synchronize(self) -> None:
        """See :meth:`Event.synchronize`."""
        if self.point is not None:
            self.point[0].join(self.point[1])
        self._device.check()


class SimStream:
    """See :class:`~kvferry.device.base.Stream`."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._cond = threading.Condition()
        self._pushed = self._done = 0
        self.clock = 0.0
        """When its work so far would have been done."""
        self._thread = threading.Thread(target=self._run, name="kvferry-sim-stream", daemon=True)
        self._thread.start()

    def push(self, work: Callable[[], None], seconds: float = 0.0) -> int:
        """Queue work that takes some time; its number."""

        def timed() -> None:
            self.clock += seconds
            if self._device.sleeps:
                time.sleep(seconds)
            work()

        with self._cond:
            self._pushed += 1
            self._work.put(timed if seconds else work)
            return self._pushed

    def passed(self, number: int) -> bool:
        """Whether the work of that number is done."""
        with self._cond:
            return self._done >= number

    def join(self, number: int) -> None:
        """Wait until it is."""
        with self._cond:
            assert self._cond.wait_for(lambda: self._done >= number, _WAIT_S), "a simulated stream hangs"

    def wait_event(self, event: SimEvent, /) -> None:
        """See :meth:`Stream.wait_event`."""
        if event.point is not None:
            stream, number, clock = event.point

            def wait() -> None:
                stream.join(number)
                self.clock = max(self.clock, clock[0])

            self.push(wait)

    def query(self) -> bool:
        """See :meth:`Stream.query`."""
        self._device.check()
        return self.passed(self._pushed)

    def synchronize(self) -> None:
        """See :meth:`Stream.synchronize`."""
        self.join(self._pushed)
        self._device.check()

    def close(self) -> None:
        """End the thread when the work queued is done."""
        self._work.put(None)
        self._thread.join(_WAIT_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - sticky, like a device's error
                self._device.errors.append(error)
            with self._cond:
                self._done += 1
                self._cond.notify_all()


class SimBytes:
    """Memory of a :class:`SimDevice`; a slice is a view and keeps the whole alive."""

    __slots__ = ("__weakref__", "_whole", "device", "raw")

    def __init__(self, device: SimDevice, raw: ByteArray, whole: SimBytes | None = None) -> None:
        self.device, self.raw, self._whole = device, raw, whole

    def numel(self) -> int:
        """How many bytes."""
        return self.raw.nbytes

    def __getitem__(self, index: slice, /) -> SimBytes:
        return SimBytes(self.device, self.raw[index], self._whole or self)

    def data_ptr(self) -> int:
        """An address that no processor can use."""
        return int(self.raw.ctypes.data) | _ADDRESS


class SimDevice(Device):
    """See the module.

    Args:
        index: Its number.
        total_nbytes: Its memory.
        fixed_s: What a copy takes besides its bytes.
        s_per_mib: What a MiB of a copy takes.
        jitter_s: Up to so much more a copy, at random.
        max_pinned_nbytes: Host memory that can be registered at a time.
        sleeps: Whether work really takes its time.

    Attributes:
        errors: What work raised: the first makes every later call fail.
    """

    kind: ClassVar[str] = "sim"

    def __init__(
        self,
        index: int = 0,
        *,
        total_nbytes: int = 1 << 30,
        fixed_s: float = 0.0,
        s_per_mib: float = 0.0,
        jitter_s: float = 0.0,
        max_pinned_nbytes: int = 1 << 40,
        sleeps: bool = True,
    ) -> None:
        self.index, self.total_nbytes, self.max_pinned_nbytes = index, total_nbytes, max_pinned_nbytes
        self.fixed_s, self.s_per_mib, self.jitter_s = fixed_s, s_per_mib, jitter_s
        self.sleeps = sleeps
        self.errors: list[Exception] = []
        self._random = random.Random(index)
        self._lock = threading.RLock()
        self._used = 0
        self._pins: dict[int, int] = {}
        self._current = threading.local()
        self._streams: list[SimStream] = []
        self._default = self.new_stream()

    def check(self) -> None:
        """Raise what the device died of, if it did."""
        if self.errors:
            raise DeviceError(f"{self.name}: {self.errors[0]}") from self.errors[0]

    def empty(self, nbytes: int) -> SimBytes:
        """See :meth:`Device.empty`."""
        self.check()
        with self._lock:
            if self._used + nbytes > self.total_nbytes:
                raise CapacityError(
                    f"{self.name}: {nbytes} bytes asked, {self.total_nbytes - self._used} of "
                    f"{self.total_nbytes} are free"
                )
            self._used += nbytes
        raw = np.frombuffer(page_aligned(nbytes), np.uint8)
        raw.fill(_NEW)
        made = SimBytes(self, raw)
        weakref.finalize(made, self._free, raw, self.current_stream())
        return made

    def _free(self, raw: ByteArray, home: SimStream) -> None:
        with self._lock:
            self._used -= raw.nbytes
        home.push(lambda: raw.fill(FREED))

    def new_stream(self, priority: int = 0) -> SimStream:
        """See :meth:`Device.new_stream`."""
        del priority
        stream = SimStream(self)
        with self._lock:
            self._streams.append(stream)
        return stream

    def current_stream(self) -> SimStream:
        """See :meth:`Device.current_stream`."""
        current: SimStream = getattr(self._current, "stream", self._default)
        return current

    def event(self) -> Event:
        """See :meth:`Device.event`."""
        return SimEvent(self)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[Stream]:
        """See :meth:`Device.use`."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield stream
        finally:
            self._current.stream = before

    def copy(self, dst: DeviceBytes, src: DeviceBytes, stream: Stream) -> None:
        """See :meth:`Device.copy`; also between devices only through the host."""
        self.check()
        if dst.numel() != src.numel():
            raise ValueError(f"copy of {src.numel()} bytes into {dst.numel()}")
        assert isinstance(stream, SimStream)
        # Only the bytes are held, by arrays that do not know their owner: it may die, as with a DMA engine.
        target, source = self._raw(dst), self._raw(src)
        delay = (
            self.fixed_s + self.s_per_mib * src.numel() / (1 << 20) + self._random.random() * self.jitter_s
        )

        number = stream.push(lambda: np.copyto(target, source), delay)
        if not all(self.is_pinned(side.array) for side in (dst, src) if isinstance(side, HostBytes)):
            stream.join(number)

    def _raw(self, side: DeviceBytes) -> ByteArray:
        if isinstance(side, SimBytes):
            if side.device is not self:
                self.errors.append(RuntimeError(f"an address of {side.device.name} used on {self.name}"))
                self.check()
            return side.raw
        assert isinstance(side, HostBytes)
        return side.array

    def kernel(self, target: DeviceBytes, byte: int, seconds: float = 0.0) -> None:
        """Stand-in for a kernel on the current stream: takes ``seconds``, then writes ``byte`` all over."""
        raw = self._raw(target)
        self.current_stream().push(lambda: raw.fill(byte), seconds)

    def gate(self) -> threading.Event:
        """Let the current stream stand still until the event that is returned is set, or for a minute."""
        gate = threading.Event()
        self.current_stream().push(lambda: self._pass(gate))
        return gate

    def _pass(self, gate: threading.Event) -> None:
        if not gate.wait(_WAIT_S):
            self.errors.append(TimeoutError("nobody opened a gate"))

    @property
    def clock(self) -> float:
        """When all work so far would have been done, see the module."""
        self.synchronize()
        with self._lock:
            return max(stream.clock for stream in self._streams)

    def fail(self, error: Exception) -> None:
        """Let the next work of the default stream raise: the device is dead from then on."""

        def work() -> None:
            raise error

        self._default.push(work)

    def host_bytes(self, view: memoryview) -> DeviceBytes:
        """See :meth:`Device.host_bytes`."""
        return HostBytes(np.frombuffer(view, np.uint8))

    def memory_of(self, owner: Any) -> tuple[SimBytes, int]:  # noqa: ANN401
        """See :meth:`Device.memory_of`."""
        if not isinstance(owner, SimBytes) or owner.device is not self:
            raise DeviceError(f"{self.name}: {owner!r} is no memory of it")
        return owner, owner.data_ptr()

    def host_register(self, view: memoryview) -> None:
        """See :meth:`Device.host_register`."""
        start, nbytes = _span(np.frombuffer(view, np.uint8))
        with self._lock:
            if any(start < base + size and base < start + nbytes for base, size in self._pins.items()):
                raise DeviceError("part of it is registered already")
            if sum(self._pins.values()) + nbytes > self.max_pinned_nbytes:
                raise DeviceError(f"the limit of {self.max_pinned_nbytes} pinned bytes is reached")
            self._pins[start] = nbytes

    def host_unregister(self, view: memoryview) -> None:
        """See :meth:`Device.host_unregister`."""
        self.synchronize()
        with self._lock:
            del self._pins[_span(np.frombuffer(view, np.uint8))[0]]

    def is_pinned(self, array: ByteArray) -> bool:
        """Whether host memory lies within one registration."""
        start, nbytes = _span(array)
        with self._lock:
            return any(base <= start and start + nbytes <= base + size for base, size in self._pins.items())

    @property
    def pinned_nbytes(self) -> int:
        """Host memory registered now."""
        with self._lock:
            return sum(self._pins.values())

    def memory(self) -> MemoryInfo:
        """See :meth:`Device.memory`."""
        with self._lock:
            return MemoryInfo(self.total_nbytes - self._used, self.total_nbytes)

    def synchronize(self) -> None:
        """See :meth:`Device.synchronize`."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.synchronize()

    def close(self) -> None:
        """End the streams' threads: a thread inside numpy when the interpreter ends would abort it."""
        with self._lock:
            streams, self._streams = self._streams, []
        for stream in streams:
            stream.close()


def _span(array: ByteArray) -> tuple[int, int]:
    return int(array.ctypes.data), array.nbytes
