"""Tiers that fail when a test says so, and work again when it says so: in memory, and over real files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.encoding import TierCodec
from kvferry.store.tier import Tier
from kvferry.testing.blocks import wait_until
from kvferry.testing.fake_tier import FakeTier, Fault
from kvferry.testing.faulty_files import Call, FaultyFiles

__all__ = ["FAULTS", "DiskWeather", "FakeWeather", "Weather"]

FAULTS = (
    *(("read", f) for f in (Fault.FAIL, Fault.CORRUPT, Fault.LOST, Fault.LATE, Fault.RAISE)),
    *(("write", f) for f in (Fault.FAIL, Fault.REFUSE, Fault.LATE, Fault.RAISE)),
    *(("contains", Fault.RAISE), ("remove", Fault.RAISE)),
)
"""What may go wrong: a verb and a fault."""
_AWAY = (("read", Fault.LOST), ("contains", Fault.RAISE), ("remove", Fault.RAISE))
_CALLS: tuple[Call, ...] = ("open_read", "preadv", "create", "pwritev", "rename", "unlink")


class Weather(Protocol):
    """One tier and its faults.

    Attributes:
        tier: As it is now; :meth:`reopen` may put another in its place.
    """

    @property
    def tier(self) -> Tier:
        """The tier."""
        ...

    def hurt(self, what: tuple[str, Fault], *, every: bool) -> None:
        """Make one of :data:`FAULTS`, for every block or for about half of them."""
        ...

    def meanwhile(self, verb: str, call: Callable[[], None]) -> threading.Event:
        """Call ``call`` in the midst of the next ``verb``, where that can be had; set when it is done."""
        ...

    def heal(self) -> None:
        """End all faults, and wait until the tier knows."""
        ...

    def reopen(self) -> None:
        """After the tier was closed: what a new process would find."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class FakeWeather:
    """Over a :class:`FakeTier`."""

    def __init__(self, name: str, capacity_nbytes: int = 0) -> None:
        self.tier = FakeTier(name, capacity_nbytes)

    def hurt(self, what: tuple[str, Fault], *, every: bool) -> None:
        """See :class:`Weather`."""
        verb, fault = what
        self.tier.late = threading.Event()
        self.tier.fault = lambda v, key: fault if v == verb and (every or key[0] % 2) else None

    def meanwhile(self, verb: str, call: Callable[[], None]) -> threading.Event:
        """See :class:`Weather`."""
        begun, done = threading.Event(), threading.Event()

        def fault(v: str, _key: BlockKey) -> None:
            if v == verb and not begun.is_set():
                begun.set()
                call()
                done.set()

        self.tier.fault = fault
        return done

    def heal(self) -> None:
        """See :class:`Weather`."""
        self.tier.fault = lambda _verb, _key: None
        self.tier.late.set()  # and left so: a write may just be about to return it

    def reopen(self) -> None:
        """See :class:`Weather`."""
        self.tier.reopen()

    def close(self) -> None:
        """See :class:`Weather`."""
        self.tier.close()


class DiskWeather:
    """Over real files, whose system calls fail, and whose directory goes away for a while."""

    def __init__(self, name: str, capacity_nbytes: int, codec: str = "off") -> None:
        self._folder = TemporaryDirectory()
        self._codec = TierCodec(codec)
        self._files = FaultyFiles()
        self._trouble = ExitStack()
        self._disk, self._away = Path(self._folder.name, "disk"), Path(self._folder.name, "away")
        self._options = DiskOptions((str(self._disk),), capacity_nbytes, direct="off", retry_s=0.01)
        self._name = name
        self.reopen()

    def hurt(self, what: tuple[str, Fault], *, every: bool) -> None:
        """See :class:`Weather`. Which faults take the directory away, :data:`FAULTS` and the order say."""
        if what in _AWAY:
            self._disk.rename(self._away)
            for root in self.tier._state.roots:
                assert self.tier._state.check_vanished(root)
            return
        call = _CALLS[FAULTS.index(what) % len(_CALLS)]
        self._trouble.enter_context(self._files.failing(call, error=errno.ENOSPC if every else errno.EIO))

    def meanwhile(self, verb: str, call: Callable[[], None]) -> threading.Event:  # noqa: ARG002
        """See :class:`Weather`; never."""
        return threading.Event()

    def heal(self) -> None:
        """See :class:`Weather`."""
        self._trouble.close()  # a disk that was full finds out at its next write
        if self._away.exists():
            self._away.rename(self._disk)
        wait_until(self._settled, 30)

    def _settled(self) -> bool:
        """It is up, and what could not be removed is gone."""
        names = [name for _, _, found in os.walk(self._disk) for name in found]
        usage = self.tier.usage()
        up = not any(name.endswith(": down") for name in usage.status)
        return up and usage.entries == sum(name.endswith(".safetensors") for name in names)

    def reopen(self) -> None:
        """See :class:`Weather`."""
        self.tier = DiskTier(self._name, self._options, files=self._files, codec=self._codec)

    def close(self) -> None:
        """See :class:`Weather`."""
        self.tier.close()
        self._folder.cleanup()
