"""A namespace as a client has it: its verbs as questions to the daemon."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np

from kvferry.client.blocks import Blocks, OwnBlocks
from kvferry.client.leases import ClientReadLease, ClientWriteLease
from kvferry.client.line import Line
from kvferry.client.link import GRACE_S, Link
from kvferry.core import keys as _keys
from kvferry.core.arena import ArenaMap
from kvferry.core.blockstore import Hit
from kvferry.core.buffers import Buf, as_bytes_view
from kvferry.core.clock import checked_deadline, is_past
from kvferry.core.errors import (
    ConfigError,
    ConnectionClosedError,
    CorruptBlockError,
    OverloadedError,
    TransferTimeoutError,
    TransportError,
    UnavailableError,
)
from kvferry.core.head_shards import HeadShard
from kvferry.core.keys import BlockKey, Media, Tokens, require_key, require_keys, split_keys
from kvferry.core.regions import Region
from kvferry.core.segments import MappedSlots
from kvferry.core.spec import KeyScope, KVSpec, namespace_id
from kvferry.core.values import require_bool
from kvferry.wire import daemon_messages as d
from kvferry.wire.incoming import Incoming

if TYPE_CHECKING:
    from kvferry.client.client import Client
    from kvferry.client.registration import Registration

__all__ = ["ClientNamespace"]

T = TypeVar("T")

log = logging.getLogger(__name__)

_AWAY: Final = (TransportError, UnavailableError, OverloadedError)
_MARGIN_S: Final = (0.05, 1.0)
_ONE_FRAME_NBYTES: Final = 4 << 20  # so much is sent without asking first what is stored already
_ONE_STAGED_NBYTES: Final = 1 << 20  # the same where more can be staged instead, which is twice as fast


class ClientNamespace:
    """See :class:`kvferry.core.blockstore.Namespace`. Thread safe.

    While the daemon is away lookups and loads miss, saves raise :class:`UnavailableError`, which is a
    :class:`CapacityError`, and all of them at once. A call asks the daemon once more where its connection
    turns out to be dead, if that cannot do anything twice.
    """

    def __init__(self, client: Client, spec: KVSpec, scope: KeyScope, *, takes_lossy: bool = False) -> None:
        require_bool("takes_lossy", takes_lossy)
        self.takes_lossy = takes_lossy
        self.client = client
        self.spec = spec
        self.scope = scope
        self.namespace_id = namespace_id(spec, scope)
        self.block_nbytes = spec.block_nbytes
        self._link: Link = client.link
        self._in_one = ("", 0)  # see _sent_in_one, with the run of the daemon that it holds for
        self._all_new = True  # whether nothing of the last save was stored: so it will be with the next

    def __repr__(self) -> str:
        return f"<ClientNamespace {self.namespace_id[:8].hex()}… at {self._link.url}>"

    def keys(self, tokens: Tokens, *, media: Sequence[Media] = ()) -> list[BlockKey]:
        """Keys of the full blocks of ``tokens``."""
        return _keys.block_keys(self.namespace_id, tokens, self.spec.block_tokens, media=media)

    def foreign_keys(self, engine_hashes: Iterable[bytes]) -> list[BlockKey]:
        """An engine's own 32-byte hash chain as keys."""
        return _keys.foreign_keys(engine_hashes)

    # ---- reading ---------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[BlockKey]) -> Hit:
        """Which tier of the daemon holds each key; misses if it is away."""
        keys = require_keys(keys)
        deadline = self._link.call_deadline()
        try:
            return self._twice(lambda: self._lookup(keys, deadline))
        except _AWAY:
            self._link.count("missed_lookups")
            return Hit((None,) * len(keys))

    def _lookup(self, keys: Sequence[BlockKey], deadline: float) -> Hit:
        with self._link.line(deadline) as line:
            opened = self._open(line, deadline)
            if not self._may_read(opened):
                return Hit((None,) * len(keys))
            request = d.LookupBlocks(
                namespace=opened.namespace, keys=b"".join(keys),
                ended=line.take_ended(), abandoned=line.take_abandoned(),
            )  # fmt: skip
            answer = line.call(request, d.LookedUp, deadline)
            tiers = (None, *answer.tiers)
            if len(answer.found) != len(keys) or max(answer.found, default=0) >= len(tiers):
                raise line.wrong(f"{len(answer.found)} answers to a lookup of {len(keys)} keys")
            return Hit(tuple([tiers[number] for number in answer.found]))

    def load(self, keys: Sequence[BlockKey], *, deadline: float) -> ClientReadLease:
        """Lease the longest stored prefix of ``keys``: views of the daemon's memory where that is mapped.

        Else its bytes are received into memory of this process. An empty lease if the daemon is away, or if
        they came damaged.
        """
        keys = require_keys(keys)
        limit = self._limit(checked_deadline(deadline))
        if not keys:
            return ClientReadLease(self._link, self.spec, ())
        try:
            return self._twice(lambda: self._load(keys, limit))
        except _AWAY:
            self._link.count("missed_loads")
        except CorruptBlockError as error:
            self._link.count("corrupt_loads")
            log.warning("%s: a load is a miss: %s", self._link.url, error)
        return ClientReadLease(self._link, self.spec, ())

    def _load(self, keys: Sequence[BlockKey], limit: float) -> ClientReadLease:
        number = self._link.new_number()
        with self._link.line(limit) as line:
            opened = self._open(line, limit)
            if not self._may_read(opened):
                return ClientReadLease(self._link, self.spec, ())
            inline = not (line.shares and opened.shared)
            request = d.LoadBlocks(
                namespace=opened.namespace, keys=b"".join(keys), lease=number, timeout_s=_left(limit),
                inline=inline, ended=line.take_ended(), abandoned=line.take_abandoned(),
            )  # fmt: skip
            try:
                return (self._load_inline if inline else self._load_mapped)(line, request, keys, limit)
            except BaseException:
                self._link.abandon(number)
                raise

    def _leased(
        self, line: Line, request: d.LoadBlocks, keys: Sequence[BlockKey], answer: d.Loaded,
        blocks: Blocks | None,
    ) -> ClientReadLease:  # fmt: skip
        return ClientReadLease(
            self._link, self.spec, tuple(keys[: answer.blocks]), number=request.lease, epoch=line.epoch,
            blocks=blocks, expires_at=line.local(answer.expires_at), lossy=self._told_lossy(line, answer),
            namespace_id=self.namespace_id,
        )  # fmt: skip

    def _may_read(self, opened: d.NamespaceOpened) -> bool:
        """Whether what the daemon gives is what this reader takes; one that is older cannot tell it apart."""
        if self.takes_lossy or opened.lossless is True:
            return True
        self._link.count("refused_reads")
        return False

    def _told_lossy(self, line: Line, answer: d.Loaded) -> tuple[int, ...] | msgspec.UnsetType:
        lossy = answer.lossy
        if lossy is not msgspec.UNSET and (not self.takes_lossy or max(lossy, default=0) >= answer.blocks):
            raise line.wrong(f"lossy blocks {lossy[:8]} among {answer.blocks}")
        return lossy

    def _load_mapped(
        self, line: Line, request: d.LoadBlocks, keys: Sequence[BlockKey], limit: float
    ) -> ClientReadLease:
        answer = line.call(request, d.Loaded, limit)
        self._require_asked(line, answer, keys)
        blocks = None
        if answer.blocks:
            blocks = self._mapped(line, answer.slots, answer.blocks, answer.epoch, limit)
        return self._leased(line, request, keys, answer, blocks)

    @staticmethod
    def _require_asked(line: Line, answer: d.Loaded, keys: Sequence[BlockKey]) -> None:
        if answer.blocks > len(keys):
            raise line.wrong(f"{answer.blocks} blocks to a load of {len(keys)}")

    def _mapped(self, line: Line, slots: bytes, count: int, epoch: str, limit: float) -> MappedSlots:
        """Blocks by address; their segments are mapped first if need be."""
        if len(slots) != count * d.SLOT_NBYTES:
            raise line.wrong(f"{len(slots)} bytes of slots for {count} blocks")
        words: list[int] = np.frombuffer(slots, "<u8").tolist()
        return self._map_of(line, max(words[::3]), epoch, limit).slots(words, self.block_nbytes)

    def _map_of(self, line: Line, last: int, epoch: str, limit: float) -> ArenaMap:
        """The map of the daemon's arena, with all segments up to ``last``."""
        shared = self._link.arena
        if shared.epoch != epoch or shared.map.segments <= last:
            shared.attach(line.channel, limit)
        found = shared.map
        if found.epoch != epoch or found.segments <= last:
            raise line.wrong(f"segment {last} of arena {epoch[:8]}, which it does not name")
        return found

    def _load_inline(
        self, line: Line, request: d.LoadBlocks, keys: Sequence[BlockKey], limit: float
    ) -> ClientReadLease:
        """Receive a lease's blocks; it is made while they are on their way: behind them all is cold."""
        incoming = line.ask(request, d.Loaded, limit)
        answer = incoming.message
        assert isinstance(answer, d.Loaded)
        self._require_asked(line, answer, keys)
        blocks = self._blocks_for(line, incoming, answer.blocks)
        lease = self._leased(line, request, keys, answer, blocks)
        if blocks is not None:
            try:
                incoming.read_into(blocks.views(answer.blocks), limit)
            except CorruptBlockError as error:
                lease.void()
                if is_past(lease.expires_at):  # the slots were used again while this came
                    raise TransferTimeoutError(f"{lease!r} ended before its bytes were here") from error
                raise
            except BaseException:
                lease.void()
                raise
        return lease

    def _receive(self, line: Line, incoming: Incoming, count: int, limit: float) -> OwnBlocks | None:
        """Blocks that come with an answer, into memory of this process."""
        blocks = self._blocks_for(line, incoming, count)
        if blocks is not None:
            incoming.read_into(blocks.views(count), limit)
        return blocks

    def _blocks_for(self, line: Line, incoming: Incoming, count: int) -> OwnBlocks | None:
        """Memory of this process for blocks that come with an answer."""
        if incoming.payload_nbytes != count * self.block_nbytes:
            raise line.wrong(f"{incoming.payload_nbytes} bytes for {count} blocks of {self.block_nbytes}")
        return self._own_blocks(count) if count else None

    def _own_blocks(self, count: int) -> OwnBlocks:
        memory = self._link.memory.piece(count * OwnBlocks.step(self.block_nbytes))
        return OwnBlocks(memory, self.block_nbytes)

    def _place_of(self, opened: d.NamespaceOpened, count: int) -> OwnBlocks:
        """Memory of this process for blocks that are saved: out of which the daemon copies, if it can."""
        staged = self._link.staging.blocks(count, self.block_nbytes) if opened.stages is True else None
        return staged or self._own_blocks(count)

    def take_found(
        self, line: Line, incoming: Incoming, found: d.FoundLease, count: int, limit: float
    ) -> Blocks | None:
        """The blocks of a lease that another process took."""
        if found.slots:
            return self._mapped(line, found.slots, count, found.epoch, limit)
        if found.kind == "read":
            return self._receive(line, incoming, count, limit)
        return self._own_blocks(count)

    # ---- writing ---------------------------------------------------------------------------------

    def reserve(
        self, keys: Sequence[BlockKey], *, parent: BlockKey | None, deadline: float
    ) -> ClientWriteLease:
        """Reserve slots for those of ``keys`` that are not stored.

        They lie in the daemon's memory where that may be written, else in memory of this process, from
        which ``commit`` sends them.

        Raises:
            CapacityError: If there is no room by the deadline; :class:`UnavailableError` if the daemon is
                away.
            ConfigError: If a key is not 32 bytes long.
        """
        keys = require_keys(keys)
        _require_parent(parent)
        limit = self._limit(checked_deadline(deadline))
        if not keys:
            return ClientWriteLease(self._link, self.spec, ())
        with self._refusing(len(keys)):
            return self._twice(lambda: self._reserve(keys, parent, limit))

    def _reserve(self, keys: Sequence[BlockKey], parent: BlockKey | None, limit: float) -> ClientWriteLease:
        number = self._link.new_number()
        with self._link.line(limit) as line:
            opened = self._open(line, limit)
            inline = not (line.shares and opened.writable)
            request = d.ReserveBlocks(
                namespace=opened.namespace, keys=b"".join(keys), lease=number, timeout_s=_left(limit),
                parent=parent, inline=inline, ended=line.take_ended(), abandoned=line.take_abandoned(),
            )  # fmt: skip
            try:
                answer = line.call(request, d.Reserved, limit)
                missing = split_keys(answer.keys) if answer.keys else keys[: answer.blocks]
                if len(missing) != answer.blocks or answer.blocks > len(keys):
                    raise line.wrong(f"{answer.blocks} slots to a reservation of {len(keys)} blocks")
                blocks: Blocks | None = None
                if answer.blocks and inline:
                    blocks = self._place_of(opened, answer.blocks)
                elif answer.blocks:
                    blocks = self._mapped(line, answer.slots, answer.blocks, answer.epoch, limit)
            except BaseException:
                self._link.abandon(number)
                raise
            return ClientWriteLease(
                self._link, self.spec, tuple(missing), number=number, epoch=line.epoch, blocks=blocks,
                expires_at=line.local(answer.expires_at),
            )  # fmt: skip

    def save(
        self, blocks: Sequence[tuple[BlockKey, Buf]], *, parent: BlockKey | None, deadline: float
    ) -> int:
        """Reserve, copy and commit; returns the blocks newly stored.

        Raises:
            CapacityError: As :meth:`reserve`.
            ConfigError: If a buffer is not ``spec.block_nbytes`` long; nothing is stored.
        """
        _require_parent(parent)
        limit = self._limit(checked_deadline(deadline))
        sources = self._sources(blocks)
        if not sources:
            return 0
        keys = list(sources)
        with self._refusing(len(keys)):
            nbytes = len(keys) * self.block_nbytes
            if (nbytes <= _ONE_FRAME_NBYTES or self._all_new) and nbytes <= self._sent_in_one(limit):
                stored = self._save_in_one(sources, parent, limit)
                self._all_new = stored == len(keys)
                return stored
            with self._twice(lambda: self._reserve(keys, parent, limit)) as lease:
                self._all_new = len(lease) == len(keys)
                return lease.save(sources, limit)

    def _sources(self, blocks: Sequence[tuple[BlockKey, Buf]]) -> dict[BlockKey, memoryview]:
        sources: dict[BlockKey, memoryview] = {}
        for key, buf in blocks:
            require_key(key)
            view = as_bytes_view(buf)
            if len(view) != self.block_nbytes:
                raise ConfigError(
                    f"block {key[:8].hex()}… has {len(view)} bytes, a block of this spec has "
                    f"{self.block_nbytes}"
                )
            sources.setdefault(key, view)
        return sources

    def _sent_in_one(self, limit: float) -> int:
        """Up to how many bytes of a save are sent in one frame: none where this process writes the slots."""
        epoch, found = self._in_one
        if not epoch or epoch != self._link.epoch:  # it is asked once: each connection that is taken costs
            epoch, found = self._in_one = self._twice(lambda: self._ask_in_one(limit))
        return found

    def _ask_in_one(self, limit: float) -> tuple[str, int]:
        with self._link.line(limit) as line:
            opened = self._open(line, limit)
            if line.shares and opened.writable:
                return line.epoch, -1
            if opened.stages is True:
                return line.epoch, _ONE_STAGED_NBYTES
            return line.epoch, _ONE_FRAME_NBYTES if opened.in_one is msgspec.UNSET else opened.in_one

    def _save_in_one(self, sources: dict[BlockKey, memoryview], parent: BlockKey | None, limit: float) -> int:
        with self._link.line(limit) as line:
            request = d.SaveBlocks(
                namespace=self._open(line, limit).namespace, keys=b"".join(sources), timeout_s=_left(limit),
                parent=parent, ended=line.take_ended(), abandoned=line.take_abandoned(),
            )  # fmt: skip
            payload = list(sources.values())
            return line.call(request, d.Stored, limit, payload, lent=True).blocks

    # ---- the rest --------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region], *, shard: HeadShard | None = None) -> Registration:
        """Register an engine's own paged memory: blocks are loaded into it, and saved from it, by jobs.

        Args:
            regions: All of them, with their layouts; together they hold each tensor of each layer once.
            shard: Which KV heads they have, where a tensor-parallel group of another size stored the blocks
                (:class:`~kvferry.core.regions.RegionPlan`). One that needs several ranks' blocks registers
                with the namespace of each.

        Raises:
            ConfigError: If a layout is not known by name, or a region is not what its layout and the spec
                say; asks nobody.
        """
        return self.client.mover.register(self, regions, shard=shard)

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Bring blocks up from slower tiers in the background; does nothing if the daemon is away."""
        keys = require_keys(keys)
        with contextlib.suppress(*_AWAY):
            self._verb("prefetch", keys)
            self.client.prefetching(self._link.epoch)

    def pin(self, keys: Sequence[BlockKey], *, ttl: float) -> int:
        """Keep stored blocks from eviction for ``ttl`` seconds; returns how many are stored, 0 if it is away.

        Raises:
            ConfigError: If ``ttl`` is not above 0.
        """
        keys = require_keys(keys)
        checked_deadline(ttl)
        if not ttl > 0:
            raise ConfigError(f"a pin of {ttl} seconds; ttl must be above 0")
        try:
            return self._verb("pin", keys, min(ttl, 1e9))
        except _AWAY:
            return 0

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """End :meth:`pin` early."""
        keys = require_keys(keys)
        with contextlib.suppress(*_AWAY):
            self._verb("unpin", keys)

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Forget blocks; returns how many were stored.

        Raises:
            UnavailableError: If the daemon is away.
        """
        return self._verb("remove", require_keys(keys))

    def clear(self) -> int:
        """Forget all blocks of the namespace; raises as :meth:`remove`."""
        return self._verb("clear", ())

    def _verb(self, verb: d.Verb, keys: Sequence[BlockKey], ttl_s: float = 0.0) -> int:
        deadline = self._link.call_deadline()

        def ask() -> int:
            with self._link.line(deadline) as line:
                request = d.BlockVerb(
                    namespace=self._open(line, deadline).namespace, verb=verb, keys=b"".join(keys),
                    ttl_s=ttl_s, ended=line.take_ended(), abandoned=line.take_abandoned(),
                )  # fmt: skip
                return line.call(request, d.Done, deadline).count

        return self._twice(ask)

    # ---- how it is asked -------------------------------------------------------------------------

    def _open(self, line: Line, deadline: float) -> d.NamespaceOpened:
        """What this namespace is called on a connection."""
        name = (self.namespace_id, self.takes_lossy)
        found = line.opened.get(name)
        if found is None:
            request = d.OpenNamespace(
                spec=self.spec, scope=self.scope, namespace_id=self.namespace_id,
                lossless=msgspec.UNSET if self.takes_lossy else True,
            )  # fmt: skip
            found = line.open(request, name, deadline)
        return found

    @staticmethod
    def _twice(call: Callable[[], T]) -> T:
        """Make a call that may be made twice: again where its connection turned out to be dead."""
        try:
            return call()
        except ConnectionClosedError:
            return call()

    @contextmanager
    def _refusing(self, blocks: int) -> Iterator[None]:
        """Count what is refused because the daemon is away, and say so as one kind of error."""
        try:
            yield
        except _AWAY as error:
            self._link.count("refused_saves")
            self._link.count("refused_blocks", blocks)
            if isinstance(error, UnavailableError):
                raise
            raise UnavailableError(f"nothing of {blocks} blocks is known to be stored: {error}") from error

    @staticmethod
    def _limit(deadline: float) -> float:
        """By when an answer must be here; one question and its answer are tried past any deadline."""
        return max(deadline, time.monotonic() + GRACE_S)


def _left(limit: float) -> float:
    """What the daemon may take, so that its answer is here in time: also on a machine that is busy."""
    left = limit - time.monotonic()
    least, most = _MARGIN_S
    return max(0.0, left - min(most, max(least, left / 10), left / 2))


def _require_parent(parent: BlockKey | None) -> None:
    if parent is not None:
        require_key(parent, "the parent")
