"""A simulated device that a test can stop; see :class:`GatedDevice`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.device.base import DeviceBytes, Stream
from kvferry.device.cpu import HostBytes
from kvferry.testing.sim_device import SimBytes, SimDevice, SimStream

__all__ = ["GatedDevice"]


class GatedDevice(SimDevice):
    """Its copies pass gates: closed, they go no further. It counts what is allocated.

    Args:
        total_nbytes: Its memory.

    Attributes:
        out: The gate of copies to the host.
        inward: Of those to the device.
        compute: Of what :meth:`hold_compute` was called before.
        allocations: How many.
        held_out: Copies to the host that were begun at a closed gate.
    """

    def __init__(self, total_nbytes: int = 1 << 24) -> None:
        self.out, self.inward, self.compute = (threading.Event() for _ in range(3))
        self.allocations = self.held_out = 0
        self.open_all()
        super().__init__(total_nbytes=total_nbytes)

    def open_all(self) -> None:
        """Let everything go on."""
        for gate in (self.out, self.inward, self.compute):
            gate.set()

    def empty(self, nbytes: int) -> SimBytes:
        """See :meth:`Device.empty`."""
        self.allocations += 1
        return super().empty(nbytes)

    def copy(self, dst: DeviceBytes, src: DeviceBytes, stream: Stream) -> None:
        """See :meth:`Device.copy`."""
        assert isinstance(stream, SimStream)
        gate = self.out if isinstance(dst, HostBytes) else self.inward
        if not gate.is_set():
            stream.push(_passing(gate))
            self.held_out += gate is self.out
        super().copy(dst, src, stream)

    def hold_compute(self) -> None:
        """What is queued on the current stream from now on waits for the gate."""
        self.current_stream().push(_passing(self.compute))


def _passing(gate: threading.Event) -> Callable[[], None]:
    def work() -> None:
        gate.wait(60)

    return work
