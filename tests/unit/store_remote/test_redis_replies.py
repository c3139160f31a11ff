"""Replies that the native library takes mean what they mean to the reader in Python, damaged or not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from xxhash import xxh3_64_digest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.store.encoding import TierCodec
from kvferry.store.remote.backend import Answer, Done, Get
from kvferry.store.remote.manifest import Manifest, ManifestTemplate, Part
from kvferry.store.remote.payload import Decoding, IncomingBlock, Received
from kvferry.store.remote.redis import pipeline
from kvferry.store.remote.redis.requests import Read
from kvferry.store.remote.redis.resp import ReplyError, ReplyReader
from kvferry.store.tier import UNKNOWN_PARENT, ReadOutcome, TierNamespace
from kvferry.testing.blocks import block_bytes, small_spec
from kvferry.testing.tiers_common import chain
from kvferry.transports import connect, listen
from kvferry.transports.replies import reply_stream

SPACE = TierNamespace.of("default", small_spec())
TEMPLATE = ManifestTemplate(SPACE, bytes(16))
KEYS = chain(SPACE, 1, 6)
NIL, REFUSED = b"$-1\r\n", b"-LOADING it is being loaded\r\n"
pytestmark = pytest.mark.skipif(reply_stream() is None, reason="the native library is not there")


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def stored(n: int) -> bytes:
    data = block_bytes(KEYS[n], TEMPLATE.data_nbytes)
    parent = KEYS[n - 1] if n else None
    return TEMPLATE.build_inline(KEYS[n], parent, n) + data + xxh3_64_digest(data)[::-1]


def outcomes_of(sent: bytes, monkeypatch: pytest.MonkeyPatch, *, native: bool) -> list[Any]:
    """What comes of reading the blocks where a server answers so, and is gone then."""
    decoding = Decoding(TierCodec(), SPACE.spec, deadline_in(20))
    parents = [UNKNOWN_PARENT, *KEYS[:-1]]
    blocks = [
        IncomingBlock(TEMPLATE, key, parent, memoryview(bytearray(TEMPLATE.data_nbytes)), decoding)
        for key, parent in zip(KEYS, parents, strict=True)
    ]
    reads = [Read(Get("name", block.sink, sealed=block)) for block in blocks]
    with monkeypatch.context() as patch:
        if not native:
            patch.setattr(ReplyReader, "fits", lambda *_: False)
        outcomes, error = exchanged(sent, reads)
    found: list[Any] = []
    for outcome, block in zip(outcomes, blocks, strict=False):
        if isinstance(outcome, ReplyError):
            found.append(str(outcome))
            continue
        hit = outcome.received is not None and outcome.received.outcome is ReadOutcome.HIT
        found.append((outcome, bytes(block.into) if hit else b""))
    return [error] if error else found


def exchanged(sent: bytes, reads: Sequence[Read]) -> tuple[list[Any], object]:
    outcomes: list[Any] = []
    listener = listen("tcp://127.0.0.1:0")
    ours = connect(listener.address, deadline_in(20))
    theirs = listener.accept(deadline_in(20))
    try:
        theirs.send([sent], deadline_in(20))
        theirs.close()
        deaf = SimpleNamespace(send=lambda *_: None)  # what is sent to one who is gone ends what comes, too
        lane: Any = SimpleNamespace(connection=deaf, reader=ReplyReader(ours), values=None, lent=False)
        server: Any = SimpleNamespace(request_deadline=lambda deadline: deadline)
        pipeline._exchange(lane, server, reads, outcomes, deadline_in(20), asking=False)
    except KVFerryError as error:
        return outcomes, type(error)
    finally:
        for end in (ours, theirs, listener):
            end.close()
    return outcomes, None


def compared(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found = outcomes_of(sent, monkeypatch, native=True)
    assert found == outcomes_of(sent, monkeypatch, native=False)
    return found


WHOLE = [bulk(stored(n)) for n in range(len(KEYS))]
HIT = [ReadOutcome.HIT]


def results(found: list[Any]) -> list[Any]:
    return [one[0].received.outcome if one[0].received else one[0].done for one in found]


def test_all_are_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Received] = []
    judge = IncomingBlock.judge

    def judged(block: IncomingBlock, manifest: memoryview, hashed: int, sent: int) -> Received:
        taken.append(judge(block, manifest, hashed, sent))
        return taken[-1]

    monkeypatch.setattr(IncomingBlock, "judge", judged)
    assert results(compared(b"".join(WHOLE), monkeypatch)) == HIT * 6
    assert len(taken) == 6, "by the native library, and once by the reader"


def other_values() -> dict[str, bytes]:
    """In place of block 2."""
    data = block_bytes(KEYS[2], TEMPLATE.data_nbytes)
    parts = Manifest(KEYS[1], 2, len(data), bytes(8), (Part(len(data), 1),))
    newer = bytearray(stored(2))
    newer[8] = 2  # the version; the checksum of the manifest is made anew
    at = TEMPLATE.inline_nbytes - 8
    newer[at : at + 8] = xxh3_64_digest(bytes(newer[:at]))[::-1]
    odd = (
        TEMPLATE.build(KEYS[2], Manifest(KEYS[1], 2, len(data), b"\1" * 8))
        + data
        + xxh3_64_digest(data)[::-1]
    )
    return {
        "nil": NIL,
        "an error": REFUSED,
        "empty": bulk(b""),
        "short": bulk(stored(2)[:50]),
        "in parts": bulk(TEMPLATE.build(KEYS[2], parts)),
        "newer": bulk(bytes(newer)),
        "of another write": bulk(odd),
        "another block": WHOLE[1],
        "another parent": bulk(
            TEMPLATE.build_inline(KEYS[2], KEYS[0], 2) + stored(2)[TEMPLATE.inline_nbytes :]
        ),
        "another position": bulk(
            TEMPLATE.build_inline(KEYS[2], KEYS[1], 9) + stored(2)[TEMPLATE.inline_nbytes :]
        ),
        "zeros": bulk(bytes(TEMPLATE.value_nbytes)),
    }


@pytest.mark.parametrize("kind", list(other_values()))
def test_one_among_them_is_another(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = other_values()[kind]
    found = compared(b"".join([*WHOLE[:2], value, *WHOLE[3:]]), monkeypatch)
    assert results(found[:2] + found[3:]) == HIT * 5
    if kind == "nil":
        assert found[2][0] == Answer(Done.NO)
    elif kind == "an error":
        assert found[2] == REFUSED[1:-2].decode()
    elif kind not in ("in parts", "of another write", "another position"):
        expected = ReadOutcome.MISS if kind == "newer" else ReadOutcome.CORRUPT
        assert found[2][0].received.outcome is expected


@pytest.mark.parametrize("seed", range(60))
def test_damaged_replies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    sent = bytearray(b"".join(WHOLE))
    start = rng.randrange(6) * len(WHOLE[0])
    near = TEMPLATE.inline_nbytes + 20  # start and manifest as often as the data
    at = start + rng.randrange(near if seed % 2 else len(WHOLE[0]))
    match seed % 5:
        case 0 | 1:
            sent[at] ^= 1 << rng.randrange(8)
        case 2:
            del sent[at : at + rng.randrange(1, 9)]
        case 3:
            sent[at:at] = rng.choice([NIL, REFUSED, b"$", b"\r\n", rng.randbytes(4)])
        case _:
            del sent[at:]
    compared(bytes(sent), monkeypatch)
