"""Blocks are written to a remote store: whole in one value, or in parts and then their manifest."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

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


class _Pending(NamedTuple):
    """A block on its way there; its place among those of the call."""

    number: int
    block: BlockWrite
    data: memoryview  # as it is stored
    name: str
    nbytes: int
    parts: tuple[str, ...] = ()
    write_id: bytes = _NO_WRITE
    encoding: bytes = b""  # empty: not at all
    lossy: bool = False
    replaces: bool = False  # one that has lost something


_Ready: TypeAlias = "tuple[_Pending, tuple[Part, ...]]"
"""A block whose parts are there."""


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
        todo: list[_Pending] = []
        largest = min(self._backend.max_value_nbytes(deadline), self._part_nbytes)
        plain = not self._codec.is_on
        nbytes = home.template.value_nbytes
        for number, block in enumerate(blocks):
            if plain and not block.lossy:
                if nbytes <= largest:  # the usual case, in less time
                    name = home.name(block.key)
                    todo.append(_Pending(number, block, block.data, name, nbytes + NAME_NBYTES))
                else:
                    todo.append(_pending(home, number, block, block.data, largest))
                continue
            new = self._encoded(home, number, block, largest, deadline)
            if isinstance(new, _Pending):
                todo.append(new)
            else:
                results[number] = new
        while todo:
            pending, todo = self._take_room(home, todo, results, deadline)
            if not pending:
                break
            self._send(home, pending, results, deadline)
        for new in todo:
            capacity = self._index.capacity_nbytes
            text = f"all of the capacity of {capacity} bytes is taken by writes under way"
            results[new.number] = WriteResult(WriteOutcome.REFUSED, text)
        return [results[number] for number in range(len(blocks))]

    def _encoded(
        self, home: Home, number: int, block: BlockWrite, largest: int, deadline: float
    ) -> _Pending | WriteResult:
        """With what is to be stored, in memory of its own if it is encoded; or why nothing is."""
        codec = self._codec
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
            return _pending(home, number, block, block.data, largest)
        data, encoding = memoryview(bytes(found.data)), found.encoding
        return _pending(home, number, block, data, largest, encoding.dump(), lossy=encoding.lossy)

    # -- room ------------------------------------------------------------------------------------------

    def _take_room(
        self,
        home: Home,
        todo: list[_Pending],
        results: dict[int, WriteResult],
        deadline: float,
    ) -> tuple[list[_Pending], list[_Pending]]:
        """Those that there is room for now, and those that have to wait for them."""
        unfit = len(self._unfit) > 0
        if not self._index.capacity_nbytes and not unfit and not any(new.parts for new in todo):
            self._index.reserve(sum(new.nbytes for new in todo))
            return todo, []
        pending: list[_Pending] = []
        victims: list[Held] = []
        rest: list[_Pending] = []
        for at, new in enumerate(todo):
            if unfit and not new.lossy and self._unfit.has(new.name):
                new = new._replace(replaces=True)
            if (refusal := self._never(new)) is not None:
                results[new.number] = refusal
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
            for new in rest:
                results[new.number] = WriteResult(WriteOutcome.FAILED, reason)
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
        ready: list[_Ready] = [(new, ()) for new in pending if not new.parts]
        old_parts: dict[str, tuple[str, ...]] = {}
        if replaced := [new.name for new in pending if new.replaces]:
            old = find_parts(self._backend, home.names, replaced, deadline)
            old_parts = dict(zip(replaced, old, strict=True))
        if len(ready) < len(pending):
            split = [new for new in pending if new.parts]
            ready += self._send_parts(split, results, deadline)
        began = time.monotonic()
        answers = self._backend.put([_put(home, *one) for one in ready], deadline) if ready else []
        if self._codec.adaptive:
            nbytes = sum(len(new.data) for new, parts in ready if not parts)
            self._codec.carried("write", nbytes, time.monotonic() - began)
        stored: list[_Pending] = []
        lost: list[str] = []
        for (new, _), answer in zip(ready, answers, strict=True):
            if answer.done is Done.OK:
                results[new.number] = _STORED
                stored.append(new)
                lost += old_parts.get(new.name, ())
            else:
                results[new.number] = _result(answer)
                self._index.release(new.nbytes)
                lost += new.parts
        if len(self._unfit):
            self._unfit.discard([new.name for new in stored if not new.lossy])
        if lossy := [new.name for new in stored if new.lossy]:
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
            pieces = _cut(new.data, len(new.parts))
            sent.append((new, tuple(Part(len(p), xxhash.xxh3_64_intdigest(p)) for p in pieces)))
            puts += [
                Put(name, len(piece), partial(send_part, piece), only_new=False, final=False)
                for name, piece in zip(new.parts, pieces, strict=True)
            ]
        answers = iter(self._backend.put(puts, deadline) if puts else [])
        ready: list[_Ready] = []
        lost: list[str] = []
        for one in sent:
            new, parts = one
            own = [next(answers) for _ in parts]
            bad = next((answer for answer in own if answer.done is not Done.OK), None)
            if bad is None:
                ready.append(one)
                continue
            results[new.number] = _result(bad)
            self._index.release(new.nbytes)
            lost += new.parts
        if lost:
            self._backend.delete(lost, deadline)
        return ready


def _pending(
    home: Home,
    number: int,
    block: BlockWrite,
    data: memoryview,
    largest: int,
    encoding: bytes = b"",
    *,
    lossy: bool = False,
) -> _Pending:
    name = home.name(block.key)
    nbytes = home.template.value_nbytes + len(data) - len(block.data) + len(encoding)
    if nbytes <= largest:
        return _Pending(number, block, data, name, nbytes + NAME_NBYTES, (), _NO_WRITE, encoding, lossy)
    write_id = secrets.token_bytes(WRITE_ID_NBYTES)
    count = max(1, -(-len(data) // largest))
    parts = tuple(home.names.part(name, write_id, n) for n in range(count))
    nbytes += _PART_ENTRY_NBYTES * count - CHECKSUM_NBYTES + (count + 1) * NAME_NBYTES
    return _Pending(number, block, data, name, nbytes, parts, write_id, encoding, lossy)


def _cut(data: memoryview, count: int) -> list[memoryview]:
    step = max(1, -(-len(data) // count))
    return [data[n * step : (n + 1) * step] for n in range(count)]


def _put(home: Home, new: _Pending, parts: tuple[Part, ...]) -> Put:
    if parts:
        head = _manifest(home, new, parts)
        return Put(new.name, len(head), lambda _: ((head,),), not new.replaces)
    source, sealed = partial(_send_whole, home, new), partial(_sealed, home, new)
    return Put(new.name, new.nbytes - NAME_NBYTES, source, not new.replaces, sealed=sealed)


def _send_whole(home: Home, new: _Pending, last: bool) -> Iterable[Pieces]:
    """Made when it is the block's turn: the store is at work on those before meanwhile."""
    manifest, data = _sealed(home, new)
    return send_block(manifest, data, last=last)


def _sealed(home: Home, new: _Pending) -> tuple[bytes, memoryview]:
    block = new.block
    if new.encoding:
        return _manifest(home, new), new.data
    return home.template.build_inline(block.key, block.parent, block.position), new.data


def _manifest(home: Home, new: _Pending, parts: tuple[Part, ...] = ()) -> bytes:
    block = new.block
    manifest = Manifest(block.parent, block.position, len(new.data), new.write_id, parts, new.encoding)
    return home.template.build(block.key, manifest)


def _result(answer: Answer) -> WriteResult:
    outcome = _OUTCOMES[answer.done]
    failed = outcome in (WriteOutcome.FAILED, WriteOutcome.REFUSED)
    return WriteResult(outcome, answer.reason if failed else "", answer.in_flight if failed else None)
