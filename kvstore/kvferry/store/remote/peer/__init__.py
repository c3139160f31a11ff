"""The ``peer`` tier: other kvferry daemons."""

from __future__ import annotations

from kvferry.store.remote.peer.asked import AskedPeer, PeerMaker
from kvferry.store.remote.peer.options import PeerOptions
from kvferry.store.remote.peer.tier import PeerTier

__all__ = ["AskedPeer", "PeerMaker", "PeerOptions", "PeerTier"]
