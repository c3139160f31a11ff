"""Blocks between their slots and the paged memory of an engine: gathered for a save, scattered by a load."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvferry.core.buffers import ByteArray, address_of
from kvferry.core.errors import ConfigError
from kvferry.core.native import native
from kvferry.core.nearest import shown
from kvferry.core.regions import Part, RegionPlan

__all__ = [
    "BlockCopier",
    "Copying",
    "Event",
    "HostCopier",
    "OrderedCopying",
    "Transfer",
    "move_part",
    "pages_kernel",
]

_STREAM_FROM_NBYTES: Final = 1 << 20  # of one call; less may well be read again while it is in a cache


class Event(Protocol):
    """A moment on a device's stream, as torch's events are, or whatever else can be asked."""

    def query(self) -> bool:
        """Whether all work before it is done; does not wait."""
        ...


class Copying(Protocol):
    """Copies under way, which somebody else's hand makes."""

    def query(self) -> bool:
        """Whether they are done; does not wait.

        Raises:
            KVFerryError: If they failed; they are over then too.
        """
        ...


@runtime_checkable
class OrderedCopying(Copying, Protocol):
    """Copies of a device, which it can wait for itself."""

    def order(self, stream: Any, deadline: float) -> None:  # noqa: ANN401 - each device takes its own streams
        """Let ``stream`` wait, on the device, for these copies; the host, only until they are queued.

        Raises:
            KVFerryError: If they failed, or are not even queued by the deadline.
        """
        ...


class Transfer:
    """Some blocks, the pages that they go to or come from, and the wish to stop.

    The views are kept by their owner's lease; whoever holds a transfer holds it in time.

    Args:
        plan: Of the regions.
        pages: Numbers of the pages.
        slots: The blocks as they are stored, one a page, in the same order.
        to_pages: Whether they are loaded, not saved.

    Attributes:
        stop: Set to 1 by another thread, it ends a copy after the block that it is at.

    Raises:
        ConfigError: If there is no such page, or a slot is not as long as a block.
    """

    def __init__(
        self, plan: RegionPlan, pages: Sequence[int], slots: Sequence[memoryview], *, to_pages: bool
    ) -> None:
        self.plan = plan
        self.pages = checked_pages(plan, pages)
        self.slots = slots
        self.to_pages = to_pages
        self.stop = ctypes.c_int32(0)
        if len(slots) != len(pages) or any(len(slot) != plan.spec.block_nbytes for slot in slots):
            raise ConfigError(f"{len(slots)} slots for {len(pages)} pages of {plan.spec.block_nbytes} bytes")
        if not to_pages and any(slot.readonly for slot in slots):
            raise ConfigError("blocks are saved to slots that are read-only")
        self.addresses = np.array([address_of(slot) for slot in slots], np.uint64)

    def __len__(self) -> int:
        return len(self.pages)


def require_event(name: str, event: object) -> None:
    """Refuse what cannot be asked whether it is done.

    Raises:
        ConfigError: With the name of the argument.
    """
    if event is not None and not callable(getattr(event, "query", None)):
        raise ConfigError(f"{name} is {event!r}, must be an event (with query()), or None")


def checked_pages(plan: RegionPlan, pages: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Numbers of pages as C has them.

    Raises:
        ConfigError: If one is not there.
    """
    found = np.asarray(pages)
    if found.ndim == 1 and not len(found):
        return np.empty(0, np.uint64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ConfigError(f"the numbers of pages are a row of whole numbers, not {shown(pages)}")
    if found.min() < 0 or found.max() >= plan.blocks:
        wrong = next(int(page) for page in found if not 0 <= page < plan.blocks)
        raise ConfigError(f"page {wrong} is none of the {plan.blocks} that were registered")
    return found.astype(np.uint64)


class BlockCopier(Protocol):
    """Moves bytes between regions on one kind of device and slots in host memory. For one thread."""

    @property
    def orders_events(self) -> bool:
        """Whether it takes an event along and lets the device wait; else it is called when that is done."""
        ...

    def start(
        self, transfer: Transfer, layers: Sequence[int], first: int, count: int, after: Event | None
    ) -> Copying | None:
        """Move some layers of ``count`` blocks from number ``first`` on.

        Returns:
            ``None`` if it is done, or was ended by ``transfer.stop``; else what tells when it is: until then
            it may write, and of ``stop`` it need take no notice.

        Raises:
            KVFerryError: If it cannot be done; nothing is under way.
        """
        ...


class HostCopier:
    """Copies between host memories, in one call of the native library, or by numpy where there is none."""

    orders_events = False

    def start(
        self, transfer: Transfer, layers: Sequence[int], first: int, count: int, after: Event | None
    ) -> Copying | None:
        """See :class:`BlockCopier`; it is always done at the return."""
        del after  # it is done already
        kernel = pages_kernel()
        for layer in layers:
            parts = transfer.plan.layers[layer]
            if kernel is None:
                _by_numpy(transfer, parts, first, count)
                continue
            address, number = _native_parts(transfer.plan, layer)
            nbytes = count * transfer.plan.spec.layers[layer].nbytes
            kernel(
                *(address, number, transfer.pages.ctypes.data + 8 * first),
                *(transfer.addresses.ctypes.data + 8 * first, count, int(transfer.to_pages)),
                *(int(nbytes >= _STREAM_FROM_NBYTES), ctypes.addressof(transfer.stop)),
            )
        return None


class _NativePart(ctypes.Structure):
    """``kvc_part`` of pages.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("address", "page_nbytes", "offset", "run")),
        *((name, ctypes.c_uint64 * 3) for name in ("count", "page_step", "slot_step")),
    )


def _native_parts(plan: RegionPlan, layer: int) -> tuple[int, int]:
    """Address and number of the parts of a layer, made once a plan."""
    held = plan.derived.get(layer)
    if held is None:
        array = (_NativePart * len(plan.layers[layer]))()
        for made, part in zip(array, plan.layers[layer], strict=True):
            made.address, made.page_nbytes = part.address, part.page_nbytes
            made.offset, made.run = part.offset, part.run
            for at, loop in enumerate(((1, 0, 0),) * (3 - len(part.loops)) + part.loops):
                made.count[at], made.page_step[at], made.slot_step[at] = loop
        held = plan.derived[layer] = (array, ctypes.addressof(array), len(array))
    return held[1], held[2]


@functools.lru_cache(1)
def pages_kernel() -> Callable[..., int] | None:
    """What moves blocks in this process; ``None``: numpy does."""
    library = native().library
    if library is None or not hasattr(library, "kvc_pages"):
        return None
    function = library.kvc_pages
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p),
    )
    function.restype = ctypes.c_size_t
    return cast("Callable[..., int]", function)


def _by_numpy(transfer: Transfer, parts: Sequence[Part], first: int, count: int) -> None:
    for index in range(first, first + count):
        if transfer.stop.value:
            return
        slot = np.frombuffer(transfer.slots[index], np.uint8)
        for part in parts:
            if part.address:
                page = _memory(part, int(transfer.pages[index]))
                move_part(part, page, 0, slot, to_page=transfer.to_pages)
            elif not transfer.to_pages:
                slot[part.offset : part.offset + part.run] = 0


def move_part(part: Part, page: ByteArray, at: int, slot: ByteArray, *, to_page: bool) -> None:
    """Move one part between a page and its block, by numpy.

    Args:
        part: Not one of padding.
        page: Memory that holds it.
        at: Of the part's first byte in ``page``.
        slot: The block.
        to_page: Whether into the page.
    """
    shape = (*(loop.times for loop in part.loops), part.run)
    there = np.ndarray(shape, np.uint8, page.data, at, (*(loop.page_step for loop in part.loops), 1))
    here = np.ndarray(shape, np.uint8, slot.data, part.offset, (*(loop.slot_step for loop in part.loops), 1))
    np.copyto(*((there, here) if to_page else (here, there)))


def _memory(part: Part, number: int) -> ByteArray:
    """What of a page is between a part's first and last byte."""
    memory: Any = (ctypes.c_uint8 * part.extent).from_address(part.address + number * part.page_nbytes)
    return np.frombuffer(memory, np.uint8)
