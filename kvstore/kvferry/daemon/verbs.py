"""What requests are called in figures, and what they take: a right, and a share of the tenant's rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvferry.core.errors import OverloadedError
from kvferry.wire import daemon_messages as d
from kvferry.wire.messages import AttachArena, Message, Ping

if TYPE_CHECKING:
    from kvferry.daemon.credentials import Right
    from kvferry.daemon.tenants import Grant

__all__ = ["require_leave", "verb_of"]

_NAMES: Final[dict[type[Message], str]] = {
    d.OpenNamespace: "open",
    d.LookupBlocks: "lookup",
    d.LoadBlocks: "load",
    d.ReserveBlocks: "reserve",
    d.CommitBlocks: "commit",
    d.SaveBlocks: "save",
    d.OfferStaging: "stage",
    d.EndLeases: "end_leases",
    d.QuarantineLease: "quarantine",
    d.RenewLease: "renew",
    d.FindLease: "find_lease",
    d.FlushStore: "flush",
    d.GetStats: "stats",
    d.PollStore: "poll",
    d.AskPeer: "peer_read",
    d.WritePeer: "peer_write",
    AttachArena: "attach",
    Ping: "ping",
}
_RIGHTS: Final[dict[type[Message], Right]] = {
    d.LookupBlocks: "read",
    d.LoadBlocks: "read",
    d.FindLease: "read",
    d.GetStats: "read",
    d.PollStore: "read",
    d.ReserveBlocks: "write",
    d.CommitBlocks: "write",
    d.SaveBlocks: "write",
    d.OfferStaging: "write",
    d.QuarantineLease: "write",
    d.FlushStore: "write",
    d.WritePeer: "write",
}
_UNMETERED: Final = frozenset({
    d.CommitBlocks, d.OfferStaging, d.EndLeases, d.QuarantineLease, d.RenewLease, AttachArena, Ping,
})  # fmt: skip
"""What ends or keeps what was begun: to refuse it would only hold more for longer."""
_READING: Final = ("prefetch", "has", "read")


def verb_of(message: Message) -> str:
    """What a request is called in figures: a closed list, whatever clients send."""
    if isinstance(message, d.BlockVerb):
        return message.verb
    return _NAMES.get(type(message), "other")


def require_leave(grant: Grant, message: Message) -> None:
    """See that a connection may make a request now.

    Raises:
        AuthError: If it lacks the right.
        OverloadedError: If its tenant has used up its rate.
    """
    right = _RIGHTS.get(type(message))
    if isinstance(message, (d.BlockVerb, d.AskPeer)):
        right = "read" if message.verb in _READING else "write"
    elif isinstance(message, d.OpenNamespace) and not grant.allows("write"):
        right = "read"  # either does: it is how one begins
    if right is not None and not grant.allows(right):
        grant.require(right, verb_of(message))
    if type(message) not in _UNMETERED:
        try:
            grant.tenant.meter.admit()
        except OverloadedError:
            grant.tenant.count_refusal("rate")
            raise
