"""Host memory pinned for a device, in slots that copies pass through."""

from __future__ import annotations

import logging
import resource
import threading
from typing import Literal

from kvferry.core.arena import available_memory
from kvferry.core.buffers import PAGE_NBYTES, page_aligned
from kvferry.core.errors import ConfigError, DeviceError
from kvferry.core.units import format_nbytes
from kvferry.device.base import Device, DeviceBytes

__all__ = ["PinFailure", "PinnedSlots", "Slot", "pin"]

PinFailure = Literal["pageable", "stop"]
"""When memory cannot be pinned: go on with pageable memory, whose copies block, or raise."""

_log = logging.getLogger(__name__)


def pin(device: Device, view: memoryview, *, on_failure: PinFailure, option: str) -> bool:
    """Register host memory with a device.

    Args:
        device: The device.
        view: The memory, whole: one copy must not cross two registrations.
        on_failure: ``pageable`` logs one line and goes on; ``stop`` raises.
        option: What to change for less memory, for the message.

    Returns:
        Whether it is pinned.

    Raises:
        DeviceError: If the driver refuses and ``on_failure`` is ``stop``.
    """
    try:
        device.host_register(view)
    except DeviceError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = "unlimited" if limit == resource.RLIM_INFINITY else format_nbytes(limit)
        text = (
            f"{device.name}: {format_nbytes(len(view))} of host memory cannot be pinned: {error}. "
            f"{format_nbytes(available_memory())} are free, RLIMIT_MEMLOCK is {locked}; "
            f"raise the limit (ulimit -l, LimitMEMLOCK of systemd) or lower {option}"
        )
        if on_failure == "stop":
            raise DeviceError(text) from error
        _log.warning("%s; going on with pageable memory, whose copies do not overlap", text)
        return False
    return True


class Slot:
    """A piece of pinned memory that is somebody's until :meth:`release`.

    Attributes:
        view: Its bytes, page-aligned.
        bytes: The same as the device takes them.
        held: Whether it is somebody's.
    """

    __slots__ = ("_owner", "bytes", "held", "view")

    def __init__(self, owner: PinnedSlots, view: memoryview, device_view: DeviceBytes) -> None:
        self._owner, self.held = owner, False
        self.view, self.bytes = view, device_view

    def release(self) -> None:
        """Give it back. Not before network or store have finished with its bytes.

        Raises:
            RuntimeError: If it is given back already: it may be another copy's by now.
        """
        self._owner.give_back(self)


class PinnedSlots:
    """Equal slots in one pinned allocation, registered once: a ring whose slots come back in any order.

    Thread safe.

    Args:
        device: Whose copies pass through it.
        cond: Guards it; notified when a slot comes back.
        count: Slots.
        slot_nbytes: Bytes of a slot, a multiple of the page size.
        on_failure: See :func:`pin`.

    Raises:
        ConfigError: For sizes that cannot be, or more than the memory that is available.
        DeviceError: See :func:`pin`.
    """

    def __init__(
        self, device: Device, cond: threading.Condition, count: int, slot_nbytes: int, on_failure: PinFailure
    ) -> None:
        if count < 1 or slot_nbytes < PAGE_NBYTES or slot_nbytes % PAGE_NBYTES:
            raise ConfigError(
                f"{count} pinned slots of {slot_nbytes} bytes: at least one, of whole pages of {PAGE_NBYTES}"
            )
        nbytes, free = count * slot_nbytes, available_memory()
        if nbytes > free:
            raise ConfigError(f"{nbytes} bytes of pinned slots, {free} are available; configure fewer slots")
        self.slot_nbytes, self.count = slot_nbytes, count
        self._cond, self._device, self._memory = cond, device, page_aligned(nbytes)
        self.pinned = pin(
            device, self._memory, on_failure=on_failure, option="device.slots or device.slot_nbytes"
        )
        views = [self._memory[i * slot_nbytes : (i + 1) * slot_nbytes] for i in range(count)]
        self._free = [Slot(self, view, device.host_bytes(view)) for view in views]

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self) -> Slot | None:
        """A slot that is the caller's, or ``None`` while all are held."""
        with self._cond:
            if not self._free:
                return None
            slot = self._free.pop()
            slot.held = True
            return slot

    def give_back(self, slot: Slot) -> None:
        """See :meth:`Slot.release`."""
        with self._cond:
            if not slot.held:
                raise RuntimeError("a pinned slot is released twice")
            slot.held = False
            # by another handle, so that a second release of this one is seen though the bytes are lent again
            self._free.append(Slot(self, slot.view, slot.bytes))
            self._cond.notify_all()

    def close(self) -> None:
        """Unpin. Only when no copy is in flight."""
        if self.pinned:
            self.pinned = False
            self._device.host_unregister(self._memory)
