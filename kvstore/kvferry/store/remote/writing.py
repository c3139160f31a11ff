"""Blocks are written to a remote store: whole in one value, or in parts and then their manifest."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import xxhash

from kvferry.core.errors import TierError
from kvferry.store.encoding import TierCodec
from kvferry.store.remote.backend import Answer, Backend, Done, Put
from kvferry.store.remote.home import Home
from kvferry.store.remote.index import NAME_NBYTES, Held, RemoteIndex
from kvferry.store.remote.manifest import CHECKSUM_NBYTES, MAX_PARTS, WRITE_ID_NBYTES, Manifest, Part
from kvferry.store.remote.payload import Pieces, send_block, send_part
from kvferry.store.remote.removal import find_parts, remove_blocks
from kvferry.store.tier import BlockWrite, WriteOutcome, WriteResult
from kvferry.store.unfit import UnfitBlocks

__all__ = ["BlockWriter"]

_PART_ENTRY_NBYTES: Final = 16
_ENCODING_NBYTES: Final = 256  # what the manifest of an encoded block may have more
_NO_WRITE: Final = bytes(WRITE_ID_NBYTES)
_STORED: Final = WriteResult(WriteOutcome.STORED)
_OUTCOMES: Final = {
    Done.NO: WriteOutcome.PRESENT,
    Done.REFUSED: WriteOutcome.REFUSED,
    Done.FAILED: WriteOutcome.FAILED,
}


class _Payload(NamedTuple):
    """The bytes of a block as they are stored, and how they are encoded; empty: not at all."""

    data: memoryview
    encoding: bytes = b""
    lossy: bool = False


class _Pending(NamedTuple):
    """A block on its way there; its place among those of the call."""

    number: int
    block: BlockWrite
    payload: _Payload
    name: str
    nbytes: int
    write_id: bytes
    parts: tuple[str, ...]
    replaces: bool = False  # one that has lost something


class _Ready(NamedTuple):
    """A block whose parts are there."""

    pending: _Pending
    parts: tuple[Part, ...] = ()


class BlockWriter:
    """Writes for one tier. Thread safe.

    Args:
        backend: Where to.
        index: What is known to be there, and the bound.
        part_nbytes: What does not fit into one value of this size is split.
        codec: Of the tier.
        unfit: What is known to lie there and has lost something: exact blocks take its place.
    """

    def __init__(
        self,
        backend: Backend,
        index: RemoteIndex,
        part_nbytes: int,
        codec: TierCodec,
        unfit: UnfitBlocks[str],
    ) -> None:
        self._unfit = unfit
        self._backend = backend
        self._codec = codec
        self._index = index
        self._part_nbytes = part_nbytes

    def write(self, home: Home, blocks: Sequence[BlockWrite], deadline: float) -> list[WriteResult]:
        """Write blocks; as many at once as room can be made for without evicting each other."""
        results: dict[int, WriteResult] = {}
        todo: list[tuple[int, BlockWrite, _Payload]] = []
        for number, block in enumerate(blocks):
            payload = self._payload(home, block, deadline)
            if isinstance(payload, _Payload):
                todo.append((number, block, payload))
            else:
                results[number] = payload
        while todo:
            pending, todo = self._take_room(home, todo, results, deadline)
            if not pending:
                break
            self._send(home, pending, results, deadline)
        for number, *_ in todo:
            capacity = self._index.capacity_nbytes
            text = f"all of the capacity of {capacity} bytes is taken by writes under way"
            results[number] = WriteResult(WriteOutcome.REFUSED, text)
        return [results[number] for number in range(len(blocks))]

    def _payload(self, home: Home, block: BlockWrite, deadline: float) -> _Payload | WriteResult:
        """The bytes that are to be stored, in memory of their own if they are encoded; or why none are."""
        codec = self._codec
        if not codec.is_on and not block.lossy:
            return _Payload(block.data)
        if block.lossy and not codec.takes(lossy=True):
            return WriteResult(
                WriteOutcome.REFUSED, "it has lost something in another tier; no loss is allowed"
            )
        most = len(block.data) - _ENCODING_NBYTES  # so that the value is smaller
        try:
            spec = home.namespace.spec
            found = codec.encode(block.data, spec, lossy=block.lossy, most=most, deadline=deadline)
        except TierError as error:
            return WriteResult(WriteOutcome.FAILED, str(error))
        if found is None:
            return _Payload(block.data)
        return _Payload(memoryview(bytes(found.data)), found.encoding.dump(), found.encoding.lossy)

    # -- room ------------------------------------------------------------------------------------------

    def _take_room(
        self,
        home: Home,
        todo: list[tuple[int, BlockWrite, _Payload]],
        results: dict[int, WriteResult],
        deadline: float,
    ) -> tuple[list[_Pending], list[tuple[int, BlockWrite, _Payload]]]:
        """Those that there is room for now, and those that have to wait for them."""
        pending: list[_Pending] = []
        victims: list[Held] = []
        rest: list[tuple[int, BlockWrite, _Payload]] = []
        largest = min(self._backend.max_value_nbytes(deadline), self._part_nbytes)
        for at, (number, block, payload) in enumerate(todo):
            new = _pending(home, number, block, payload, largest)
            if self._unfit.has(new.name) and not payload.lossy:
                new = new._replace(replaces=True)
            if (refusal := self._never(new)) is not None:
                results[number] = refusal
                continue
            room = self._index.reserve(new.nbytes)
            if room is None:
                rest = todo[at:]
                break
            victims += room
            pending.append(new)
        if victims and (left := self._evict(home, victims, deadline)):
            reason = f"no room: what was to be evicted could not be removed: {left[0][1].reason}"
            for new in pending:
                self._index.release(new.nbytes)
                results[new.number] = WriteResult(WriteOutcome.FAILED, reason)
            self._index.put_back([held for held, _ in left])
            for number, *_ in rest:
                results[number] = WriteResult(WriteOutcome.FAILED, reason)
            return [], []
        return pending, rest

    def _never(self, new: _Pending) -> WriteResult | None:
        capacity = self._index.capacity_nbytes
        if 0 < capacity < new.nbytes:
            text = f"the block takes {new.nbytes} bytes, the capacity is {capacity}"
            return WriteResult(WriteOutcome.REFUSED, text)
        if len(new.parts) > MAX_PARTS:
            text = (
                f"the block would have {len(new.parts)} parts, at most {MAX_PARTS} are possible; raise part"
            )
            return WriteResult(WriteOutcome.REFUSED, text)
        return None

    def _evict(self, home: Home, victims: list[Held], deadline: float) -> list[tuple[Held, Answer]]:
        """Remove blocks; returns those that are there still."""
        answers = remove_blocks(self._backend, home.names, victims, deadline)
        pairs = zip(victims, answers, strict=True)
        return [(held, answer) for held, answer in pairs if answer.done is Done.FAILED]

    # -- sending ---------------------------------------------------------------------------------------

    def _send(
        self, home: Home, pending: list[_Pending], results: dict[int, WriteResult], deadline: float
    ) -> None:
        ready = [_Ready(new) for new in pending if not new.parts]
        old_parts: dict[str, tuple[str, ...]] = {}
        if replaced := [new.name for new in pending if new.replaces]:
            old = find_parts(self._backend, home.names, replaced, deadline)
            old_parts = dict(zip(replaced, old, strict=True))
        if len(ready) < len(pending):
            split = [new for new in pending if new.parts]
            ready += self._send_parts(split, results, deadline)
        began = time.monotonic()
        answers = self._backend.put([_put(home, one) for one in ready], deadline) if ready else []
        if self._codec.adaptive:
            nbytes = sum(len(one.pending.payload.data) for one in ready if not one.parts)
            self._codec.carried("write", nbytes, time.monotonic() - began)
        stored: list[_Pending] = []
        lost: list[str] = []
        for (new, _), answer in zip(ready, answers, strict=True):
            results[new.number] = _result(answer)
            if answer.done is Done.OK:
                stored.append(new)
                lost += old_parts.get(new.name, ())
            else:
                self._index.release(new.nbytes)
                lost += new.parts
        if len(self._unfit):
            self._unfit.discard([new.name for new in stored if not new.payload.lossy])
        if lossy := [new.name for new in stored if new.payload.lossy]:
            self._unfit.add(lossy)
        # heads of chains count as used last
        self._index.stored([Held(new.name, new.nbytes, new.parts) for new in reversed(stored)])
        if kept := [name for new in stored for name in new.parts]:
            self._backend.keep(kept, deadline)
        if lost:
            self._backend.delete(lost, deadline)

    def _send_parts(
        self, split: list[_Pending], results: dict[int, WriteResult], deadline: float
    ) -> list[_Ready]:
        """Write the parts of blocks that are not there yet; returns those whose parts are all there."""
        present = self._backend.exists([new.name for new in split], deadline)
        puts: list[Put] = []
        sent: list[_Ready] = []
        for new, answer in zip(split, present, strict=True):
            if answer.done is not Done.NO and not (new.replaces and answer.done is Done.OK):
                there = answer.done is Done.OK
                results[new.number] = _result(answer._replace(done=Done.NO if there else Done.FAILED))
                self._index.release(new.nbytes)
                continue
            pieces = _cut(new.payload.data, len(new.parts))
            sent.append(_Ready(new, tuple(Part(len(p), xxhash.xxh3_64_intdigest(p)) for p in pieces)))
            puts += [
                Put(name, len(piece), partial(send_part, piece), only_new=False, final=False)
                for name, piece in zip(new.parts, pieces, strict=True)
            ]
        answers = iter(self._backend.put(puts, deadline) if puts else [])
        ready: list[_Ready] = []
        lost: list[str] = []
        for one in sent:
            own = [next(answers) for _ in one.parts]
            bad = next((answer for answer in own if answer.done is not Done.OK), None)
            if bad is None:
                ready.append(one)
                continue
            results[one.pending.number] = _result(bad)
            self._index.release(one.pending.nbytes)
            lost += one.pending.parts
        if lost:
            self._backend.delete(lost, deadline)
        return ready


def _pending(home: Home, number: int, block: BlockWrite, payload: _Payload, largest: int) -> _Pending:
    name = home.name(block.key)
    nbytes = home.template.value_nbytes + len(payload.data) - len(block.data) + len(payload.encoding)
    if nbytes <= largest:
        return _Pending(number, block, payload, name, nbytes + NAME_NBYTES, _NO_WRITE, ())
    write_id = secrets.token_bytes(WRITE_ID_NBYTES)
    count = max(1, -(-len(payload.data) // largest))
    parts = tuple(home.names.part(name, write_id, n) for n in range(count))
    nbytes += _PART_ENTRY_NBYTES * count - CHECKSUM_NBYTES + (count + 1) * NAME_NBYTES
    return _Pending(number, block, payload, name, nbytes, write_id, parts)


def _cut(data: memoryview, count: int) -> list[memoryview]:
    step = max(1, -(-len(data) // count))
    return [data[n * step : (n + 1) * step] for n in range(count)]


def _put(home: Home, one: _Ready) -> Put:
    new = one.pending
    if one.parts:
        head = _manifest(home, new, one.parts)
        return Put(new.name, len(head), lambda: iter([[head]]), not new.replaces)
    return Put(new.name, new.nbytes - NAME_NBYTES, partial(_send_whole, home, new), not new.replaces)


def _send_whole(home: Home, new: _Pending) -> Iterator[Pieces]:
    """Made when it is the block's turn: the store is at work on those before meanwhile."""
    data, block = new.payload.data, new.block
    if not new.payload.encoding:
        return send_block(home.template.build_inline(block.key, block.parent, block.position), data)
    return send_block(_manifest(home, new), data)


def _manifest(home: Home, new: _Pending, parts: tuple[Part, ...] = ()) -> bytes:
    block, (data, encoding, _) = new.block, new.payload
    manifest = Manifest(block.parent, block.position, len(data), new.write_id, parts, encoding)
    return home.template.build(block.key, manifest)


def _result(answer: Answer) -> WriteResult:
    if answer.done is Done.OK:
        return _STORED
    outcome = _OUTCOMES[answer.done]
    failed = outcome in (WriteOutcome.FAILED, WriteOutcome.REFUSED)
    return WriteResult(outcome, answer.reason if failed else "", answer.in_flight if failed else None)
