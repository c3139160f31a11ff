"""What the parts of the transport suite share: hooks, fixtures, and a few short calls."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

import numpy as np
import pytest

from kvferry.core.buffers import Buf, ByteArray
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError, TransportError
from kvferry.transports.base import Connection, Listener, Transport

__all__ = [
    "BLOCKING_NBYTES",
    "GUARD",
    "GUARD_NBYTES",
    "LARGEST",
    "SHORT_S",
    "SIZES",
    "Ends",
    "TransportFixtures",
    "blocking_buffer",
    "open_descriptors",
    "random_bytes",
    "resident_nbytes",
]

LARGEST: Final = -1
"""Stands for :attr:`TransportFixtures.largest_nbytes` among the sizes."""
SIZES: Final = (
    0,
    1,
    2,
    63,
    64,
    65,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    65535,
    65536,
    65537,
    (1 << 20) + 1,
    LARGEST,
)

Ends: TypeAlias = "tuple[Connection, Connection]"
GUARD: Final = 0xA5
GUARD_NBYTES: Final = 64
SHORT_S: Final = 0.15
"""A deadline that is meant to pass."""
BLOCKING_NBYTES: Final = 96 << 20
"""More than the buffers of any transport hold."""


def random_bytes(nbytes: int, seed: int = 1) -> ByteArray:
    """Bytes that both ends of a test can make."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def blocking_buffer() -> memoryview:
    """Zeros that need no memory until they are written."""
    return memoryview(mmap.mmap(-1, BLOCKING_NBYTES))


def open_descriptors() -> int:
    """How many descriptors this process has open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only counted


def resident_nbytes() -> int:
    """Memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class TransportFixtures(ABC):
    """What a transport under test says of itself.

    Attributes:
        crosses_processes: Whether another process can dial it; ``False`` leaves out the tests that kill one.
        largest_nbytes: The largest message; lower it where a run has to be short.
        connect_cycles: Connections made and closed before descriptors are counted.
        soak_cycles: The same for the test that is marked ``soak``.
        connect_needs_accept: Whether ``connect`` comes back only once ``accept`` was called.
        patience_s: What nothing in these tests should need; a call that does is stuck.
        late_s: How long after its deadline a call may come back on a machine that is busy.
        child_setup: Source that child processes run first, such as one that registers the transport.
        dial_options: What the address of a listener lacks to be dialled, such as ``?ca=…``.
    """

    crosses_processes: ClassVar[bool] = True
    largest_nbytes: ClassVar[int] = 64 << 20
    connect_cycles: ClassVar[int] = 200
    soak_cycles: ClassVar[int] = 2000
    connect_needs_accept: ClassVar[bool] = False
    patience_s: ClassVar[float] = 30.0
    late_s: ClassVar[float] = 3.0
    child_setup: ClassVar[str] = ""
    dial_options: ClassVar[str] = ""

    @abstractmethod
    def transport(self) -> Transport:
        """The transport under test."""

    @abstractmethod
    def listen_url(self) -> str:
        """Where to listen; free each time it is asked for, and again once a listener is closed."""

    def dial_url(self, listener: Listener) -> str:
        """What to dial."""
        return listener.address + self.dial_options

    def listen_again_url(self, listener: Listener) -> str:
        """How to listen on the very address of ``listener``; override it where options are missing there."""
        return listener.address

    def soon(self) -> float:
        """A deadline that nothing here should need."""
        return deadline_in(self.patience_s)

    def much_later(self) -> float:
        """The deadline of a call that something else has to wake."""
        return deadline_in(2 * self.patience_s)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Listener]:
        """A listener for the length of a test."""
        with contextlib.closing(self.transport().listen(self.listen_url())) as listener:
            yield listener

    @contextlib.contextmanager
    def connected(self) -> Iterator[Ends]:
        """Both ends of a connection for the length of a test: the one that dialled first."""
        with self.listening() as listener:
            dialled, accepted = self.meet(listener)
            with contextlib.closing(dialled), contextlib.closing(accepted):
                yield dialled, accepted

    def dial(self, listener: Listener) -> Connection:
        """A connection to ``listener``; where it needs to be accepted for that, see :meth:`meet`."""
        return self.transport().connect(self.dial_url(listener), self.soon())

    def accept(self, listener: Listener) -> Connection:
        """The next connection of ``listener``."""
        return listener.accept(self.soon())

    def meet(self, listener: Listener) -> Ends:
        """Dial ``listener`` and accept."""
        if not self.connect_needs_accept:
            dialled = self.dial(listener)
            return dialled, self.accept(listener)
        with ThreadPoolExecutor(1) as pool:
            accepting = pool.submit(self.accept, listener)
            dialled = self.dial(listener)
            return dialled, accepting.result(timeout=self.patience_s)

    def send(self, connection: Connection, data: bytes) -> None:
        """Send ``data``."""
        connection.send([data], self.soon())

    def receive(self, connection: Connection, nbytes: int) -> bytes:
        """The next ``nbytes``."""
        received = bytearray(nbytes)
        connection.recv_into([memoryview(received)], self.soon())
        return bytes(received)

    def transfer(
        self, pool: ThreadPoolExecutor, ends: Ends, parts: Sequence[Buf], targets: list[memoryview]
    ) -> None:
        """Send ``parts`` in a thread while this one receives them into ``targets``."""
        sending = pool.submit(ends[0].send, parts, self.soon())
        ends[1].recv_into(targets, self.soon())
        sending.result(timeout=self.patience_s)

    def assert_works(self, ends: Ends) -> None:
        """Check that bytes go both ways."""
        for one, other in (ends, ends[::-1]):
            self.send(one, b"still good")
            assert self.receive(other, 10) == b"still good"

    def assert_ended(self, connection: Connection) -> None:
        """Check that the stream has an end, and soon."""
        with pytest.raises(ConnectionClosedError):
            self.receive(connection, 1)

    def assert_in_time(
        self, call: Callable[[float], object], error: type[TransportError] = TransferTimeoutError
    ) -> None:
        """Check that ``call`` ends with ``error`` at the deadline it is given, neither early nor late."""
        started = time.monotonic()
        with pytest.raises(error):
            call(deadline_in(SHORT_S))
        taken = time.monotonic() - started
        assert SHORT_S * 0.9 <= taken < SHORT_S + self.late_s, f"came back after {taken:.2f} s"

    @pytest.fixture
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        """Threads for the other ends of a test."""
        with ThreadPoolExecutor(4) as pool:
            yield pool

    @contextlib.contextmanager
    def child(self, code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
        """A process that runs :attr:`child_setup` and ``code``; killed at the end if it still runs."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", f"{self.child_setup}\n{code}", *args],
            env=environment,
            stdin=pipe,
            stdout=pipe,
            text=True,
        ) as child:
            try:
                yield child
            finally:
                child.kill()
