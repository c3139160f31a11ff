"""The contract of region transports: one-sided reads and writes into memory that the owner opened.

The owner of memory opens a window for one transfer and sends its grant, a few opaque bytes, in a frame. Who
holds the grant writes into the window, or reads from it, while the owner's threads do nothing; the owner
closes the window when the transfer is over, or earlier to revoke it. Nothing but open windows is registered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvferry.core.errors import TransportError

__all__ = [
    "Access",
    "RegionPart",
    "RegionTransfer",
    "RegionTransport",
    "Window",
    "check_access",
    "check_memory",
]

Access = Literal["read", "write"]
"""What the holder of a grant may do with the window."""


@dataclass(frozen=True, slots=True)
class RegionPart:
    """One piece of a transfer: ``local`` against the bytes of the window from ``offset`` on.

    Attributes:
        local: Own memory, contiguous; stays untouched by others until the transfer is done.
        offset: Bytes from the start of the window.
    """

    local: memoryview
    offset: int

    def __post_init__(self) -> None:
        check_memory(self.local)


def check_memory(memory: object) -> None:
    """For implementations of :meth:`RegionTransport.open_window`: parts and windows are of memory views.

    Raises:
        TypeError: If ``memory`` is none.
    """
    if not isinstance(memory, memoryview):
        raise TypeError(f"{type(memory).__name__} is no memoryview; memoryview(data) makes one of a buffer")


def check_access(access: str) -> None:
    """For implementations of :meth:`RegionTransport.open_window`: a grant is for one of the two.

    Raises:
        TransportError: If ``access`` is neither ``"read"`` nor ``"write"``.
    """
    if access not in ("read", "write"):
        raise TransportError(f'a window is opened to "read" or to "write", not to {access!r}')


class Window(ABC):
    """Memory that is open to the holders of its grant. Thread safe."""

    @property
    @abstractmethod
    def grant(self) -> bytes:
        """What the peer needs, opaque and without a secret of other windows; at most 1 KiB."""

    @abstractmethod
    def close(self) -> None:
        """Revoke the grant; a second call does nothing.

        When it returns nothing is read or written through the grant any more, or an error says that this
        could not be had and the memory must not be used again yet.

        Raises:
            TransportError: If the library could not withdraw the memory.
        """


class RegionTransfer(ABC):
    """A batch of reads or writes under way. Any thread may ask, one waits."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether all of it is done; near-free.

        Raises:
            TransportError: If a part failed; with the peer, the part and the reason.
        """

    @abstractmethod
    def wait(self, deadline: float) -> None:
        """Return when all is done.

        Raises:
            TransferTimeoutError: At the deadline; the local memory is still in use until ``poll`` says
                otherwise or the transport is closed.
            TransportError: As :meth:`poll`.
        """


class RegionTransport(ABC):
    """One endpoint of one process: opens windows and works on those of others. Thread safe.

    The constructor of a plug-in takes, as keywords, ``trusted_peers`` (see
    :class:`~kvferry.core.trusted_peers.TrustedPeers`), ``host`` (where peers reach this process) and ``wire``
    (``tcp`` or ``rdma``).
    """

    name: ClassVar[str]

    def trusts(self, host: str) -> bool:  # noqa: ARG002
        """Whether grants may go to ``host`` and are accepted from it; nobody is trusted by default."""
        return False

    @abstractmethod
    def open_window(self, view: memoryview, access: Access) -> Window:
        """Register ``view`` (contiguous; writable for ``"write"``) for one transfer.

        Raises:
            TransportError: If ``access`` is neither, or it cannot be registered; with the size and the limit.
        """

    @abstractmethod
    def write(self, grant: bytes, parts: Sequence[RegionPart]) -> RegionTransfer:
        """Start writing all ``parts`` into the window of ``grant``.

        Raises:
            ProtocolError: If ``grant`` is malformed, or not for writing.
            AuthError: If it comes from a host that is not trusted.
            TransportError: If a segment lies outside the window (checked here), or the peer is not reached.
        """

    @abstractmethod
    def read(self, grant: bytes, parts: Sequence[RegionPart]) -> RegionTransfer:
        """Start reading all ``parts`` from the window of ``grant``; errors as :meth:`write`."""

    @abstractmethod
    def close(self) -> None:
        """Revoke all windows and end all transfers; a second call does nothing."""
