"""Connections to a cache daemon whose frames have bytes of theirs changed."""

from __future__ import annotations

import random
import struct
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvferry.core.keys import block_keys
from kvferry.core.spec import KeyScope, namespace_id
from kvferry.testing.blocks import small_spec
from kvferry.testing.daemon_frames import daemon_frames
from kvferry.testing.daemon_requests import daemon_requests, opening
from kvferry.testing.raw_sockets import answer_to
from kvferry.wire import ChannelOptions, WireProtocol
from kvferry.wire.messages import AttachArena, Message
from kvferry.wire.protocol import HEADER_NBYTES, MAGIC, TRAILER_NBYTES, Side
from kvferry.wire.shared_arena import SHARED_ARENA
from kvferry.wire.tables import NAMES, TYPES

__all__ = ["answers_as_they_are", "send_mutated"]

_HEADER: Final = struct.Struct("<6xHI8xIQ")
_SPEC: Final = small_spec("fuzzed", pages=1)


class _Frame(NamedTuple):
    """A request, up to its payload, and that."""

    head: bytes
    payload: bytes = b""


def _hello(address: str, token: bytes | None) -> bytes:
    options = ChannelOptions(
        role="client", session="fuzz", checksum=False, credential=token, capabilities=(SHARED_ARENA,)
    )
    return bytes(options.protocol(Side.CLIENT, address).encode(options.hello(time.monotonic())))


def _mutated(frame: _Frame, rng: random.Random) -> bytes:
    """A frame with none to three bytes of it changed, most often before its payload."""
    data = bytearray(frame.head + frame.payload)
    for _ in range(rng.randrange(4)):
        data[rng.randrange(len(frame.head) if rng.randrange(8) else len(data))] = rng.randrange(256)
    return bytes(data)


def _answers_to(data: bytes, address: str) -> list[str]:
    """What the daemon answers one connection: names of messages, in order.

    The end of what is sent follows at once, so that the daemon waits for no more. What it answers is read to
    its end: who leaves before is not let in, and none of his frames are read.
    """
    came = answer_to(address, data)
    names: list[str] = []
    at = 0
    while (at := came.find(MAGIC, at)) >= 0 and at + HEADER_NBYTES <= len(came):  # bytes go with descriptors
        number, flags, meta_nbytes, payload_nbytes = _HEADER.unpack_from(came, at)
        at += HEADER_NBYTES + meta_nbytes + payload_nbytes + (TRAILER_NBYTES if flags else 0)
        names.append(NAMES[TYPES[number]])
    return names


def _connect(
    address: str, rng: random.Random, frames: list[_Frame], opening: bytes, token: bytes | None
) -> Counter[str]:
    """One connection: a handshake, then frames with bytes of theirs changed, until the daemon hangs up.

    One in four shows a token that is not quite right; three of four open a namespace first. What follows goes
    on from any request of a whole conversation, or is of any of them.

    Returns:
        What was answered; at least as many frames have been read, or one that the daemon hung up at.
    """
    if token is not None and not rng.randrange(4):
        wrong = bytearray(token)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        token = bytes(wrong)
    opens = rng.randrange(4) > 0
    data, many, start = (
        _hello(address, token) + opening * opens,
        rng.randrange(1, 6),
        rng.randrange(len(frames)),
    )
    chosen = (frames * 2)[start : start + many] if rng.randrange(2) else rng.choices(frames, k=many)
    names = _answers_to(data + b"".join(_mutated(frame, rng) for frame in chosen), address)
    others = 1 + opens  # the welcome, and that a namespace is open
    return Counter(names[others:] or ["hung up"]) if len(names) >= others else Counter()


def _framed(messages: Sequence[tuple[Message, bytes]]) -> list[_Frame]:
    """Messages and their payloads as a client sends them, without checksums."""
    plain = WireProtocol(Side.CLIENT, checksum=False)
    server = WireProtocol(Side.SERVER, checksum=False)
    options = ChannelOptions(role="client", session="fuzz", checksum=False)
    for one, other in ((plain, server), (server, plain)):
        data = one.encode(options.hello(0.0) if one is plain else options.welcome(server, 0.0, 0.0))
        while data:
            taken, data = data[: other.wanted], data[other.wanted :]
            other.receive(taken)
    return [_Frame(plain.encode(m, len(payload), 7), payload) for m, payload in messages]


def _requests(*, local: bool) -> list[tuple[Message, bytes]]:
    keys = block_keys(namespace_id(_SPEC, KeyScope()), [1] * 3 * _SPEC.block_tokens, _SPEC.block_tokens)
    return daemon_requests(_SPEC, keys, local=local)


def _opening() -> bytes:
    return _framed([(opening(_SPEC, KeyScope()), b"")])[0].head


def answers_as_they_are(address: str, token: bytes | None) -> list[str]:
    """Names of what answers a connection of requests that are in order, all of which should be granted."""
    frames = _framed(_requests(local=address.startswith("unix:")))
    talk = b"".join(frame.head + frame.payload for frame in frames)
    return _answers_to(_hello(address, token) + _opening() + talk, address)


def send_mutated(address: str, seed: int, count: int, token: bytes | None) -> Counter[str]:
    """Connect from this process until ``count`` frames were read.

    A process that leaves slots which it may still write, by requests that lost a bit, is not let in for ever.

    Args:
        address: Of the daemon, which has checksums of frames off.
        seed: What is sent follows from it.
        count: Frames that must have been read, or hung up at.
        token: To show, if the daemon wants one.

    Returns:
        Names of what was answered; ``hung up``, and ``connections``.
    """
    rng = random.Random(seed)
    others = [*daemon_frames(_SPEC, KeyScope()), (AttachArena(), b"")]
    opened, frames = _opening(), _framed([*_requests(local=False), *others])
    found = Counter[str]()
    while found.total() - found["connections"] < count:
        found["connections"] += 1
        assert found["connections"] < 2 * count + 100, f"of most connections no frame was read: {found}"
        found += _connect(address, rng, frames, opened, token)
    return found
