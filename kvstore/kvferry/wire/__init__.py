"""The wire protocol: frames, messages, handshake, and the channel that carries them."""

from kvferry.wire.channel import Channel
from kvferry.wire.incoming import Incoming
from kvferry.wire.options import ChannelOptions, Peer, process_epoch
from kvferry.wire.pool import ChannelPool
from kvferry.wire.protocol import MIN_VERSION, VERSION, Limits, Versions, WireProtocol
from kvferry.wire.server import ChannelServer
from kvferry.wire.shared_arena import SHARED_ARENA, ArenaOffer, SharedArena, can_share_arena

__all__ = [
    "MIN_VERSION",
    "SHARED_ARENA",
    "VERSION",
    "ArenaOffer",
    "Channel",
    "ChannelOptions",
    "ChannelPool",
    "ChannelServer",
    "Incoming",
    "Limits",
    "Peer",
    "SharedArena",
    "Versions",
    "WireProtocol",
    "can_share_arena",
    "process_epoch",
]
