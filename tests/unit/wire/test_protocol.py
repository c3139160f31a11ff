from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import ConfigError, ProtocolError
from kvferry.core.spec import KVSpec
from kvferry.wire import messages as m
from kvferry.wire.messages import AnyMessage, Message
from kvferry.wire.protocol import (
    HEADER_NBYTES,
    MAGIC,
    PAYLOAD_TYPES,
    SUPPORTED,
    TRANSITIONS,
    TYPE_NUMBERS,
    Limits,
    MessageReceived,
    Side,
    State,
    TrailerReceived,
    Versions,
    WireProtocol,
    negotiate,
    printable,
)

VECTORS = Path(__file__).parents[2] / "data" / "wire_vectors.json"
NO_LIMITS = Limits()
HELLO = m.Hello(min_version=1, max_version=1, session="s")


def shaken(
    *, limits: Limits = NO_LIMITS, checksum: bool = True, versions: Versions = SUPPORTED
) -> tuple[WireProtocol, WireProtocol]:
    """Client and server after their handshake."""
    client = WireProtocol(Side.CLIENT, limits, checksum=checksum, versions=versions)
    server = WireProtocol(Side.SERVER, limits, checksum=checksum, versions=versions)
    hello = m.Hello(min_version=versions.lowest, max_version=versions.highest, session="s", checksum=checksum)
    feed(server, b"".join(client.encode(hello)))
    welcome = m.Welcome(version=server.version, session="s", epoch="e", checksum=server.checksum)
    feed(client, b"".join(server.encode(welcome)))
    assert client.state is server.state is State.OPEN
    return client, server


def feed(protocol: WireProtocol, stream: bytes, cuts: Iterable[int] = ()) -> list[Any]:
    """Give ``stream`` to ``protocol`` in pieces that end at ``cuts``; its events, payloads in between."""
    events: list[Any] = []
    borders = sorted({c for c in cuts if 0 < c < len(stream)} | {len(stream)})
    payload_left, payload, at = 0, b"", 0
    for border in borders:
        while at < border:
            if payload_left:
                taken = stream[at : min(border, at + payload_left)]
                payload, payload_left, at = payload + taken, payload_left - len(taken), at + len(taken)
                if not payload_left:
                    events.append(payload)
                    payload = b""
                    protocol.payload_taken()
                continue
            assert protocol.wanted > 0
            piece = stream[at : min(border, at + protocol.wanted)]
            at += len(piece)
            event = protocol.receive(piece)
            if event is not None:
                events.append(event)
            if isinstance(event, MessageReceived):
                payload_left = event.payload_nbytes
    return events


def frame(protocol: WireProtocol, message: Message, payload: bytes = b"", request_id: int = 0) -> bytes:
    parts = [*protocol.encode(message, len(payload), request_id), payload]
    if payload and protocol.checksum:
        parts.append(protocol.trailer(xxhash.xxh3_64_intdigest(payload)))
    return b"".join(parts)


def raw_frame(
    number: int,
    meta: bytes,
    *,
    magic: bytes = MAGIC,
    version: int = 1,
    flags: int = 0,
    request_id: int = 0,
    meta_nbytes: int | None = None,
    payload_nbytes: int = 0,
) -> bytes:
    """A frame written from the table in docs/wire.md, not by the code under test."""
    length = len(meta) if meta_nbytes is None else meta_nbytes
    return struct.pack("<4sHHIQIQ", magic, version, number, flags, request_id, length, payload_nbytes) + meta


def sender_for(cls: type[Message], protocols: tuple[WireProtocol, WireProtocol]) -> WireProtocol:
    """A protocol that may send ``cls`` now (handshake messages need a fresh one)."""
    if cls is m.Hello:
        return WireProtocol(Side.CLIENT)
    if cls is m.Welcome:
        server = WireProtocol(Side.SERVER)
        feed(server, b"".join(WireProtocol(Side.CLIENT).encode(HELLO)))
        return server
    return protocols[0]


def receiver_for(cls: type[Message], protocols: tuple[WireProtocol, WireProtocol]) -> WireProtocol:
    if cls is m.Hello:
        return WireProtocol(Side.SERVER)
    if cls is m.Welcome:
        client = WireProtocol(Side.CLIENT)
        client.encode(HELLO)
        return client
    return protocols[1]


# ---- the format is pinned --------------------------------------------------------------------


def test_every_message_has_a_golden_frame_both_ways(examples: Sequence[Any]) -> None:
    golden = json.loads(VECTORS.read_text())
    assert {type(e.message) for e in examples} == set(TYPE_NUMBERS)
    for example in examples:
        protocols = shaken()
        cls = type(example.message)
        data = frame(sender_for(cls, protocols), example.message, example.payload, example.request_id)
        entry = {
            "name": example.name,
            "type": TYPE_NUMBERS[cls],
            "request_id": example.request_id,
            "payload_nbytes": len(example.payload),
            "frame": data.hex(),
        }
        assert golden.get(example.name) == entry, f"new message? append to the vectors: {json.dumps(entry)}"
        events = feed(receiver_for(cls, protocols), bytes.fromhex(golden[example.name]["frame"]))
        received = events[0]
        assert received.message == example.message
        assert (received.request_id, received.payload_nbytes) == (example.request_id, len(example.payload))
        if example.payload:
            assert events[1] == example.payload
            assert events[2] == TrailerReceived(xxhash.xxh3_64_intdigest(example.payload))
    assert set(golden) == {e.name for e in examples}


def test_header_layout_is_the_documented_one() -> None:
    client, _ = shaken()
    header, meta = client.encode(m.PutLayer(layer=0, blocks=()), 7, 0x0102030405060708)
    assert len(header) == HEADER_NBYTES == 32
    assert header[:4] == b"KVFY"
    assert header[4:6] == b"\x01\x00"
    assert header[6:8] == bytes([18, 0])
    assert header[8:12] == b"\x01\x00\x00\x00"
    assert header[12:20] == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert int.from_bytes(header[20:24], "little") == len(meta)
    assert int.from_bytes(header[24:32], "little") == 7
    assert client.trailer(0x0102030405060708) == bytes([8, 7, 6, 5, 4, 3, 2, 1])


def test_table_of_numbers_covers_exactly_the_messages() -> None:
    assert set(TYPE_NUMBERS) == set(get_args(AnyMessage))
    assert len(set(TYPE_NUMBERS.values())) == len(TYPE_NUMBERS)
    assert set(TYPE_NUMBERS) >= PAYLOAD_TYPES


# ---- splitting and damage --------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_split_of_the_stream_gives_the_same_events(data: st.DataObject) -> None:
    client, server = shaken()
    stream = b"".join(
        [
            frame(client, m.PutLayer(layer=0, blocks=(1,)), bytes(range(200)), 5),
            frame(client, m.Ping(), b"", 6),
            frame(client, m.AbortStream(reason="é" * 40)),
            frame(client, m.PutLayer(layer=1, blocks=(1,)), b"z"),
        ]
    )
    whole = feed(server, stream)
    assert [type(e).__name__ for e in whole] == [
        "MessageReceived",
        "bytes",
        "TrailerReceived",
        "MessageReceived",
        "MessageReceived",
        "MessageReceived",
        "bytes",
        "TrailerReceived",
    ]
    cuts = data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=60))
    assert feed(shaken()[1], stream, cuts) == whole
    assert feed(shaken()[1], stream, range(len(stream))) == whole


def mutated(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(5)
        at = rng.randrange(len(out)) if out else 0
        if kind == 0 and out:
            out[at] = rng.randrange(256)
        elif kind == 1 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del out[at : at + rng.randint(1, 8)]
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            out[at : at + 4] = rng.choice([b"\xff" * 4, b"\0" * 4, b"\xdd\xff\xff\xff", b"\x91" * 4])
    return bytes(out)


def test_damaged_frames_give_a_message_or_a_protocol_error_and_little_memory(examples: Sequence[Any]) -> None:
    rng = random.Random(20240607)
    limits = Limits(max_meta_nbytes=1 << 20)
    outcomes = {"message": 0, "refused": 0, "unfinished": 0, "blamed on us": 0}
    valid = []
    for example in examples:
        protocols = shaken()
        cls = type(example.message)
        valid.append((cls, frame(sender_for(cls, protocols), example.message, example.payload)))
    tracemalloc.start()
    try:
        for _ in range(2000):
            cls, data = rng.choice(valid)
            server = receiver_for(cls, shaken(limits=limits))
            try:
                events = feed_some(server, mutated(rng, data))
            except ProtocolError as error:
                outcomes["refused" if error.remote else "blamed on us"] += 1
            else:
                outcomes["message" if events else "unfinished"] += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert outcomes.pop("blamed on us") == 0
    assert min(outcomes.values()) > 20, outcomes


def feed_some(protocol: WireProtocol, stream: bytes) -> list[Any]:
    """As :func:`feed`, but a damaged length may leave the stream short, or bytes behind a payload."""
    events: list[Any] = []
    at = 0
    while at < len(stream) and len(events) < 3:
        assert protocol.wanted <= 1 << 20
        if protocol.wanted == 0:
            return events
        piece = stream[at : at + protocol.wanted]
        at += len(piece)
        event = protocol.receive(piece)
        if event is not None:
            events.append(event)
    return events


def test_a_claimed_list_length_allocates_nothing() -> None:
    for size in (b"\xdd\xff\xff\xff\xf0", b"\xdd\x10\x00\x00\x00", b"\xdc\xff\xff"):
        _, server = shaken()
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match="malformed 'stream_ready'"):
                feed(server, raw_frame(17, b"\x82\xa1t\xacstream_ready\xa7missing" + size))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "hint"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP"),
        (b"POST", "HTTP"),
        (b"HTTP/1.1 400 Bad Request\r\n", "HTTP"),
        (b"\x16\x03\x01\x02\x00", "TLS"),
        (b"\x80\x04\x95\x1f", "pickle"),
        (b"SSH-2.0-x", "SSH"),
        (b"YFVK", "byte order"),
        (b"\0\0\0\0", "starts with b'KVFY'"),
    ],
)
def test_other_protocols_are_recognised_by_four_bytes(start: bytes, hint: str) -> None:
    server = WireProtocol(Side.SERVER, peer="tcp://1.2.3.4:5")
    assert server.wanted == 4
    with pytest.raises(ProtocolError, match=hint) as caught:
        server.receive(start[:4])
    assert caught.value.remote
    assert "tcp://1.2.3.4:5" in str(caught.value)
    assert server.wanted == 0
    with pytest.raises(ProtocolError, match="0 are wanted"):
        server.receive(b"K")


PING = b"\x81\xa1t\xa4ping"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (raw_frame(4, PING, magic=b"KVFX"), "does not speak kvferry"),
        (raw_frame(4, PING, version=2), "version 2, agreed was 1"),
        (raw_frame(999, PING), "message type 999, unknown"),
        (raw_frame(4, PING, flags=2), "flags 0x2"),
        (raw_frame(4, PING, flags=1), "flags 0x1 and 0 payload"),
        (raw_frame(18, PING, payload_nbytes=5), "flags 0x0 and 5 payload"),
        (raw_frame(4, b""), "without meta"),
        (raw_frame(4, PING, meta_nbytes=(1 << 20) + 1), "limit is 1048576"),
        (raw_frame(18, PING, flags=1, payload_nbytes=(1 << 30) + 1), "max_payload_nbytes"),
        (raw_frame(4, PING, flags=1, payload_nbytes=8), "carries none"),
        (raw_frame(5, PING), "type 'pong' that holds 'ping'"),
        (raw_frame(1, PING), "'hello' in state 'open'"),
        (raw_frame(4, b"\x80"), "missing required field `t`"),
        (raw_frame(4, PING + b"x"), "malformed 'ping'"),
        (raw_frame(4, b"\xc1"), "malformed 'ping'"),
        (raw_frame(17, b"\x82\xa1t\xacstream_ready\xa1x" + b"\x91" * 100_000), "malformed"),
        (raw_frame(22, b"\x82\xa1t\xacabort_stream\xa6reason\xa2\xff\xfe"), "malformed"),
        (raw_frame(17, b"\x82\xa1t\xacstream_ready\xa7missing\x91\xff"), "malformed"),
        (raw_frame(5, msgspec.msgpack.encode({"t": "pong", "at": float("nan")})), "malformed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_frames_are_the_peers_fault(data: bytes, match: str) -> None:
    _, server = shaken(limits=Limits(max_meta_nbytes=1 << 20, max_payload_nbytes=1 << 30))
    with pytest.raises(ProtocolError, match=match) as caught:
        feed_some(server, data)
    assert caught.value.remote


def stream_fields(spec: KVSpec, changes: dict[str, object]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "t": "begin_stream",
        "stream": "s",
        "spec": json.loads(msgspec.json.encode(spec)),
        "keys": bytes(32),
        "tail_tokens": 0,
    }
    for path, value in changes.items():
        *outer, last = path.split("__")
        at: Any = fields
        for name in outer:
            at = at[int(name)] if isinstance(at, list) else at[name]
        at[last] = value
    return fields


TENSOR = "spec__layers__0__tensors__0__"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"spec__block_tokens": 0}, "block_tokens is 0"),
        ({"spec__model": ""}, "name of its model"),
        ({"spec__tp_rank": 3}, "tp_rank 3 is outside"),
        ({"spec__block_tokens": 2**63}, "over 64 bits"),
        ({TENSOR + "name": ""}, "needs a name"),
        ({TENSOR + "dtype": "float4"}, "float4"),
        ({TENSOR + "shape": [-1]}, "negative size"),
        ({TENSOR + "shape": [2**41]}, "largest 2199023255552"),
        ({TENSOR + "shape": [1] * 17}, "17 dimensions"),
        ({"spec__restore": {"kind": "last_window"}}, "window_tokens"),
        ({"keys": bytes(33)}, "keys of 33 bytes"),
        ({"tail_tokens": 16}, "tail of 16 tokens"),
        ({"tail_tokens": -1}, "tail_tokens"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"spec": None}, "spec"),
    ],
)
def test_an_impossible_spec_is_a_protocol_error(spec: KVSpec, changes: dict[str, object], match: str) -> None:
    _, server = shaken()
    feed(server, raw_frame(16, msgspec.msgpack.encode(stream_fields(spec, {}))))
    meta = msgspec.msgpack.encode(stream_fields(spec, changes))
    with pytest.raises(ProtocolError, match=match) as caught:
        feed(server, raw_frame(16, meta))
    assert caught.value.remote


def test_a_spec_arrives_equal_with_its_fingerprint(spec: KVSpec) -> None:
    client, server = shaken()
    message = m.BeginStream(stream="s", spec=spec, keys=b"", tail_tokens=1)
    (event,) = feed(server, frame(client, message))
    assert event.message == message
    assert event.message.spec.fingerprint() == spec.fingerprint()
    assert event.message.spec.block_nbytes == spec.block_nbytes


def test_fields_of_a_newer_peer_are_ignored() -> None:
    _, server = shaken()
    meta = msgspec.msgpack.encode({"t": "pong", "at": 2.0, "from_the_future": [1, {"deep": None}]})
    (event,) = feed(server, raw_frame(5, meta))
    assert event.message == m.Pong(at=2.0)


def test_mistakes_of_this_side_send_nothing_and_change_nothing(spec: KVSpec) -> None:
    class Unknown(Message, frozen=True, tag="unknown"):
        pass

    client, server = shaken(limits=Limits(max_meta_nbytes=100, max_payload_nbytes=10))
    for message, nbytes, match in [
        (Unknown(), 0, "no type number"),
        (HELLO, 0, "may not send hello in state 'open'"),
        (m.AbortStream(reason="x" * 100), 0, "limit is 100"),
        (m.PutLayer(layer=0, blocks=()), 11, "limit is 10"),
        (m.Ping(), 1, "carries none"),
        (m.TokensOut(index=2**64, token_ids=()), 0, "cannot be encoded"),
    ]:
        with pytest.raises(ProtocolError, match=match) as caught:
            client.encode(message, nbytes)
        assert not caught.value.remote
    with pytest.raises(ProtocolError, match="no payload is due"):
        client.payload_taken()
    with pytest.raises(ProtocolError, match="33 bytes were fed"):
        server.receive(bytes(33))
    assert feed(server, frame(client, m.Ping())) == [MessageReceived(m.Ping(), 0, 0, False)]


@pytest.mark.parametrize(
    "build",
    [
        lambda spec: m.BeginStream(stream="s", spec=spec, keys=b"x", tail_tokens=0),
        lambda spec: m.BeginStream(stream="s", spec=spec, keys=b"", tail_tokens=16),
    ],
)
def test_an_impossible_stream_cannot_be_built(build: Any, spec: KVSpec) -> None:
    with pytest.raises(ConfigError):
        build(spec)


# ---- handshake -------------------------------------------------------------------------------


def at_state(side: Side, state: State) -> WireProtocol:
    protocol = WireProtocol(side)
    protocol.state = state
    protocol.version = 1
    return protocol


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("side", list(Side))
def test_who_may_send_what_when(side: Side, state: State, examples: Sequence[Any]) -> None:
    """The whole table, spelled out once more by hand: nothing but the handshake before it is over."""
    for example in examples:
        cls = type(example.message)
        allowed = {
            State.START: (side is Side.CLIENT and cls is m.Hello)
            or (side is Side.SERVER and cls is m.Failure),
            State.OFFERED: side is Side.SERVER and cls in (m.Welcome, m.Failure),
            State.OPEN: cls not in (m.Hello, m.Welcome),
            State.REFUSED: False,
        }[state]
        sender, receiver = at_state(side, state), at_state(side.other, state)
        meta = msgspec.msgpack.encode(example.message)
        data = raw_frame(TYPE_NUMBERS[cls], meta)
        if allowed:
            sender.encode(example.message)
            assert feed(receiver, data)[0].message == example.message
            assert receiver.state is sender.state
        else:
            with pytest.raises(ProtocolError, match="may not send"):
                sender.encode(example.message)
            with pytest.raises(ProtocolError, match="in state"):
                feed(receiver, data)


def test_every_state_has_rules() -> None:
    assert set(TRANSITIONS) == set(State)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 1), (1, 2), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (2, 3), 2),
        ((2, 3), (1, 2), 2),
        ((1, 9), (3, 5), 5),
        ((1, 1), (2, 3), None),
        ((2, 3), (1, 1), None),
        ((1, 1), (2, 1), None),
        ((1, 1), (0, 1), None),
        ((1, 1), (1, 70000), None),
    ],
)
def test_negotiation(ours: tuple[int, int], theirs: tuple[int, int], expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ProtocolError) as caught:
            negotiate(Versions(*ours), Versions(*theirs))
        assert f"{theirs[0]}..{theirs[1]}" in str(caught.value)
    else:
        assert negotiate(Versions(*ours), Versions(*theirs)) == expected


@pytest.mark.parametrize(
    ("client_versions", "server_versions", "expected"),
    [((1, 1), (1, 2), 1), ((1, 2), (1, 1), 1), ((2, 3), (1, 2), 2), ((1, 2), (2, 3), 2), ((5, 6), (5, 6), 6)],
)
def test_neighbouring_versions_shake_hands_and_talk(
    client_versions: tuple[int, int], server_versions: tuple[int, int], expected: int
) -> None:
    client = WireProtocol(Side.CLIENT, versions=Versions(*client_versions))
    server = WireProtocol(Side.SERVER, versions=Versions(*server_versions))
    hello = m.Hello(min_version=client_versions[0], max_version=client_versions[1], session="s")
    feed(server, frame(client, hello))
    feed(client, frame(server, m.Welcome(version=server.version, session="s", epoch="e")))
    assert client.version == server.version == expected
    ping = frame(client, m.Ping())
    assert ping[4:6] == bytes([expected, 0])
    assert feed(server, ping)[0].message == m.Ping()


def test_a_much_newer_client_is_refused_with_both_ranges_and_told_so() -> None:
    server = WireProtocol(Side.SERVER)
    meta = {"t": "hello", "min_version": 7, "max_version": 8, "session": "s", "quantum": {"x": 1}}
    with pytest.raises(ProtocolError, match=r"this side speaks 1\.\.1, the peer 7\.\.8; update this side"):
        feed(server, raw_frame(1, msgspec.msgpack.encode(meta), version=7))
    assert server.state is State.OFFERED
    refusal = frame(server, m.Failure(code="protocol", message="no"))
    client = WireProtocol(Side.CLIENT, versions=Versions(7, 8))
    client.encode(m.Hello(min_version=7, max_version=8, session="s"))
    assert feed(client, refusal)[0].message == m.Failure(code="protocol", message="no")
    assert client.state is State.REFUSED


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_checksums_are_off_only_if_both_want_it(ours: bool, theirs: bool, agreed: bool) -> None:
    client, server = WireProtocol(Side.CLIENT, checksum=ours), WireProtocol(Side.SERVER, checksum=theirs)
    feed(server, frame(client, m.Hello(min_version=1, max_version=1, session="s", checksum=ours)))
    feed(client, frame(server, m.Welcome(version=1, session="s", epoch="e", checksum=server.checksum)))
    assert client.checksum is server.checksum is agreed
    events = feed(server, frame(client, m.PutLayer(layer=0, blocks=()), b"abc"))
    assert [type(e) for e in events] == [MessageReceived, bytes] + [TrailerReceived] * agreed


@pytest.mark.parametrize(
    ("welcome", "match"),
    [
        (m.Welcome(version=2, session="s", epoch="e"), "chose protocol version 2"),
        (m.Welcome(version=1, session="s", epoch="e", checksum=False), "turned checksums off"),
    ],
)
def test_a_client_refuses_a_bad_welcome(welcome: m.Welcome, match: str) -> None:
    client = WireProtocol(Side.CLIENT)
    client.encode(HELLO)
    with pytest.raises(ProtocolError, match=match):
        feed(client, raw_frame(2, msgspec.msgpack.encode(welcome)))


@pytest.mark.parametrize(
    "welcome",
    [
        m.Welcome(version=2, session="s", epoch="e"),
        m.Welcome(version=1, session="s", epoch="e", checksum=False),
    ],
)
def test_a_server_cannot_welcome_to_something_else_than_agreed(welcome: m.Welcome) -> None:
    server = WireProtocol(Side.SERVER)
    feed(server, frame(WireProtocol(Side.CLIENT), HELLO))
    with pytest.raises(ProtocolError, match="welcome with"):
        server.encode(welcome)


def test_a_stranger_may_send_less_than_a_peer() -> None:
    server = WireProtocol(Side.SERVER)
    data = raw_frame(1, b"", meta_nbytes=65537)
    server.receive(data[:4])
    with pytest.raises(ProtocolError, match="the limit is 65536"):
        server.receive(data[4:])


def test_credentials_never_show() -> None:
    hello = m.Hello(min_version=1, max_version=1, session="s", credential=b"hunter2")
    assert "hunter2" not in f"{hello!r} {hello}"
    assert "***" in repr(hello)


def test_printable_keeps_log_lines_whole() -> None:
    assert printable("a\nb\x1b[31mc") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}[31mc"
    assert len(printable("x" * 1000)) == 500
