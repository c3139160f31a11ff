"""Conformance suites of the transport contracts; see :class:`TransportSuite`.

A transport's tests inherit one of them in a class of their own::

    class TestMine(TransportSuite):
        def transport(self) -> Transport:
            return get_transport("mine")

        def listen_url(self) -> str:
            return "mine://127.0.0.1:0"

One test carries the marker ``soak``, to be registered or left out by the project that uses it.
"""

from __future__ import annotations

from kvferry.testing.transports_bytes import TransportBytes
from kvferry.testing.transports_common import LARGEST, SIZES
from kvferry.testing.transports_deadlines import TransportDeadlines
from kvferry.testing.transports_ends import TransportEnds
from kvferry.testing.transports_listening import TransportListening
from kvferry.testing.transports_memory import SharedMemoryTests
from kvferry.testing.transports_processes import TransportProcesses

__all__ = ["LARGEST", "SIZES", "SharedMemorySuite", "TransportSuite"]


class TransportSuite(
    TransportBytes, TransportDeadlines, TransportEnds, TransportListening, TransportProcesses
):
    """What every transport must do: inherit it in a test class, with its two abstract methods."""


class SharedMemorySuite(TransportSuite, SharedMemoryTests):
    """What a transport must do whose connections are :class:`SharedMemoryConnection`."""
