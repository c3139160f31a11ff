"""Which server has which name: all the same one, or by the slots of a cluster, which are learnt from it."""

from __future__ import annotations

import binascii
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Final

from kvferry.core.address import Address, parse_url
from kvferry.core.errors import ConfigError, KVFerryError, TierError
from kvferry.store.remote.redis.options import RedisOptions
from kvferry.store.remote.redis.resp import Reply, ReplyError
from kvferry.store.remote.redis.server import Server, ServerFacts

__all__ = ["SLOTS", "Servers", "slot_of"]

SLOTS: Final = 16384
_LEARN_PAUSE_S: Final = 0.5
_MAX_SERVERS: Final = 1024


def slot_of(name: str) -> int:
    """The slot of a name: of what stands between its first braces, if that is something."""
    data = name.encode()
    start = data.find(b"{")
    if start >= 0:
        end = data.find(b"}", start + 1)
        if end > start + 1:
            data = data[start + 1 : end]
    return binascii.crc_hqx(data, 0) % SLOTS


class Servers:
    """All servers of one tier. Thread safe.

    Args:
        tier: Name of the tier.
        options: Of the tier.
        met: Called with what a server says of itself, when a connection to it is made.
    """

    def __init__(self, tier: str, options: RedisOptions, met: Callable[[Address, ServerFacts], None]) -> None:
        self._tier = tier
        self._options = options
        self._met = met
        self._seeds = options.addresses()
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._servers: dict[tuple[str, int | None, str], Server] = {}
        self._owners: list[Server | None] = []
        self._only: Server | None = None
        self._clustered: bool | None = {"on": True, "off": False}.get(options.cluster)
        self._stale = True
        self._learnt_at = float("-inf")
        self._closed = False

    @property
    def only(self) -> Server | None:
        """The one server, once it is known that they are no cluster."""
        if self._clustered is False and self._only is None:
            self._only = self.at(self._seeds[0])
        return self._only

    @property
    def clustered(self) -> bool:
        """Whether they are a cluster, as far as is known."""
        return bool(self._clustered)

    def all(self) -> list[Server]:
        """Every server that was used so far."""
        with self._lock:
            return list(self._servers.values())

    def primaries(self) -> list[Server]:
        """Those that hold slots; the one server where there is no cluster."""
        if not self.clustered:
            return [self.at(self._seeds[0])]
        return list({id(s): s for s in self._owners if s is not None}.values())

    def at(self, address: Address) -> Server:
        """The server at an address.

        Raises:
            TierError: If there are absurdly many, or the tier is closed.
        """
        place = (address.host, address.port, address.path)
        with self._lock:
            server = self._servers.get(place)
            if server is None:
                if self._closed or len(self._servers) >= _MAX_SERVERS:
                    raise TierError(f"tier {self._tier}: closed, or more than {_MAX_SERVERS} servers")
                server = self._servers[place] = Server(self._tier, address, self._options, self._met)
            return server

    def named(self, place: str, asked: Server) -> Server:
        """The server that a redirection names, as ``host:port``; without a host it is that of ``asked``.

        Raises:
            TierError: If it names none.
        """
        host, _, port = place.rpartition(":")
        return self.at(_moved(asked.address, host.strip("[]"), port))

    def of(self, name: str) -> Server:
        """The server that has a name, as far as is known. :meth:`prepare` comes first."""
        if not self.clustered:
            return self.at(self._seeds[0])
        return self._owners[slot_of(name)] or self.at(self._seeds[0])

    def note_change(self) -> None:
        """The slots are not as they were: they are learnt anew with the next call."""
        self._stale = True

    def prepare(self, deadline: float) -> None:
        """Learn what is not known: whether it is a cluster, and its slots.

        Raises:
            KVFerryError: If no server tells, and nothing was known before.
        """
        if self._clustered is False or (self._clustered and not self._stale):
            return
        if self._owners and (
            time.monotonic() < self._learnt_at + _LEARN_PAUSE_S or not self._learning.acquire(blocking=False)
        ):
            return  # what is known may still do, and redirections are followed
        if not self._owners:
            self._learning.acquire()  # bounded: whoever has it has a deadline of its own
        try:
            if self._stale or self._clustered is None:
                self._learn(deadline)
        finally:
            self._learning.release()

    def _learn(self, deadline: float) -> None:
        known = [server.address for server in self.primaries()] if self._owners else []
        last: KVFerryError | None = None
        for address in [*known, *self._seeds]:
            server = self.at(address)
            try:
                self._learn_from(server, deadline)
                return
            except ConfigError:
                raise
            except KVFerryError as error:
                last = error
        self._learnt_at = time.monotonic()
        if last is not None and not self._owners:
            raise last

    def _learn_from(self, server: Server, deadline: float) -> None:
        lane = server.lease(deadline)
        try:
            if self._clustered is None:
                self._clustered = lane.facts.mode == "cluster"
            reply = (
                lane.call(server.request_deadline(deadline), b"CLUSTER", b"SLOTS") if self._clustered else []
            )
        except ReplyError as error:
            server.give_back(lane)
            raise TierError(f"{server.address} does not tell its slots: {error}") from error
        except BaseException as error:
            server.drop(lane, error if isinstance(error, KVFerryError) else None)
            raise
        server.give_back(lane)
        if self._clustered:
            self._owners = self._read_slots(reply, server)
            self._learnt_at = time.monotonic()
        self._stale = False

    def _read_slots(self, reply: Reply, asked: Server) -> list[Server | None]:
        owners: list[Server | None] = [None] * SLOTS
        for entry in reply if isinstance(reply, list) else []:
            match entry:
                case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                    text = host.decode("utf-8", "replace") if isinstance(host, bytes) else ""
                    server = self.at(_moved(asked.address, text, str(port)))
                    owners[first : last + 1] = [server] * (last + 1 - first)
                case _:
                    text = repr(entry)[:80]
                    raise TierError(f"{asked.address} tells its slots in a way that is not known: {text}")
        if not any(owners):
            raise TierError(f"{asked.address} is of a cluster without slots")
        return owners

    def close(self) -> None:
        """Close all."""
        with self._lock:
            self._closed = True
            servers = list(self._servers.values())
        for server in servers:
            server.close()


def _moved(address: Address, host: str, port: str) -> Address:
    """The same way to another place."""
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise TierError(f"{address} names a server at port {port[:16]!r}")
    moved = dataclasses.replace(address, host=host or address.host, port=int(port))
    try:
        return parse_url(moved.url)
    except ConfigError as error:
        raise TierError(f"{address} names a server at {host[:64]!r}: {error}") from error
