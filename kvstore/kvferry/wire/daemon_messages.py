"""What clients and the cache daemon say to each other, batch first; ``docs/wire.md`` has the rules.

Every request is answered by one frame with its request id: the reply, or a ``failure`` that leaves the
connection usable. Leases are numbered by the client, so that one whose answer never came can be ended too.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from kvferry.core.blockstore import Completion, Stats
from kvferry.core.errors import ConfigError
from kvferry.core.keys import KEY_NBYTES
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.wire.messages import Count, Message, Moment, Seconds, Word
from kvferry.wire.spec_check import check_spec

__all__ = [
    "MOST_NAMESPACES",
    "SLOT_NBYTES",
    "TENANTS",
    "AskPeer",
    "BlockVerb",
    "CommitBlocks",
    "Completions",
    "DaemonMessage",
    "Done",
    "EndLeases",
    "FindLease",
    "FlushStore",
    "FoundLease",
    "GetStats",
    "LeaseRenewed",
    "LoadBlocks",
    "Loaded",
    "LookedUp",
    "LookupBlocks",
    "NamespaceOpened",
    "OfferStaging",
    "OpenNamespace",
    "PeerBlocks",
    "PeerMarks",
    "PeerVerb",
    "PollStore",
    "QuarantineLease",
    "RenewLease",
    "Request",
    "ReserveBlocks",
    "Reserved",
    "SaveBlocks",
    "StoreStats",
    "Stored",
    "Verb",
    "WritePeer",
]

TENANTS = "tenants"
"""The capability: this daemon wants a token of everybody, from which the tenant follows."""

MOST_NAMESPACES = 1024
"""Namespaces that a connection may have opened at a time."""

SLOT_NBYTES = 24
"""A slot in a message: segment, offset and generation, each a little-endian u64."""

Keys: TypeAlias = bytes
"""Keys of 32 bytes each, one behind the other."""
Position: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
"""Number of a block in its chain; -1 if it is not known."""
PeerVerb: TypeAlias = Literal["has", "read", "remove"]
Verb: TypeAlias = Literal["prefetch", "pin", "unpin", "remove", "clear"]


def _check_keys(keys: bytes) -> None:
    if len(keys) % KEY_NBYTES:
        raise ConfigError(f"keys of {len(keys)} bytes, each has {KEY_NBYTES}")


class Request(Message, frozen=True, kw_only=True):
    """What every request may carry beside its own.

    ``ended`` are numbers of leases that the client is done with: they are released, or aborted, before the
    request is served. ``abandoned`` are those whose answer the client did not wait for: they are ended as
    soon as they exist.
    """

    ended: tuple[Word, ...] = ()
    abandoned: tuple[Word, ...] = ()


class OpenNamespace(Request, frozen=True, kw_only=True, tag="open_namespace"):
    """The whole spec and scope, and the namespace id that the client computed from them.

    With ``lossless`` every verb on its number leaves out what has lost something; the answer must say so too.
    With ``instead_of`` it takes the number of another one, which is open on the connection no more: there may
    be :data:`MOST_NAMESPACES` at a time.
    """

    spec: KVSpec
    scope: KeyScope = KeyScope()
    namespace_id: bytes
    lossless: bool | msgspec.UnsetType = msgspec.UNSET
    instead_of: Count | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_spec(self.spec)


class NamespaceOpened(Message, frozen=True, tag="namespace_opened"):
    """``namespace`` names it in requests of this connection.

    ``shared``: slots may be asked for by address, in segments that this connection may attach to.
    ``writable``: those of write leases too. ``lossless``: as it was asked for. ``stages``: what is saved
    may lie in staging memory of the client (:class:`OfferStaging`). ``in_one``: how many bytes a
    :class:`SaveBlocks` may have, 16 MiB where it is not said.
    """

    namespace: Count
    lease_s: Seconds
    shared: bool = False
    writable: bool = False
    lossless: bool | msgspec.UnsetType = msgspec.UNSET
    stages: bool | msgspec.UnsetType = msgspec.UNSET
    in_one: Count | msgspec.UnsetType = msgspec.UNSET


class OfferStaging(Request, frozen=True, kw_only=True, tag="offer_staging"):
    """Memory of the client out of which the daemon copies blocks that are committed on this connection.

    Answered by :class:`Done`; then the client passes one descriptor, that of a memfd of at least ``nbytes``
    bytes which cannot shrink, and hears :class:`Done` again once the daemon has mapped it.
    """

    nbytes: Word


class LookupBlocks(Request, frozen=True, kw_only=True, tag="lookup_blocks"):
    """Which tier holds each key; no side effect."""

    namespace: Count
    keys: Keys

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class LookedUp(Message, frozen=True, tag="looked_up"):
    """A byte a key: 0 for none, else the number of a tier, from 1."""

    tiers: tuple[str, ...]
    found: bytes


class LoadBlocks(Request, frozen=True, kw_only=True, tag="load_blocks"):
    """Lease the longest stored prefix; with ``inline`` its bytes come with the answer."""

    namespace: Count
    keys: Keys
    lease: Word
    timeout_s: Seconds
    inline: bool = False

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class Loaded(Message, frozen=True, tag="loaded"):
    """The first ``blocks`` of the keys are leased until ``expires_at`` of the daemon's clock.

    Payload: their bytes, if asked for ``inline``; else ``slots`` say where they lie in arena ``epoch``.
    ``lossy`` are the numbers of those that have lost something, if there are any.
    """

    blocks: Count
    expires_at: Moment = 0.0
    epoch: str = ""
    slots: bytes = b""
    lossy: tuple[Count, ...] | msgspec.UnsetType = msgspec.UNSET


class ReserveBlocks(Request, frozen=True, kw_only=True, tag="reserve_blocks"):
    """Reserve slots for those of ``keys`` that are not stored; with ``inline`` they are filled by frame."""

    namespace: Count
    keys: Keys
    lease: Word
    timeout_s: Seconds
    parent: bytes | None = None
    inline: bool = False

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class Reserved(Message, frozen=True, tag="reserved"):
    """``blocks`` slots are reserved, for ``keys``; empty: for all that were asked, in their order."""

    blocks: Count
    keys: Keys = b""
    expires_at: Moment = 0.0
    epoch: str = ""
    slots: bytes = b""


class CommitBlocks(Request, frozen=True, kw_only=True, tag="commit_blocks"):
    """Publish the blocks of a write lease. Payload: their bytes, unless they are in their slots already.

    They may lie in the staging memory of the connection too: ``staged`` says where each begins, as
    little-endian u64, in order.

    With ``publish``, a number for it, a read lease on all of them begins at the same moment. ``lossy`` are
    the numbers of the blocks that are not what the tokens alone give: a lossy codec brought them, or they
    were computed behind a block that has lost something.
    """

    lease: Word
    timeout_s: Seconds
    publish: Word = 0
    lossy: tuple[Count, ...] | msgspec.UnsetType = msgspec.UNSET
    staged: bytes | msgspec.UnsetType = msgspec.UNSET


class SaveBlocks(Request, frozen=True, kw_only=True, tag="save_blocks"):
    """Reserve, fill and commit in one. Payload: the bytes of all ``keys``, which differ, in order."""

    namespace: Count
    keys: Keys
    timeout_s: Seconds
    parent: bytes | None = None

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class Stored(Message, frozen=True, tag="stored"):
    """Blocks newly stored; ``expires_at`` is that of the read lease, if one was wished."""

    blocks: Count
    expires_at: Moment = 0.0


class EndLeases(Request, frozen=True, kw_only=True, tag="end_leases"):
    """Nothing but ``ended`` and ``abandoned``; answered by :class:`Done`."""


class QuarantineLease(Request, frozen=True, kw_only=True, tag="quarantine_lease"):
    """End a write lease; its slots wait until it is named in ``ended``, or its processes are gone."""

    lease: Word


class RenewLease(Request, frozen=True, kw_only=True, tag="renew_lease"):
    """Move the deadline of a lease."""

    lease: Word


class LeaseRenewed(Message, frozen=True, tag="lease_renewed"):
    """The new deadline, on the daemon's clock."""

    expires_at: Moment


class FindLease(Request, frozen=True, kw_only=True, tag="find_lease"):
    """A lease that another process of the session took; with ``inline`` as :class:`LoadBlocks`."""

    lease: Word
    inline: bool = False


class FoundLease(Message, frozen=True, tag="found_lease"):
    """What it holds; ``kind`` is ``read``, ``write`` or empty for none. Payload as :class:`Loaded`."""

    kind: Literal["", "read", "write"] = ""
    spec: KVSpec | None = None
    keys: Keys = b""
    expires_at: Moment = 0.0
    epoch: str = ""
    slots: bytes = b""
    lossy: tuple[Count, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        _check_keys(self.keys)
        if self.spec is not None:
            check_spec(self.spec)


class BlockVerb(Request, frozen=True, kw_only=True, tag="block_verb"):
    """A verb of a namespace that answers with a count."""

    namespace: Count
    verb: Verb
    keys: Keys = b""
    ttl_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class FlushStore(Request, frozen=True, kw_only=True, tag="flush_store"):
    """Wait until everything committed has reached its slower tiers; :class:`Done` of 1, or 0 if not."""

    timeout_s: Seconds


class Done(Message, frozen=True, tag="done"):
    """It is done; ``count`` is what the call returns."""

    count: Count = 0


class GetStats(Request, frozen=True, kw_only=True, tag="get_stats"):
    """Asks for :class:`StoreStats`."""


class StoreStats(Message, frozen=True, tag="store_stats"):
    """Counters and gauges of the tenant's store."""

    stats: Stats


class PollStore(Request, frozen=True, kw_only=True, tag="poll_store"):
    """Asks for :class:`Completions`."""


class Completions(Message, frozen=True, tag="completions"):
    """What ended in the background for this session since the last time."""

    completions: tuple[Completion, ...] = ()


class AskPeer(Request, frozen=True, kw_only=True, tag="ask_peer"):
    """A daemon asks another for blocks of any chains; answered from tiers of its own, never from its peers.

    ``has`` and ``remove`` are answered by :class:`PeerMarks`, ``read`` by :class:`PeerBlocks`.
    """

    namespace: Count
    verb: PeerVerb
    keys: Keys
    timeout_s: Seconds

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class PeerBlocks(Message, frozen=True, tag="peer_blocks"):
    """Payload: the blocks of ``keys``, right if all of it has arrived before ``expires_at``.

    ``asked`` says how many of the keys were looked at, ``parents`` and ``positions`` (-1: not known) are of
    the blocks that were found, ``lossy`` a byte each, not 0 if it has lost something.
    """

    asked: Count
    keys: Keys = b""
    parents: tuple[bytes | None, ...] = ()
    positions: tuple[Position, ...] = ()
    lossy: bytes = b""
    expires_at: Moment = 0.0

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class WritePeer(Request, frozen=True, kw_only=True, tag="write_peer"):
    """Store blocks of any chains. Payload: the bytes of all ``keys``, which differ.

    The rest is as in :class:`PeerBlocks`. Answered by :class:`PeerMarks`: 1 for stored, 0 for there already.
    """

    namespace: Count
    keys: Keys
    parents: tuple[bytes | None, ...]
    positions: tuple[Position, ...]
    lossy: bytes
    timeout_s: Seconds

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class PeerMarks(Message, frozen=True, tag="peer_marks"):
    """A byte for each key that was asked."""

    marks: bytes


DaemonMessage: TypeAlias = (
    OpenNamespace | NamespaceOpened | LookupBlocks | LookedUp | LoadBlocks | Loaded | ReserveBlocks
    | Reserved | CommitBlocks | SaveBlocks | Stored | EndLeases | QuarantineLease | RenewLease
    | LeaseRenewed | FindLease | FoundLease | BlockVerb | FlushStore | Done | GetStats | StoreStats
    | PollStore | Completions | AskPeer | PeerBlocks | WritePeer | PeerMarks | OfferStaging
)  # fmt: skip
