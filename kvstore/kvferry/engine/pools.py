"""Channels to many addresses, for those who talk to workers that come and go."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.core.errors import ConnectionClosedError
from kvferry.wire import Channel, ChannelOptions, ChannelPool, SharedArena, can_share_arena

__all__ = ["ChannelPools"]


class ChannelPools:
    """One :class:`ChannelPool` an address; the pools used least recently are closed. Thread safe.

    Args:
        options: For all channels.
        max_addresses: Pools kept at most: a restarted worker may have another port each time.
    """

    def __init__(self, options: ChannelOptions, *, max_addresses: int = 64) -> None:
        self._options = options
        self._max_addresses = max_addresses
        self._lock = threading.Lock()
        self._pools: OrderedDict[str, ChannelPool] = OrderedDict()
        self._arenas: OrderedDict[str, SharedArena] = OrderedDict()
        self._closed = False

    def pool(self, address: str) -> ChannelPool:
        """The pool of ``address``.

        Raises:
            ConnectionClosedError: After :meth:`close`.
        """
        expired: list[ChannelPool] = []
        with self._lock:
            if self._closed:
                raise ConnectionClosedError(f"no new channel to {address}: shutting down")
            found = self._pools.get(address)
            if found is None:
                found = self._pools[address] = ChannelPool(address, self._options)
            self._pools.move_to_end(address)
            while len(self._pools) > self._max_addresses:
                expired.append(self._pools.popitem(last=False)[1])
        for pool in expired:
            pool.close()
        return found

    @contextmanager
    def channel(self, address: str, deadline: float) -> Iterator[Channel]:
        """A channel to ``address`` for the caller alone; kept for reuse unless an exception ends it.

        Raises:
            KVFerryError: As :meth:`Channel.connect`.
        """
        with self.pool(address).channel(deadline) as channel:
            yield channel

    def arena(self, address: str, channel: Channel) -> SharedArena | None:
        """The map of the arena behind ``address``, the same for all channels; ``None`` if none is shared."""
        if not can_share_arena(channel):
            return None
        with self._lock:
            found = self._arenas.setdefault(address, SharedArena())
            self._arenas.move_to_end(address)
            while len(self._arenas) > self._max_addresses:  # the memory goes with its last user
                self._arenas.popitem(last=False)
            return found

    def forget_gone(self) -> None:
        """Give back the memory of arenas whose owner has ended; for a call every second or so."""
        with self._lock:
            arenas = list(self._arenas.values())
        for arena in arenas:
            arena.forget_gone()

    def close(self) -> None:
        """Close all idle channels and refuse new ones; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._arenas.clear()
            pools = list(self._pools.values())
            self._pools.clear()
        for pool in pools:
            pool.close()
