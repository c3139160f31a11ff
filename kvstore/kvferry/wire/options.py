"""What the two ends of a channel say of themselves."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.wire.messages import Hello, Welcome
from kvferry.wire.protocol import SUPPORTED, Limits, Side, Versions, WireProtocol

__all__ = ["ChannelOptions", "Peer", "process_epoch"]


@functools.cache
def process_epoch() -> str:
    """A random name of this run of this process; a peer that was restarted has another one."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class ChannelOptions:
    """What this end says of itself in the handshake, and what it accepts.

    Attributes:
        role: What this end is, such as ``gateway``.
        session: Name of the session whose leases the connection holds.
        checksum: Whether payloads carry a checksum; they do unless both ends say no.
        credential: Passed to the peer as it is; never logged.
        hello_timeout_s: Seconds that the whole handshake may take.
        max_meta_nbytes: Longest encoded message accepted and sent.
        max_payload_nbytes: Longest payload accepted and sent.
        capabilities: Names of optional abilities of this end.
        epoch: Name of this run of the process, told to clients.
        frame_timeout_s: Seconds in which a message that has begun to arrive must be complete when it
            was waited for with :meth:`Channel.receive_idle`.
        versions: Protocol versions to speak.
        admit: Where this end listens: asked in the handshake whether a client may come in; raises
            :class:`~kvferry.core.errors.AuthError` or
            :class:`~kvferry.core.errors.OverloadedError` if not, and the client is told.
    """

    role: str
    session: str
    checksum: bool = True
    credential: bytes | None = field(default=None, repr=False)
    hello_timeout_s: float = 5.0
    max_meta_nbytes: int = Limits().max_meta_nbytes
    max_payload_nbytes: int = Limits().max_payload_nbytes
    capabilities: tuple[str, ...] = ()
    epoch: str = field(default_factory=process_epoch)
    frame_timeout_s: float = 5.0
    versions: Versions = SUPPORTED
    admit: Callable[[Peer], None] | None = field(default=None, repr=False, compare=False)

    def protocol(self, side: Side, peer: str) -> WireProtocol:
        """The protocol for one connection with these options."""
        limits = Limits(max_meta_nbytes=self.max_meta_nbytes, max_payload_nbytes=self.max_payload_nbytes)
        return WireProtocol(side, limits, versions=self.versions, checksum=self.checksum, peer=peer)

    def hello(self, sent_at: float) -> Hello:
        """The first message of a client with these options."""
        return Hello(
            min_version=self.versions.lowest,
            max_version=self.versions.highest,
            session=self.session,
            role=self.role,
            capabilities=self.capabilities,
            credential=self.credential,
            checksum=self.checksum,
            sent_at=sent_at,
        )

    def admitted(self, address: str, hello: Hello, version: int, received_at: float) -> Peer:
        """The client that said ``hello``, if it may come in.

        Raises:
            AuthError: If it may not.
        """
        peer = Peer.from_hello(address, hello, version, received_at)
        if self.admit is not None:
            self.admit(peer)
        return peer

    def welcome(self, protocol: WireProtocol, received_at: float, sent_at: float) -> Welcome:
        """The answer of a server with these options to the hello that ``protocol`` received."""
        return Welcome(
            version=protocol.version,
            session=self.session,
            epoch=self.epoch,
            role=self.role,
            capabilities=self.capabilities,
            checksum=protocol.checksum,
            received_at=received_at,
            sent_at=sent_at,
        )


@dataclass(frozen=True)
class Peer:
    """The other end, as it described itself.

    Attributes:
        address: URL of the other end of the connection.
        role: Its role.
        session: Its session.
        epoch: Name of its run; empty for a client.
        version: The agreed protocol version.
        capabilities: Its optional abilities, with those unknown to this version.
        clock_offset: Its monotonic clock minus ours, in seconds.
        clock_error: How far ``clock_offset`` may be off, in seconds. The accepting end sees one
            direction only: its offset is too small by the time of one message, and this is infinite.
        credential: What a client presented; checked by the owner of the server.
    """

    address: str
    role: str
    session: str
    epoch: str
    version: int
    capabilities: tuple[str, ...]
    clock_offset: float
    clock_error: float
    credential: bytes | None = field(default=None, repr=False)

    @classmethod
    def from_hello(cls, address: str, hello: Hello, version: int, received_at: float) -> Peer:
        """The client that said ``hello``."""
        return cls(
            address=address,
            role=hello.role,
            session=hello.session,
            epoch="",
            version=version,
            capabilities=hello.capabilities,
            clock_offset=hello.sent_at - received_at,
            clock_error=math.inf,
            credential=hello.credential,
        )

    @classmethod
    def from_welcome(cls, address: str, welcome: Welcome, sent_at: float, received_at: float) -> Peer:
        """The server that answered the hello of ``sent_at``, both times on our clock."""
        # NTP's formula (RFC 5905, section 8): the error is half of the time that was spent on the way.
        there, back = welcome.received_at - sent_at, welcome.sent_at - received_at
        return cls(
            address=address,
            role=welcome.role,
            session=welcome.session,
            epoch=welcome.epoch,
            version=welcome.version,
            capabilities=welcome.capabilities,
            clock_offset=(there + back) / 2,
            clock_error=abs(there - back) / 2,
        )
