"""Which messages there are, by number, and which may be sent by whom when."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvferry.wire import daemon_messages as d
from kvferry.wire import messages as m
from kvferry.wire.messages import Message

__all__ = [
    "DESCRIPTOR_TYPES",
    "HANDSHAKE_ONLY",
    "NAMES",
    "NUMBERS",
    "PAYLOAD_TYPES",
    "TRANSITIONS",
    "TYPES",
    "TYPE_NUMBERS",
    "Side",
    "State",
    "next_state",
]

# Append only: a number is never given to another message, not even after its message is gone.
TYPE_NUMBERS: Final[Mapping[type[Message], int]] = MappingProxyType(
    {
        m.Hello: 1,
        m.Welcome: 2,
        m.Failure: 3,
        m.Ping: 4,
        m.Pong: 5,
        m.BeginStream: 16,
        m.StreamReady: 17,
        m.PutLayer: 18,
        m.LayerAck: 19,
        m.FinishStream: 20,
        m.StreamDone: 21,
        m.AbortStream: 22,
        m.StreamSlots: 23,
        m.LayerPlaced: 24,
        m.PutEncoded: 25,
        m.EncodedAck: 26,
        m.StreamWindows: 27,
        m.Describe: 32,
        m.Description: 33,
        m.Prefill: 34,
        m.PrefillDone: 35,
        m.Generate: 36,
        m.GenerateReady: 37,
        m.TokensOut: 38,
        m.Finished: 39,
        m.Cancel: 40,
        m.Status: 41,
        m.StatusReport: 42,
        m.AttachArena: 48,
        m.ArenaSegments: 49,
        d.OpenNamespace: 64,
        d.NamespaceOpened: 65,
        d.LookupBlocks: 66,
        d.LookedUp: 67,
        d.LoadBlocks: 68,
        d.Loaded: 69,
        d.ReserveBlocks: 70,
        d.Reserved: 71,
        d.CommitBlocks: 72,
        d.SaveBlocks: 73,
        d.Stored: 74,
        d.EndLeases: 75,
        d.QuarantineLease: 76,
        d.RenewLease: 77,
        d.LeaseRenewed: 78,
        d.FindLease: 79,
        d.FoundLease: 80,
        d.BlockVerb: 81,
        d.FlushStore: 82,
        d.Done: 83,
        d.GetStats: 84,
        d.StoreStats: 85,
        d.PollStore: 86,
        d.Completions: 87,
        d.AskPeer: 88,
        d.PeerBlocks: 89,
        d.WritePeer: 90,
        d.PeerMarks: 91,
        d.OfferStaging: 92,
    }
)
NUMBERS: Final[dict[type[Message], int]] = dict(TYPE_NUMBERS)  # asked for every frame: faster than the proxy
TYPES: Final[dict[int, type[Message]]] = {number: cls for cls, number in TYPE_NUMBERS.items()}
NAMES: Final[Mapping[type[Message], str]] = {cls: str(cls.__struct_config__.tag) for cls in TYPE_NUMBERS}

PAYLOAD_TYPES: Final[frozenset[type[Message]]] = frozenset(
    {
        m.PutLayer,
        m.PutEncoded,
        m.Prefill,
        d.Loaded,
        d.FoundLease,
        d.CommitBlocks,
        d.SaveBlocks,
        d.PeerBlocks,
        d.WritePeer,
    }
)
"""Messages whose frame may have a payload; in any other frame one is refused unread."""
DESCRIPTOR_TYPES: Final[frozenset[type[Message]]] = frozenset({m.ArenaSegments})
"""Messages behind whose frame descriptors may come, where the connection can pass them. Servers send them."""


class Side(enum.Enum):
    """The two ends of a connection."""

    CLIENT = "client"
    SERVER = "server"

    @property
    def other(self) -> Side:
        """The end that this one talks to."""
        return Side.SERVER if self is Side.CLIENT else Side.CLIENT


class State(enum.Enum):
    """Where a connection stands."""

    START = "start"
    OFFERED = "offered"
    """The hello is on its way or has come; the welcome is owed."""
    OPEN = "open"
    REFUSED = "refused"


# Who may send what in which state, and the state after it. ``Message`` stands for every message
# that has no line of its own in the state.
TRANSITIONS: Final[Mapping[State, Mapping[tuple[Side, type[Message]], State]]] = MappingProxyType(
    {
        State.START: {
            (Side.CLIENT, m.Hello): State.OFFERED,
            (Side.SERVER, m.Failure): State.REFUSED,
        },
        State.OFFERED: {
            (Side.SERVER, m.Welcome): State.OPEN,
            (Side.SERVER, m.Failure): State.REFUSED,
        },
        State.OPEN: {
            (Side.CLIENT, Message): State.OPEN,
            (Side.SERVER, Message): State.OPEN,
        },
        State.REFUSED: {},
    }
)
HANDSHAKE_ONLY: Final[frozenset[type[Message]]] = frozenset({m.Hello, m.Welcome})


def next_state(state: State, sender: Side, cls: type[Message]) -> State | None:
    """The state after ``sender`` sent a ``cls``; ``None`` where the table does not allow it."""
    rules = TRANSITIONS[state]
    found = rules.get((sender, cls))
    if found is None and cls not in HANDSHAKE_ONLY:
        found = rules.get((sender, Message))
    return found
