"""What goes into a stored value, and where what comes out of one goes: piece by piece, hashed while in cache.

A sink is a generator. It is given the size of a value, yields the views that the next bytes go to, is
resumed when these are full, and returns what came of it; what it leaves unread means nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import xxhash

from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CorruptBlockError
from kvferry.core.keys import BlockKey
from kvferry.core.spec import KVSpec
from kvferry.store.encoding import LOSSY_REASON, Decoded, Encoding, TierCodec, most_encoded_nbytes
from kvferry.store.remote.manifest import (
    CHECKSUM_NBYTES,
    HEAD_NBYTES,
    Head,
    Manifest,
    ManifestTemplate,
    NewerManifestError,
    Part,
    parse_head,
)
from kvferry.store.tier import ReadOutcome

__all__ = [
    "Decoding",
    "IncomingBlock",
    "Received",
    "Sink",
    "receive_block",
    "receive_part",
    "send_block",
    "send_part",
]

CHUNK_NBYTES: Final = 256 << 10
_RUN_NBYTES: Final = 4 << 20  # hashed, and then sent by one call
_LATE_RUN_NBYTES: Final = 2 << 20  # sent by one call, and then hashed
_SMALL_NBYTES: Final = 128 << 10  # hashed before it is sent in any case: sooner than a second call
_REST_NBYTES: Final = 16 << 10  # waits for the checksum: so little that the store has it at once
_U64: Final = struct.Struct("<Q")
Pieces: TypeAlias = "Sequence[memoryview | bytes]"


class Decoding(NamedTuple):
    """What encoded blocks are decoded by: the codec of the tier, their spec, and the deadline of the call.

    ``takes_lossy`` is the reader's word; the tier has its own.
    """

    codec: TierCodec
    spec: KVSpec
    deadline: float
    takes_lossy: bool = True

    def decode(self, data: memoryview, encoding: bytes, into: memoryview) -> Decoded:
        """Decode what was read; as :meth:`~kvferry.store.encoding.TierCodec.decode`."""
        found = self.codec.decode(data, self.spec, into, deadline=self.deadline)
        return found._replace(lossy=found.lossy or Encoding.load(encoding).lossy)


class Received(NamedTuple):
    """What came of reading one value.

    Attributes:
        outcome: ``HIT`` also for a manifest whose data lies in parts.
        reason: What was wrong.
        manifest: What the value says of itself, where that is known.
        lossy: Whether the block is not just what was saved.
        unfit: It is sound, but of no use to this reader: others may read it.
        newer: The same, and a later release wrote it.
    """

    outcome: ReadOutcome
    reason: str = ""
    manifest: Manifest | None = None
    lossy: bool = False
    unfit: bool = False
    newer: bool = False


Sink: TypeAlias = "Generator[list[memoryview], None, Received]"


def receive_block(
    template: ManifestTemplate,
    key: BlockKey,
    parent: BlockKey | None,
    into: memoryview,
    decoding: Decoding,
    nbytes: int,
) -> Sink:
    """A manifest, with the block's data behind it or without; see :class:`Received`."""
    try:
        if nbytes == template.value_nbytes:
            return (yield from _receive_expected(template, key, parent, into))
        return (yield from _receive_any(template, key, parent, into, decoding, nbytes))
    except CorruptBlockError as error:
        return Received(ReadOutcome.CORRUPT, str(error))


def _receive_expected(
    template: ManifestTemplate, key: BlockKey, parent: BlockKey | None, into: memoryview
) -> Sink:
    """A value of the size that this release writes: no byte has to be waited for on its own."""
    manifest = memoryview(bytearray(template.inline_nbytes))
    trailer = memoryview(bytearray(CHECKSUM_NBYTES))
    first = into[:CHUNK_NBYTES]
    whole = len(first) == len(into)
    yield [manifest, first, trailer] if whole else [manifest, first]
    try:
        head = parse_head(manifest[:HEAD_NBYTES])
    except NewerManifestError as error:
        return _newer(error, memoryview(b"".join((manifest, first))))
    if not head.inline or HEAD_NBYTES + head.rest_nbytes != len(manifest):
        if not whole:
            raise CorruptBlockError("the lengths in the manifest contradict that of the value")
        return _parse(template, key, parent, memoryview(b"".join((manifest, first, trailer))))
    found = template.check(manifest, head, key, parent)
    digest = xxhash.xxh3_64(first)
    if not whole:
        yield from _receive_data(into[CHUNK_NBYTES:], digest)
        yield [trailer]
    _compare(digest, _U64.unpack(trailer)[0], "the data's")
    return Received(ReadOutcome.HIT, "", found)


class IncomingBlock(NamedTuple):
    """A block that is read: where its data goes, and what it should be; see :func:`receive_block`."""

    template: ManifestTemplate
    key: BlockKey
    parent: BlockKey | None
    into: memoryview
    decoding: Decoding

    @property
    def prefix_nbytes(self) -> int:
        """Of the manifest in a value as large as most."""
        return self.template.inline_nbytes

    def sink(self, nbytes: int) -> Sink:
        """See :func:`receive_block`."""
        return receive_block(*self, nbytes)

    def judge(self, manifest: memoryview, hashed: int, sent: int) -> Received:
        """As the sink, of a value as large as most whose data lies in ``into``, hashed as it came."""
        found = self.template.inline(manifest, self.key, self.parent)
        if found is not None and hashed == sent:
            return Received(ReadOutcome.HIT, "", found)
        value = memoryview(b"".join((manifest, self.into, _U64.pack(sent))))
        sink, at = self.sink(len(value)), 0
        while True:
            try:
                views = next(sink)
            except StopIteration as end:
                received: Received = end.value
                return received
            for view in views:
                view[:] = value[at : at + len(view)]
                at += len(view)


def _parse(template: ManifestTemplate, key: BlockKey, parent: BlockKey | None, value: memoryview) -> Received:
    """A manifest with parts that has, by chance, as many bytes as a block with its data."""
    head = parse_head(value[:HEAD_NBYTES])
    _check_length(head, len(value))
    return Received(ReadOutcome.HIT, "", template.check(value, head, key, parent))


def _receive_any(
    template: ManifestTemplate,
    key: BlockKey,
    parent: BlockKey | None,
    into: memoryview,
    decoding: Decoding,
    nbytes: int,
) -> Sink:
    if nbytes < HEAD_NBYTES:
        raise CorruptBlockError(f"a value of {nbytes} bytes is no manifest")
    start = bytearray(HEAD_NBYTES)
    yield [memoryview(start)]
    try:
        head = parse_head(start)
    except NewerManifestError as error:
        rest = bytearray(max(0, min(error.nbytes, nbytes) - HEAD_NBYTES))
        yield [memoryview(rest)]
        return _newer(error, memoryview(bytes(start + rest)))
    _check_length(head, nbytes)
    manifest = memoryview(bytearray(HEAD_NBYTES + head.rest_nbytes))
    manifest[:HEAD_NBYTES] = start
    yield [manifest[HEAD_NBYTES:]]
    found = template.check(manifest, head, key, parent)
    if found.encoding:
        return (yield from _receive_encoded(found, head, into, decoding))
    if head.inline:
        digest, trailer = xxhash.xxh3_64(), memoryview(bytearray(CHECKSUM_NBYTES))
        yield from _receive_data(into, digest)
        yield [trailer]
        _compare(digest, _U64.unpack(trailer)[0], "the data's")
    return Received(ReadOutcome.HIT, "", found)


def _newer(error: NewerManifestError, whole: memoryview) -> Received:
    """What a later release wrote is left alone: it is of use to those who run it."""
    error.require_sound(whole)
    return Received(ReadOutcome.MISS, str(error), newer=True)


def _receive_encoded(found: Manifest, head: Head, into: memoryview, decoding: Decoding) -> Sink:
    """The data of an encoded block, if it follows and may be given."""
    lossy = Encoding.load(found.encoding).lossy
    if (lossy and not decoding.takes_lossy) or not decoding.codec.takes(lossy=lossy):
        return Received(ReadOutcome.MISS, LOSSY_REASON, found, lossy=True, unfit=True)
    if found.data_nbytes > most_encoded_nbytes(decoding.spec):
        raise CorruptBlockError(f"an encoded block of {found.data_nbytes} bytes for one of {len(into)}")
    if not head.inline:
        return Received(ReadOutcome.HIT, "", found)
    data = page_aligned(found.data_nbytes)
    digest, trailer = xxhash.xxh3_64(), memoryview(bytearray(CHECKSUM_NBYTES))
    yield from _receive_data(data, digest)
    yield [trailer]
    _compare(digest, _U64.unpack(trailer)[0], "the data's")
    decoded = decoding.decode(data, found.encoding, into)
    unfit = decoded.outcome is ReadOutcome.MISS
    return Received(decoded.outcome, decoded.reason, found, decoded.lossy, unfit)


def _check_length(head: Head, nbytes: int) -> None:
    wanted = HEAD_NBYTES + head.rest_nbytes + (head.data_nbytes + CHECKSUM_NBYTES if head.inline else 0)
    if nbytes != wanted:
        raise CorruptBlockError(f"a value of {nbytes} bytes, its manifest says {wanted}")


def _receive_data(into: memoryview, digest: xxhash.xxh3_64) -> Generator[list[memoryview], None, None]:
    for at in range(0, len(into), CHUNK_NBYTES):
        piece = into[at : at + CHUNK_NBYTES]
        yield [piece]
        digest.update(piece)


def _compare(digest: xxhash.xxh3_64, checksum: int, whose: str) -> None:
    if digest.intdigest() != checksum:
        raise CorruptBlockError(f"{whose} checksum is {digest.hexdigest()}, stored was {checksum:016x}")


def receive_part(part: Part, into: memoryview, nbytes: int) -> Sink:
    """A part of a block, which has ``len(into)`` bytes."""
    if nbytes != part.nbytes:
        return Received(ReadOutcome.CORRUPT, f"a part of {nbytes} bytes, the manifest says {part.nbytes}")
    digest = xxhash.xxh3_64()
    yield from _receive_data(into, digest)
    try:
        _compare(digest, part.checksum, "a part's")
    except CorruptBlockError as error:
        return Received(ReadOutcome.CORRUPT, str(error))
    return Received(ReadOutcome.HIT)


def send_block(manifest: bytes, data: memoryview, *, last: bool = False) -> Iterable[Pieces]:
    """A manifest, the data and its checksum.

    Who sends block after block is busier than the store. So a run is hashed right before it is sent: that
    brings it into a cache, from where the kernel copies it so much faster that it costs half of what it
    does afterwards. But the ``last`` block of a batch is hashed while the store takes it.
    """
    if len(data) <= (_SMALL_NBYTES if last else _RUN_NBYTES):
        return ((manifest, data, _U64.pack(xxhash.xxh3_64_intdigest(data))),)
    return _send_hashing_later(manifest, data) if last else _send_hashed(manifest, data)


def _send_hashed(manifest: bytes, data: memoryview) -> Iterator[Pieces]:
    pieces: list[memoryview | bytes] = [manifest]
    digest = xxhash.xxh3_64()
    for at in range(0, len(data), _RUN_NBYTES):
        run = data[at : at + _RUN_NBYTES]
        digest.update(run)
        pieces.append(run)
        if at + len(run) == len(data):
            pieces.append(_U64.pack(digest.intdigest()))
        yield pieces
        pieces = []


def _send_hashing_later(manifest: bytes, data: memoryview) -> Iterator[Pieces]:
    pieces: list[memoryview | bytes] = [manifest]
    digest = xxhash.xxh3_64()
    end = len(data) - _REST_NBYTES
    for at in range(0, end, _LATE_RUN_NBYTES):
        run = data[at : min(at + _LATE_RUN_NBYTES, end)]
        pieces.append(run)
        yield pieces
        digest.update(run)
        pieces = []
    digest.update(data[end:])
    yield data[end:], _U64.pack(digest.intdigest())


def send_part(data: memoryview, last: bool) -> Iterator[Pieces]:
    """The bytes of a part; its checksum is in the manifest."""
    del last
    for at in range(0, len(data), _RUN_NBYTES):
        yield (data[at : at + _RUN_NBYTES],)
