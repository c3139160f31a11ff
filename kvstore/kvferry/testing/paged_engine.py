"""An engine with paged memory that is all of a test's, and copiers that a test can hold up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from kvferry.client import BlockMover, Client, ClientNamespace, LoadJob, Registration, SaveJob
from kvferry.core.blockstore import Namespace
from kvferry.core.buffers import ByteArray
from kvferry.core.clock import deadline_in
from kvferry.core.errors import StoreError
from kvferry.core.keys import BlockKey
from kvferry.core.paged_copy import Copying, Event, HostCopier, Transfer
from kvferry.core.regions import Region
from kvferry.testing.blocks import small_spec, wait_until

__all__ = ["LAYERS", "PAGES", "SPEC", "FakeDevice", "Gate", "Pages", "Setting", "SlowHost", "finished"]

LAYERS: Final = 4
SPEC: Final = small_spec("paged", layers=LAYERS)
PAGES: Final = 24
_ROW: Final = SPEC.layers[0].tensors[0].shape[-1]


class Pages:
    """An engine's paged memory of random bytes, all layers in one array."""

    def __init__(self, namespace: Namespace, mover: BlockMover, device: str = "cpu") -> None:
        shape = (LAYERS, 2, PAGES, SPEC.block_tokens, 1, _ROW)
        self.bytes: ByteArray = np.random.default_rng(5).integers(0, 255, shape, np.uint8)
        regions = [Region.of(self.bytes[n], layer=n, layout="stacked_nhd") for n in range(LAYERS)]
        self.registration: Registration = mover.register(
            namespace, [replace(region, device=device) for region in regions]
        )

    def of(self, ids: Sequence[int]) -> ByteArray:
        """The bytes of some pages."""
        found: ByteArray = self.bytes[:, :, list(ids)]
        return found


class Gate:
    """An event of a device that does not exist."""

    def __init__(self) -> None:
        self.done = False
        self.asked = threading.Event()

    def query(self) -> bool:
        """Whether the test has said that it is done."""
        self.asked.set()
        return self.done


class FakeDevice:
    """Copies when the test says so, as a copy engine that nobody can stop."""

    orders_events = True

    def __init__(self) -> None:
        self.waiting: deque[tuple[Callable[[], object], Gate]] = deque()
        self.fails = False

    def start(
        self, transfer: Transfer, layers: Sequence[int], first: int, count: int, after: Event | None
    ) -> Copying | None:
        """See :class:`BlockCopier`."""
        gate = Gate()
        same = Transfer(transfer.plan, transfer.pages.tolist(), transfer.slots, to_pages=transfer.to_pages)
        self.waiting.append((partial(HostCopier().start, same, list(layers), first, count, after), gate))
        return self if self.fails else gate

    def query(self) -> bool:
        """Of a copy of a device that fails."""
        raise StoreError("the device has failed")

    def run_one(self) -> None:
        """Make the copy that waits longest."""
        copy, gate = self.waiting.popleft()
        copy()
        gate.done = True


class SlowHost:
    """A copy by the mover's own hand that stands still in the middle, until the test lets it go on."""

    orders_events = False

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def start(
        self, transfer: Transfer, layers: Sequence[int], first: int, count: int, after: Event | None
    ) -> Copying | None:
        """See :class:`BlockCopier`."""
        self.entered.set()
        assert self.go.wait(30)
        return HostCopier().start(transfer, layers, first, count, after)


class Setting:
    """A client, a namespace, pages, and keys for as many blocks as a test has."""

    def __init__(
        self,
        start: Callable[..., Any],
        *settings: str,
        copier: FakeDevice | SlowHost | None = None,
        url: int = 0,
    ) -> None:
        self.daemon = start(*settings)
        copiers = {"fake": copier} if copier else None
        self.client = Client(self.daemon.addresses[url], copiers=copiers)
        self.namespace: ClientNamespace = self.client.namespace(SPEC)
        self.pages = Pages(self.namespace, self.client.mover, "fake" if copier else "cpu")
        self.registration = self.pages.registration

    def keys(self, count: int, first: int = 1) -> list[BlockKey]:
        """Of the first blocks of a chain of its own for each ``first``."""
        return self.namespace.keys([first] * count * SPEC.block_tokens)

    def save(self, keys: Sequence[BlockKey], ids: Sequence[int], seconds: float = 20) -> SaveJob:
        """Begin to save."""
        deadline = deadline_in(seconds)
        return self.registration.save("s", keys, ids, parent=None, deadline=deadline)

    def saved(self, count: int, ids: Sequence[int]) -> list[BlockKey]:
        """Save, and see that it went well."""
        keys = self.keys(count)
        job = self.save(keys, ids)
        job.all_layers()
        assert job.wait(deadline=deadline_in(20))
        assert job.ok
        return keys

    def load(self, keys: Sequence[BlockKey], ids: Sequence[int], **more: Any) -> LoadJob:  # noqa: ANN401
        """Begin to load."""
        lease = self.namespace.load(keys, deadline=deadline_in(20))
        return self.registration.load("l", lease, ids, **{"deadline": deadline_in(20), **more})

    def leases_end(self) -> None:
        """See that the daemon holds nothing for it any more."""
        wait_until(lambda: self.client.stats().leases == 0)
        assert self.client.stats().quarantined_nbytes == self.client.stats().pinned_nbytes == 0


def finished(job: LoadJob | SaveJob) -> bool:
    """Wait until it is over; whether it is."""
    return job.wait(deadline=deadline_in(20))
