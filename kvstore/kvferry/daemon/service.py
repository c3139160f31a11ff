"""One connection of a client: requests answered in order, by the thread of the connection."""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, cast

import msgspec

from kvferry.core.blockstore import Hit
from kvferry.core.buffers import Buf
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    ConfigError,
    KVFerryError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    RequestError,
)
from kvferry.core.keys import BlockKey, split_keys
from kvferry.core.leases import SlotReadLease
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.core.open_files import lack_of_files
from kvferry.core.segments import Slot
from kvferry.core.write_leases import SlotWriteLease
from kvferry.daemon.opened import OpenedNamespaces
from kvferry.daemon.peer_requests import has_blocks, read_blocks, remove_blocks, write_blocks
from kvferry.daemon.staging import Staging
from kvferry.daemon.verbs import require_leave, verb_of
from kvferry.wire import daemon_messages as d
from kvferry.wire.channel import Channel
from kvferry.wire.incoming import Incoming
from kvferry.wire.messages import AttachArena, Message, Ping, Pong
from kvferry.wire.payload import scratch_pieces
from kvferry.wire.shared_arena import ArenaOffer, can_share_arena

if TYPE_CHECKING:
    from kvferry.daemon.node import Daemon

__all__ = ["Service"]

log = logging.getLogger(__name__)

_SLOT: Final = struct.Struct("<3Q")
_IDLE_S: Final = 3600.0
_SEND_S: Final = 10.0
_SLOWEST: Final = 10e6  # bytes a second below which a client counts as stuck
_MOST_IN_ONE_NBYTES: Final = 64 << 20  # of a save in one frame, what is stored already included


class Reply(NamedTuple):
    """What a request is answered with."""

    message: Message
    payload: Sequence[Buf] = ()
    held: Sequence[SlotReadLease] = ()  # until it is sent
    lent: bool = False  # whether the payload stays as it is until the client has it


class Service:
    """Serves one channel until it ends. Used by the thread of the connection alone.

    Args:
        node: The daemon's parts.
        channel: The connection, after its handshake.

    Raises:
        KVFerryError: If the client has no right to be here, or its channel ends.
    """

    def __init__(self, node: Daemon, channel: Channel) -> None:
        self._node = node
        self._channel = channel
        self._grant = grant = node.admit(channel)
        store = grant.tenant.store
        self._arena = store.arena
        self._pid = (channel.peer_pid or 0) if can_share_arena(channel) else 0
        may_read, may_write = grant.allows("read"), grant.allows("read") and grant.allows("write")
        self._shares = self._pid > 0 and (may_write if self._arena.shared else may_read)
        self._fills = self._shares and self._arena.shared
        """Whether this client writes slots itself; who does not stages what it saves, or sends it."""
        stages = can_share_arena(channel) and grant.allows("write") and not self._fills
        self._staging = Staging(channel, may_stage=stages)
        self._offer = ArenaOffer(channel, store.arena, may_write=may_write)
        self._moved = (0, 0)  # blocks and bytes of the request that is being answered
        self._ended: tuple[int, ...] = ()  # leases whose end came with it, and is still to be done
        try:
            self._session = node.sessions.join(channel, grant.tenant.name, store)
        except BaseException:
            node.tenants.leave(channel)
            raise
        self._namespaces = OpenedNamespaces(self._session.store, channel.address)

    def run(self) -> None:
        """Answer requests until the channel ends."""
        channel = self._channel
        try:
            while True:
                incoming = channel.receive_idle(deadline_in(_IDLE_S))
                if incoming is not None:
                    self._answer(incoming)
        finally:
            self._node.tenants.leave(channel)
            self._node.sessions.leave(self._session)

    def _answer(self, incoming: Incoming) -> None:
        started, failed, self._moved = time.monotonic(), True, (0, 0)
        try:
            failed = not self._try_answer(incoming)
        finally:
            if self._ended:
                self._end()
            blocks, nbytes = (0, 0) if failed else self._moved
            self._grant.tenant.meter.spend(nbytes)
            self._session.count(verb_of(incoming.message), blocks)
            self._node.operations.done(
                verb_of(incoming.message), self._session.name, self._session.tenant,
                seconds=time.monotonic() - started, blocks=blocks, nbytes=nbytes, failed=failed,
            )  # fmt: skip

    def _try_answer(self, incoming: Incoming) -> bool:
        message = incoming.message
        try:
            with self._node.work:
                if isinstance(message, d.Request):
                    self._ended = message.ended
                    if self._ended and not isinstance(message, d.LoadBlocks):
                        self._end()
                    if message.abandoned:
                        self._session.abandon(message.abandoned)
                require_leave(self._grant, message)
                if isinstance(message, AttachArena):
                    self._attach(incoming)
                    return True
                if isinstance(message, d.OfferStaging):
                    self._staging.take(message, incoming)
                    return True
                reply = self._reply_to(incoming)
        except (KVFerryError, OSError) as raised:
            error = lack_of_files(raised) or raised
            if not isinstance(error, KVFerryError):
                raise
            if self._channel.closed or (isinstance(error, ProtocolError) and error.remote):
                raise
            log.debug("%s: %s refused: %s", self._channel.address, type(message).__name__, error)
            incoming.discard(self._send_by(incoming.payload_nbytes))
            self._channel.send_failure(error, deadline=deadline_in(_SEND_S), request_id=incoming.request_id)
            return False
        nbytes = sum(map(len, cast("Sequence[memoryview]", reply.payload)))
        try:
            limit = self._send_by(nbytes)
            self._channel.reply(incoming, reply.message, reply.payload, deadline=limit, lent=reply.lent)
        finally:
            for lease in reply.held:
                with contextlib.suppress(KVFerryError):
                    lease.release()
        return True

    def _end(self) -> None:
        """End what the request says: before it is answered, but for a load that finds all in memory.

        That needs no room, and its answer need not wait.
        """
        numbers, self._ended = self._ended, ()
        self._session.end(numbers)

    def _reply_to(self, incoming: Incoming) -> Reply:
        message = incoming.message
        if isinstance(message, d.CommitBlocks):
            return self._commit(message, incoming)
        if isinstance(message, d.SaveBlocks):
            return self._save(message, incoming)
        if isinstance(message, d.WritePeer):
            return self._write_peer(message, incoming)
        verb = self._VERBS.get(type(message))
        if verb is None:
            raise ProtocolError(
                f"{self._channel.address}: {type(message).__name__} is no request to a daemon", remote=True
            )
        return verb(self, message)

    @staticmethod
    def _send_by(nbytes: int) -> float:
        return deadline_in(_SEND_S + nbytes / _SLOWEST)

    def _require_taking(self) -> None:
        if self._node.draining:
            raise OverloadedError(
                "the daemon is draining: it finishes what is under way, and takes no new work"
            )

    # ---- namespaces ------------------------------------------------------------------------------

    def _open(self, message: d.OpenNamespace) -> Reply:
        number = self._namespaces.open(message)
        return Reply(
            d.NamespaceOpened(
                namespace=number,
                lease_s=self._node.lease_s,
                shared=self._shares,
                writable=self._fills,
                lossless=True if message.lossless is True else msgspec.UNSET,
                stages=True if self._staging.may_stage else msgspec.UNSET,
                in_one=_MOST_IN_ONE_NBYTES,
            )
        )

    def _namespace(self, number: int) -> MemoryNamespace:
        return self._namespaces.get(number)

    # ---- another daemon --------------------------------------------------------------------------

    def _ask_peer(self, message: d.AskPeer) -> Reply:
        namespace = self._namespaces.for_peer(message.namespace)
        if message.verb == "has":
            return Reply(has_blocks(namespace, split_keys(message.keys)))
        if message.verb == "remove":
            self._require_waiting(message.verb)
            return Reply(remove_blocks(namespace, split_keys(message.keys)))
        self._require_taking()
        found = read_blocks(namespace, message, self._node.max_payload_nbytes)
        self._moved = (len(found.payload), len(found.payload) * namespace.block_nbytes)
        return Reply(found.message, found.payload, found.leases)

    def _write_peer(self, message: d.WritePeer, incoming: Incoming) -> Reply:
        self._require_taking()
        self._moved = (len(message.lossy), incoming.payload_nbytes)
        namespace = self._namespaces.for_peer(message.namespace, takes_lossy=False)
        return Reply(write_blocks(namespace, message, incoming, self._channel.address))

    def _attach(self, incoming: Incoming) -> None:
        if not self._shares:
            raise ConfigError("memory is shared with processes of this machine that the daemon can watch")
        self._offer.answer(incoming, deadline_in(_SEND_S))

    # ---- reading ---------------------------------------------------------------------------------

    def _lookup(self, message: d.LookupBlocks) -> Reply:
        hit = self._namespace(message.namespace).lookup(split_keys(message.keys))
        tiers = tuple(dict.fromkeys(t for t in hit.tiers if t is not None))
        return Reply(d.LookedUp(tiers=tiers, found=_packed(hit, tiers)))

    def _load(self, message: d.LoadBlocks) -> Reply:
        self._require_taking()
        namespace = self._namespace(message.namespace)
        keys = split_keys(message.keys)
        if message.inline:
            keys = keys[: self._node.max_payload_nbytes // max(1, namespace.block_nbytes)]
        try:
            self._session.expect(message.lease)
        except KVFerryError:
            if not self._ended:
                raise
            self._end()  # maybe in the way
            self._session.expect(message.lease)
        lease = namespace.load(keys, deadline=deadline_in(message.timeout_s), before_fetch=self._end)
        self._moved = (len(lease), len(lease) * namespace.block_nbytes)
        self._grant.tenant.count_load(len(keys), len(lease))
        self._session.add(message.lease, lease)
        if message.inline:
            loaded = d.Loaded(blocks=len(lease), expires_at=_moment(lease), lossy=_lossy(lease))
            return Reply(loaded, lease.views(), lent=True)  # the client ends the lease when it has them
        return Reply(
            d.Loaded(
                blocks=len(lease),
                expires_at=_moment(lease),
                epoch=self._arena.epoch,
                slots=_pack_slots(lease.slots),
                lossy=_lossy(lease),
            )
        )

    def _find(self, message: d.FindLease) -> Reply:
        lease = self._session.get(message.lease)
        lease.require_active()
        inline = message.inline or not self._shares
        found = d.FoundLease(
            kind="read" if isinstance(lease, SlotReadLease) else "write",
            spec=lease.spec,
            keys=b"".join(lease.keys),
            expires_at=_moment(lease),
            epoch=self._arena.epoch,
            slots=b"" if inline else _pack_slots(lease.slots),
            lossy=_lossy(lease),
        )
        if inline and isinstance(lease, SlotReadLease):
            return Reply(found, lease.views())
        return Reply(found)

    # ---- writing ---------------------------------------------------------------------------------

    def _reserve(self, message: d.ReserveBlocks) -> Reply:
        self._require_taking()
        keys = split_keys(message.keys)
        self._session.expect(message.lease)
        parent = None if message.parent is None else BlockKey(message.parent)
        lease = self._namespace(message.namespace).reserve(
            keys, parent=parent, deadline=deadline_in(message.timeout_s)
        )
        self._session.add(message.lease, lease)
        inline = message.inline or not self._fills
        return Reply(
            d.Reserved(
                blocks=len(lease),
                keys=b"" if lease.keys == tuple(keys) else b"".join(lease.keys),
                expires_at=_moment(lease),
                epoch=self._arena.epoch,
                slots=b"" if inline else _pack_slots(lease.slots),
            )
        )

    def _commit(self, message: d.CommitBlocks, incoming: Incoming) -> Reply:
        lease = self._write_lease(message.lease)
        self._moved = (len(lease), len(lease) * lease.spec.block_nbytes)
        if message.lossy:
            if max(message.lossy) >= len(lease):
                raise ProtocolError(f"{self._channel.address}: no block {max(message.lossy)}", remote=True)
            lease.mark_lossy(message.lossy)
        if message.staged is not msgspec.UNSET:
            self._staging.copy(lease, message.staged)
        elif incoming.payload_nbytes:
            wanted = len(lease) * lease.spec.block_nbytes
            if incoming.payload_nbytes != wanted:
                raise ProtocolError(
                    f"{self._channel.address}: {incoming.payload_nbytes} bytes for {len(lease)} blocks of "
                    f"{wanted} bytes in all",
                    remote=True,
                )
            with lease.writing():
                views = [lease.view(index) for index in range(len(lease))]
                incoming.read_into(views, deadline_in(message.timeout_s))
        if not message.publish:
            stored = lease.commit()
            self._session.forget(message.lease)
            return Reply(d.Stored(blocks=stored))
        self._session.expect(message.publish)
        stored, held = lease.publish()
        self._session.forget(message.lease)
        self._session.add(message.publish, held)
        return Reply(d.Stored(blocks=stored, expires_at=_moment(held)))

    def _save(self, message: d.SaveBlocks, incoming: Incoming) -> Reply:
        self._require_taking()
        namespace = self._namespace(message.namespace)
        keys = split_keys(message.keys)
        if incoming.payload_nbytes != len(keys) * namespace.block_nbytes or len(set(keys)) < len(keys):
            raise ProtocolError(
                f"{self._channel.address}: {incoming.payload_nbytes} bytes for {len(keys)} blocks of "
                f"{namespace.block_nbytes} bytes",
                remote=True,
            )
        if incoming.payload_nbytes > _MOST_IN_ONE_NBYTES:
            raise RequestError(
                f"a save of {incoming.payload_nbytes} bytes in one frame, at most {_MOST_IN_ONE_NBYTES} are "
                "taken: reserve first, then send what is missing"
            )
        deadline = deadline_in(message.timeout_s)
        self._moved = (len(keys), incoming.payload_nbytes)
        parent = None if message.parent is None else BlockKey(message.parent)

        def fill(slots: dict[BlockKey, memoryview]) -> None:
            if len(slots) < len(keys):
                return incoming.read_pieces(_places(slots, keys, namespace.block_nbytes), deadline)
            return incoming.read_into(list(slots.values()), deadline)

        stored = namespace.save_by(keys, fill, parent=parent, deadline=deadline)
        if not stored:  # all were there before, or somebody was faster
            incoming.discard(deadline)
        return Reply(d.Stored(blocks=stored))

    def _write_lease(self, number: int) -> SlotWriteLease:
        lease = self._session.get(number)
        if not isinstance(lease, SlotWriteLease):
            raise ProtocolError(f"{self._channel.address}: lease {number:x} is for reading", remote=True)
        return lease

    def _quarantine(self, message: d.QuarantineLease) -> Reply:
        self._session.store.store.quarantine_write(self._write_lease(message.lease))
        return Reply(d.Done())

    # ---- the rest --------------------------------------------------------------------------------

    def _renew(self, message: d.RenewLease) -> Reply:
        lease = self._session.get(message.lease)
        lease.renew()
        return Reply(d.LeaseRenewed(expires_at=_moment(lease)))

    def _require_waiting(self, verb: str) -> None:
        """See that the client still waits for the answer: else it thinks that this failed.

        Raises:
            RequestCancelledError: If it does not; the connection is over.
        """
        if self._channel.peer_is_gone():
            self._channel.abort()
            raise RequestCancelledError(f"{verb} is not done: who asked for it has gone")

    def _block_verb(self, message: d.BlockVerb) -> Reply:
        namespace, keys, count = self._namespace(message.namespace), split_keys(message.keys), 0
        self._require_waiting(message.verb)
        if message.verb == "prefetch":
            namespace.prefetch(keys)
        elif message.verb == "pin":
            count = namespace.pin(keys, ttl=message.ttl_s)
        elif message.verb == "unpin":
            namespace.unpin(keys)
        elif message.verb == "remove":
            count = namespace.remove(keys)
        else:
            count = namespace.clear()
        return Reply(d.Done(count=count))

    def _flush(self, message: d.FlushStore) -> Reply:
        return Reply(d.Done(count=int(self._session.store.flush(deadline=deadline_in(message.timeout_s)))))

    def _poll(self, message: d.PollStore) -> Reply:
        del message
        return Reply(d.Completions(completions=tuple(self._session.store.poll())))

    # of the class, not bound methods of each service: those would be a cycle that holds the session's
    # descriptors and buffers until the garbage collector comes, which in an idle daemon is never
    _VERBS: ClassVar[Mapping[type[Message], Callable[..., Reply]]] = {
        d.OpenNamespace: _open,
        d.LookupBlocks: _lookup,
        d.LoadBlocks: _load,
        d.ReserveBlocks: _reserve,
        d.EndLeases: lambda _self, _message: Reply(d.Done()),
        d.QuarantineLease: _quarantine,
        d.RenewLease: _renew,
        d.FindLease: _find,
        d.BlockVerb: _block_verb,
        d.FlushStore: _flush,
        d.GetStats: lambda self, _message: Reply(d.StoreStats(stats=self._session.store.stats())),
        d.PollStore: _poll,
        d.AskPeer: _ask_peer,
        Ping: lambda _self, _message: Reply(Pong()),
    }


def _places(
    slots: Mapping[BlockKey, memoryview], keys: Sequence[BlockKey], block_nbytes: int
) -> Iterator[list[memoryview]]:
    """Where each block goes: its slot, or nowhere if it is stored already."""
    for key in keys:
        yield from [[slots[key]]] if key in slots else scratch_pieces(block_nbytes)


def _lossy(lease: SlotReadLease | SlotWriteLease) -> tuple[int, ...] | msgspec.UnsetType:
    return tuple(sorted(lease.lossy)) if lease.lossy else msgspec.UNSET


def _moment(lease: SlotReadLease | SlotWriteLease) -> float:
    return lease.expires_at if lease.keys else 0.0


def _packed(hit: Hit, tiers: Sequence[str]) -> bytes:
    numbers: dict[str | None, int] = {None: 0, **{tier: n for n, tier in enumerate(tiers, 1)}}
    return bytes(map(numbers.__getitem__, hit.tiers))


def _pack_slots(slots: Sequence[Slot]) -> bytes:
    pack = _SLOT.pack
    return b"".join([pack(slot.segment, slot.offset, slot.generation) for slot in slots])
