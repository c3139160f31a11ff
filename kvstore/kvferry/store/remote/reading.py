"""Blocks are read from a remote store by their manifests; those in parts need a second request."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kvferry.core.buffers import page_aligned
from kvferry.store.encoding import TierCodec
from kvferry.store.remote.backend import Answer, Backend, Done, Get
from kvferry.store.remote.home import Home
from kvferry.store.remote.index import Held
from kvferry.store.remote.manifest import CHECKSUM_NBYTES, Manifest
from kvferry.store.remote.payload import Decoding, IncomingBlock, receive_part
from kvferry.store.tier import BlockRead, ReadOutcome, ReadResult

__all__ = ["BlockReads", "read_blocks"]

_MISS = ReadResult(ReadOutcome.MISS)


class BlockReads(NamedTuple):
    """What came of a batch.

    Attributes:
        names: One a block.
        results: Likewise.
        broken: What lies there and is no block: it has to go. With its parts if one of them is gone.
        unfit: Names of blocks that have lost something, or cannot be decoded, with which of both it is.
        newer: Names of those that a later release wrote.
    """

    names: list[str]
    results: list[ReadResult]
    broken: list[Held]
    unfit: list[tuple[str, bool]]
    newer: list[str]


def read_blocks(
    backend: Backend, home: Home, codec: TierCodec, blocks: Sequence[BlockRead], deadline: float
) -> BlockReads:
    """Read blocks straight into their buffers; those that are encoded by way of other memory."""
    any_loss, no_loss = (Decoding(codec, home.namespace.spec, deadline, takes) for takes in (True, False))
    incoming = [
        IncomingBlock(home.template, b.key, b.parent, b.into, any_loss if b.takes_lossy else no_loss)
        for b in blocks
    ]
    gets = [Get(home.name(b.key), b.sink, sealed=None if codec.is_on else b) for b in incoming]
    if backend.moves_whole and not codec.is_on:
        gets = [
            get._replace(expected=partial(_whole_value, home, b.into))
            for get, b in zip(gets, blocks, strict=True)
        ]
    began = time.monotonic()
    answers = backend.get(gets, deadline)
    took = time.monotonic() - began
    results = [_result(answer) for answer in answers]
    given = [answer.received.manifest for answer in answers if answer.received is not None]
    if not any(manifest is not None and manifest.encoding for manifest in given):  # nothing was decoded
        hits = sum(result.outcome is ReadOutcome.HIT for result in results)
        codec.carried("read", hits * home.template.data_nbytes, took)
    found = BlockReads([get.name for get in gets], results, [], [], [])
    split: list[tuple[int, Manifest]] = []
    for n, (answer, result) in enumerate(zip(answers, results, strict=True)):
        if result.outcome is ReadOutcome.CORRUPT:
            found.broken.append(Held(gets[n].name, 0, None))
        elif answer.received is not None and answer.received.newer:
            found.newer.append(gets[n].name)
        elif answer.received is not None and (answer.received.unfit or answer.received.lossy):
            found.unfit.append((gets[n].name, answer.received.lossy))
        elif result.outcome is ReadOutcome.HIT and (manifest := _manifest(answer)).parts:
            split.append((n, manifest))
    if split:
        _read_parts(backend, home, blocks, split, found, any_loss)
    return found


def _whole_value(home: Home, into: memoryview) -> list[memoryview]:
    """What takes a block that is not encoded: its manifest, its data, its checksum."""
    at = home.template.inline_nbytes
    own = page_aligned(at + CHECKSUM_NBYTES)
    return [own[:at], into, own[at:]]


def _only(view: memoryview) -> list[memoryview]:
    return [view]


def _manifest(answer: Answer) -> Manifest:
    assert answer.received is not None
    assert answer.received.manifest is not None
    return answer.received.manifest


def _read_parts(
    backend: Backend,
    home: Home,
    blocks: Sequence[BlockRead],
    split: Sequence[tuple[int, Manifest]],
    found: BlockReads,
    decoding: Decoding,
) -> None:
    gets: list[Get] = []
    buffers: list[memoryview] = []
    for n, manifest in split:
        at, into = 0, page_aligned(manifest.data_nbytes) if manifest.encoding else blocks[n].into
        buffers.append(into)
        for name, part in zip(home.part_names(blocks[n].key, manifest), manifest.parts, strict=True):
            piece = into[at : at + part.nbytes]
            expected = partial(_only, piece) if backend.moves_whole else None
            gets.append(Get(name, partial(receive_part, part, piece), expected=expected))
            at += part.nbytes
    answers = iter(backend.get(gets, decoding.deadline))
    for (n, manifest), data in zip(split, buffers, strict=True):
        own = [next(answers) for _ in manifest.parts]
        result = _joined(own, found.results[n])
        name = home.name(blocks[n].key)
        if result.outcome in (ReadOutcome.MISS, ReadOutcome.CORRUPT):
            found.broken.append(Held(name, 0, home.part_names(blocks[n].key, manifest)))
        if result.outcome is ReadOutcome.HIT and manifest.encoding:
            decoded = decoding.decode(data, manifest.encoding, blocks[n].into)
            result = result._replace(outcome=decoded.outcome, reason=decoded.reason, lossy=decoded.lossy)
            if decoded.outcome is ReadOutcome.CORRUPT:
                found.broken.append(Held(name, 0, home.part_names(blocks[n].key, manifest)))
            elif decoded.lossy or decoded.outcome is ReadOutcome.MISS:
                found.unfit.append((name, decoded.lossy))
        found.results[n] = result


def _joined(answers: Sequence[Answer], hit: ReadResult) -> ReadResult:
    """The result of a block from those of its parts: the worst, and nobody's hand is forgotten."""
    results = [_result(answer) for answer in answers]
    flying = [r.in_flight for r in results if r.in_flight is not None and not r.in_flight.is_set()]
    for outcome in (ReadOutcome.FAILED, ReadOutcome.CORRUPT, ReadOutcome.MISS):
        for result in results:
            if result.outcome is outcome:
                reason = result.reason or "a part of it is gone"
                return ReadResult(outcome, reason, in_flight=_all_of(flying))
    return hit


def _all_of(flying: list[threading.Event]) -> threading.Event | None:
    return flying[0] if flying else None  # those of one call are one event


def _result(answer: Answer) -> ReadResult:
    if answer.done is Done.NO:
        return _MISS
    received = answer.received
    if answer.done is not Done.OK or received is None:
        return ReadResult(ReadOutcome.FAILED, answer.reason or "no answer", in_flight=answer.in_flight)
    manifest = received.manifest
    if received.outcome is not ReadOutcome.HIT or manifest is None:
        return ReadResult(received.outcome, received.reason)
    return ReadResult(ReadOutcome.HIT, "", manifest.parent, manifest.position, lossy=received.lossy)
