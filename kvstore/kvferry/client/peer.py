"""How a daemon asks another one: blocks of any chains, which that one answers from its own tiers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import TypeVar

from kvferry.client.line import Line
from kvferry.client.link import Link
from kvferry.client.options import ClientOptions
from kvferry.core.clock import time_left
from kvferry.core.errors import (
    ConfigError,
    ConnectionClosedError,
    LeaseExpiredError,
    TransferTimeoutError,
    UnavailableError,
)
from kvferry.core.keys import BlockKey, split_keys
from kvferry.core.recent import Recent
from kvferry.core.spec import KeyScope
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, ReadResult, TierNamespace
from kvferry.wire import daemon_messages as d

__all__ = ["PeerClient"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_NBYTES = 16 << 20  # in one request, so that several peers and several callers move at once
_MISS = ReadResult(ReadOutcome.MISS)
_DEFAULT_TENANT = "default"
_MARGIN_S = 0.05


class PeerClient:
    """Asks the daemon at ``url``. Thread safe; see :class:`kvferry.store.remote.peer.AskedPeer`.

    While that daemon is away every call raises at once; a thread of the link tries to reach it, which says
    once that it is away, and once that it is back.

    Args:
        url: Where the daemon is.
        connections: Most requests under way; further ones wait for one, until their deadline.
        timeout_s: For making a connection.
        own_epoch: The run of the daemon that asks: it must not ask itself.
        token_file: File with the token of the tenant whose blocks are asked for, where that daemon wants one;
            without, all tenants come as ``default`` there, apart by their scopes, which keeps nobody out.
            With one, a daemon that lets everybody in is not asked: others could ask for the same blocks.
        trusted_network: See :class:`ClientOptions`.
    """

    def __init__(
        self,
        url: str,
        *,
        connections: int,
        timeout_s: float,
        own_epoch: Callable[[], str],
        token_file: str | None = None,
        trusted_network: bool = False,
    ) -> None:
        self.url = url
        self._own_epoch = own_epoch
        self._options = ClientOptions(
            connect_timeout_s=min(1.0, timeout_s), call_timeout_s=timeout_s, max_connections=connections,
            kept_nbytes=0, share_memory=False, role="peer", first_pause_s=0.1, last_pause_s=1.0,
            token_file=token_file, trusted_network=trusted_network,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False
        self._itself = ""
        self._open = ""
        self._spaces = Recent(_as_default)

    @property
    def away(self) -> str:
        """Why the daemon cannot be reached; empty if it can, or nobody has tried."""
        return self._itself or ("" if self._link is None else self._link.away or self._open)

    def has(self, namespace: TierNamespace, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Which keys it holds."""
        return self._marks(namespace, "has", keys, deadline)

    def remove(self, namespace: TierNamespace, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Forget blocks; whether each was held."""
        return self._marks(namespace, "remove", keys, deadline)

    def _marks(
        self, namespace: TierNamespace, verb: d.PeerVerb, keys: Sequence[bytes], deadline: float
    ) -> list[bool]:
        def ask() -> list[bool]:
            with self._line(namespace, deadline) as (line, number):
                request = d.AskPeer(
                    namespace=number, verb=verb, keys=b"".join(keys), timeout_s=_left(deadline)
                )
                return _flags(line, line.call(request, d.PeerMarks, deadline), len(keys))

        return self._twice(ask)

    def read(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], deadline: float
    ) -> list[ReadResult]:
        """Read blocks, received into their buffers."""
        results: list[ReadResult] = []
        step = max(1, _MOST_NBYTES // max(1, namespace.spec.block_nbytes))
        while len(results) < len(blocks):
            some = blocks[len(results) : len(results) + step]

            def ask(some: Sequence[BlockRead] = some) -> list[ReadResult]:
                return self._read(namespace, some, deadline)

            results += self._twice(ask)
        return results

    def _read(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], deadline: float
    ) -> list[ReadResult]:
        wanted: dict[BlockKey, list[int]] = {}
        for index, block in enumerate(blocks):
            wanted.setdefault(block.key, []).append(index)
        with self._line(namespace, deadline) as (line, number):
            request = d.AskPeer(
                namespace=number, verb="read", keys=b"".join(wanted), timeout_s=_left(deadline)
            )
            incoming = line.ask(request, d.PeerBlocks, deadline)
            answer = incoming.message
            assert isinstance(answer, d.PeerBlocks)
            keys = split_keys(answer.keys)
            told = {len(answer.parents), len(answer.positions), len(answer.lossy)}
            if len(set(keys)) < len(keys) or not wanted.keys() >= set(keys) or told != {len(keys)}:
                raise line.wrong(f"{len(keys)} blocks that were not asked for")
            if not 0 < answer.asked <= len(wanted):
                raise line.wrong(f"{answer.asked} of {len(wanted)} keys looked at")
            if incoming.payload_nbytes != len(keys) * namespace.spec.block_nbytes:
                raise line.wrong(f"{incoming.payload_nbytes} bytes for {len(keys)} blocks")
            incoming.read_into([blocks[wanted[key][0]].into for key in keys], deadline)
            if keys and time.monotonic() >= line.local(answer.expires_at):
                raise LeaseExpiredError(f"{self.url}: its blocks arrived after the end of their lease")
        results = [_MISS] * len(blocks)
        for key, parent, position, lossy in zip(
            keys, answer.parents, answer.positions, answer.lossy, strict=True
        ):
            first, *others = wanted[key]
            above = None if parent is None else BlockKey(parent)
            for index in (first, *others):
                if index != first:
                    blocks[index].into[:] = blocks[first].into
                results[index] = ReadResult(ReadOutcome.HIT, "", above, position, None, bool(lossy))
        if answer.asked < len(wanted):  # its answers are smaller than ours
            rest = [index for key in list(wanted)[answer.asked :] for index in wanted[key]]
            for index, result in zip(
                rest, self._read(namespace, [blocks[i] for i in rest], deadline), strict=True
            ):
                results[index] = result
        return results

    def write(self, namespace: TierNamespace, blocks: Sequence[BlockWrite], deadline: float) -> list[bool]:
        """Store blocks of different keys; whether each is new."""
        results: list[bool] = []
        step = max(1, _MOST_NBYTES // max(1, namespace.spec.block_nbytes))
        for start in range(0, len(blocks), step):
            some = blocks[start : start + step]

            def ask(some: Sequence[BlockWrite] = some) -> list[bool]:
                return self._write(namespace, some, deadline)

            results += self._twice(ask)  # what is there already is no error
        return results

    def _write(self, namespace: TierNamespace, blocks: Sequence[BlockWrite], deadline: float) -> list[bool]:
        with self._line(namespace, deadline) as (line, number):
            request = d.WritePeer(
                namespace=number,
                keys=b"".join([block.key for block in blocks]),
                parents=tuple([block.parent for block in blocks]),
                positions=tuple([block.position for block in blocks]),
                lossy=bytes(block.lossy for block in blocks),
                timeout_s=_left(deadline),
            )
            payload = [block.data for block in blocks]
            answer = line.call(request, d.PeerMarks, deadline, payload)
            return _flags(line, answer, len(blocks))

    def close(self) -> None:
        """End the connections; a second call does nothing."""
        with self._lock:
            self._closed = True
            link = self._link
        if link is not None:
            link.close()

    @contextmanager
    def _line(self, namespace: TierNamespace, deadline: float) -> Iterator[tuple[Line, int]]:
        """A connection, and the number of the namespace on it."""
        if self._itself:
            raise ConfigError(self._itself)
        link = self._reach()
        if link.away:  # else this call might wait for the attempt to reach it
            raise UnavailableError(f"{self.url}: the daemon is away: {link.away}")
        with link.line(deadline) as line:
            if line.epoch == self._own_epoch():
                self._itself = f"peer {self.url} is this daemon itself: leave it out of its own peers"
                raise ConfigError(self._itself)
            self._require_guarded(line)
            wanted = self._named(namespace)
            name = (wanted.namespace_id, True)  # what has lost something is told, block by block
            opened = line.opened.get(name)
            if opened is None:
                request = d.OpenNamespace(
                    spec=wanted.spec, scope=wanted.scope, namespace_id=wanted.namespace_id
                )
                opened = line.open(request, name, deadline)
            yield line, opened.namespace

    def _require_guarded(self, line: Line) -> None:
        if self._options.token_file is None or d.TENANTS in line.channel.peer.capabilities:
            self._open = ""
            return
        why = (
            f"peer {self.url} lets everybody in, or is too old to say that it does not, so it is not asked "
            "for blocks of a tenant: give it daemon.credentials, or a release as new as this one"
        )
        if not self._open:
            log.warning("%s", why)
        self._open = why
        raise UnavailableError(why)

    def _named(self, namespace: TierNamespace) -> TierNamespace:
        """The namespace as it is called there: tenants are apart, though all of them come as one."""
        if self._options.token_file is not None or namespace.tenant == _DEFAULT_TENANT:
            return namespace
        return self._spaces.get(namespace)

    def _reach(self) -> Link:
        with self._lock:
            if self._closed:
                raise UnavailableError(f"{self.url}: the daemon is not asked any more")
            if self._link is None:
                self._link = Link(self.url, replace(self._options), label=f"peer {self.url}")
            return self._link

    @staticmethod
    def _twice(call: Callable[[], T]) -> T:
        try:
            return call()
        except ConnectionClosedError:
            return call()


def _as_default(namespace: TierNamespace) -> TierNamespace:
    return TierNamespace.of(_DEFAULT_TENANT, namespace.spec, _scope(namespace))


def _scope(namespace: TierNamespace) -> KeyScope:
    """A scope that no other tenant's blocks have."""
    mixed = blake2b(b"kvferry tenant at a peer\0" + namespace.tenant.encode() + b"\0", digest_size=32)
    if (salt := namespace.scope.salt) is not None:
        mixed.update(b"\1" + salt)
    return replace(namespace.scope, salt=mixed.digest())


def _left(deadline: float) -> float:
    left = time_left(deadline)
    if left <= 0:
        raise TransferTimeoutError("not begun by the deadline")
    return left - min(_MARGIN_S, left / 2)


def _flags(line: Line, answer: d.PeerMarks, count: int) -> list[bool]:
    if len(answer.marks) != count:
        raise line.wrong(f"{len(answer.marks)} answers about {count} keys")
    return [bool(mark) for mark in answer.marks]
