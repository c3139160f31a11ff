from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
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
from kvferry.wire.daemon_messages import DaemonMessage
from kvferry.wire.messages import AnyMessage, Message
from kvferry.wire.protocol import (
    HEADER_NBYTES,
    PAYLOAD_TYPES,
    TYPE_NUMBERS,
    Limits,
    MessageReceived,
    Side,
    TrailerReceived,
    WireProtocol,
    printable,
)

VECTORS = Path(__file__).parents[2] / "data" / "wire_vectors.json"
HELLO = m.Hello(min_version=1, max_version=1, session="s")


# ---- the format is pinned --------------------------------------------------------------------


def test_every_message_has_a_golden_frame_both_ways(wire: Any, examples: Sequence[Any]) -> None:
    golden = json.loads(VECTORS.read_text())
    assert {type(e.message) for e in examples} == set(TYPE_NUMBERS)
    for example in examples:
        protocols = wire.shaken()
        cls = type(example.message)
        data = wire.frame(
            wire.sender_for(cls, protocols), example.message, example.payload, example.request_id
        )
        entry = {
            "name": example.name,
            "type": TYPE_NUMBERS[cls],
            "request_id": example.request_id,
            "payload_nbytes": len(example.payload),
            "frame": data.hex(),
        }
        assert golden.get(example.name) == entry, f"new message? append to the vectors: {json.dumps(entry)}"
        events = wire.feed(wire.receiver_for(cls, protocols), bytes.fromhex(golden[example.name]["frame"]))
        received = events[0]
        assert received.message == example.message
        assert (received.request_id, received.payload_nbytes) == (example.request_id, len(example.payload))
        if example.payload:
            assert events[1] == example.payload
            assert events[2] == TrailerReceived(xxhash.xxh3_64_intdigest(data[:-8]))
    assert set(golden) == {e.name for e in examples}


def test_header_layout_is_the_documented_one(wire: Any) -> None:
    client, _ = wire.shaken()
    head = client.encode(m.PutLayer(layer=0, blocks=()), 7, 0x0102030405060708)
    header, meta = head[:HEADER_NBYTES], head[HEADER_NBYTES:]
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
    assert set(TYPE_NUMBERS) == {*get_args(AnyMessage), *get_args(DaemonMessage)}
    assert len(set(TYPE_NUMBERS.values())) == len(TYPE_NUMBERS)
    assert set(TYPE_NUMBERS) >= PAYLOAD_TYPES


# ---- splitting and damage --------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_any_split_of_the_stream_gives_the_same_events(data: st.DataObject, wire: Any) -> None:
    client, server = wire.shaken()
    stream = b"".join(
        [
            wire.frame(client, m.PutLayer(layer=0, blocks=(1,)), bytes(range(200)), 5),
            wire.frame(client, m.Ping(), b"", 6),
            wire.frame(client, m.AbortStream(reason="é" * 40)),
            wire.frame(client, m.PutLayer(layer=1, blocks=(1,)), b"z"),
        ]
    )
    whole = wire.feed(server, stream)
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
    assert wire.feed(wire.shaken()[1], stream, cuts) == whole
    assert wire.feed(wire.shaken()[1], stream, range(len(stream))) == whole


def test_a_flipped_bit_anywhere_is_found(wire: Any, examples: Sequence[Any]) -> None:
    """No bit of any frame, those of the handshake included, can be flipped without an error.

    A length that grew makes the receiver wait for more, which its deadline ends.
    """
    rng = random.Random(4)
    for example in examples:
        cls = type(example.message)
        data = wire.frame(wire.sender_for(cls, wire.shaken()), example.message, example.payload, 9)
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1 << rng.randrange(8)
            receiver = wire.receiver_for(cls, wire.shaken())
            outcome = received(receiver, bytes(damaged))
            if 20 <= at < HEADER_NBYTES:
                assert outcome in ("refused", "waiting"), (example.name, at)
            else:
                assert outcome == "refused", (example.name, at)
            if receiver.between_frames:  # the short way sees the same
                assert receiver.receive_whole(memoryview(damaged)) is None or example.payload


def received(protocol: WireProtocol, data: bytes) -> str:
    """What becomes of one frame."""
    try:
        message: object = None
        taken = 0
        while message is None:
            if taken == len(data):
                return "waiting"
            piece = data[taken : taken + protocol.wanted]
            message, taken = protocol.receive(piece), taken + len(piece)
        assert isinstance(message, MessageReceived)
        if not message.payload_nbytes:
            return "right"
        if taken + message.payload_nbytes + 8 > len(data):
            return "waiting"
        expected = xxhash.xxh3_64_intdigest(protocol.head + data[taken : taken + message.payload_nbytes])
        protocol.payload_taken()
        trailer = protocol.receive(data[taken + message.payload_nbytes :][:8])
        assert isinstance(trailer, TrailerReceived)
        return "right" if trailer.digest == expected else "refused"
    except ProtocolError as error:
        return "refused" if error.remote else "blamed on us"


@pytest.mark.parametrize("payload", [b"", bytes(range(100))])
def test_the_short_way_takes_what_the_long_way_takes(wire: Any, payload: bytes) -> None:
    client, server = wire.shaken()
    message: Message = m.PutLayer(layer=1, blocks=(2,)) if payload else m.LayerAck(count=3)
    data = wire.frame(client, message, payload, 5)
    whole = server.receive_whole(memoryview(data))
    assert whole == MessageReceived(message, 5, len(payload), True)
    assert server.head_nbytes == len(data) - (len(payload) + 8 if payload else 0)
    if payload:
        server.payload_taken()
        expected = xxhash.xxh3_64_intdigest(server.head + payload)
        assert data[-8:] == expected.to_bytes(8, "little")
        server.trailer_taken()
    else:
        for cut in range(len(data)):
            assert server.receive_whole(memoryview(data[:cut])) is None
    assert server.between_frames


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


def test_damaged_frames_give_a_message_or_a_protocol_error_and_little_memory(
    wire: Any, examples: Sequence[Any]
) -> None:
    rng = random.Random(20240607)
    limits = Limits(max_meta_nbytes=1 << 20)
    outcomes = {"message": 0, "refused": 0, "unfinished": 0, "blamed on us": 0}
    valid = []
    for example in examples:
        protocols = wire.shaken()
        cls = type(example.message)
        valid.append((cls, wire.frame(wire.sender_for(cls, protocols), example.message, example.payload)))
    tracemalloc.start()
    try:
        for _ in range(2000):
            cls, data = rng.choice(valid)
            server = wire.receiver_for(cls, wire.shaken(limits=limits))
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


def test_a_claimed_list_length_allocates_nothing(wire: Any) -> None:
    for size in (b"\xdd\xff\xff\xff\xf0", b"\xdd\x10\x00\x00\x00", b"\xdc\xff\xff"):
        _, server = wire.shaken()
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match="malformed 'stream_ready'"):
                wire.feed(server, wire.raw_frame(17, b"\x82\xa1t\xacstream_ready\xa7missing" + size))
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
    ("build", "match"),
    [
        (lambda f: f(4, PING, magic=b"KVFX"), "does not speak kvferry"),
        (lambda f: f(4, PING, version=2), "version 2, agreed was 1"),
        (lambda f: f(999, PING), "message type 999, unknown"),
        (lambda f: f(4, PING, flags=2), "flags 0x2"),
        (lambda f: f(4, PING, flags=0), "flags 0x0, expected were 0x1"),
        (lambda f: f(18, PING, flags=0, payload_nbytes=5), "flags 0x0, expected were 0x1"),
        (lambda f: f(4, b""), "without meta"),
        (lambda f: f(4, PING, meta_nbytes=(1 << 20) + 1), "limit is 1048576"),
        (lambda f: f(18, PING, flags=1, payload_nbytes=(1 << 30) + 1), "max_payload_nbytes"),
        (lambda f: f(4, PING, flags=1, payload_nbytes=8), "carries none"),
        (lambda f: f(5, PING), "type 'pong' that holds 'ping'"),
        (lambda f: f(1, PING), "'hello' in state 'open'"),
        (lambda f: f(4, b"\x80"), "missing required field `t`"),
        (lambda f: f(4, PING + b"x"), "malformed 'ping'"),
        (lambda f: f(4, b"\xc1"), "malformed 'ping'"),
        (lambda f: f(17, b"\x82\xa1t\xacstream_ready\xa1x" + b"\x91" * 100_000), "malformed"),
        (lambda f: f(22, b"\x82\xa1t\xacabort_stream\xa6reason\xa2\xff\xfe"), "malformed"),
        (lambda f: f(17, b"\x82\xa1t\xacstream_ready\xa7missing\x91\xff"), "malformed"),
        (lambda f: f(5, msgspec.msgpack.encode({"t": "pong", "at": float("nan")})), "malformed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_frames_are_the_peers_fault(wire: Any, build: Callable[..., bytes], match: str) -> None:
    _, server = wire.shaken(limits=Limits(max_meta_nbytes=1 << 20, max_payload_nbytes=1 << 30))
    with pytest.raises(ProtocolError, match=match) as caught:
        feed_some(server, build(wire.raw_frame))
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
def test_an_impossible_spec_is_a_protocol_error(
    wire: Any, spec: KVSpec, changes: dict[str, object], match: str
) -> None:
    _, server = wire.shaken()
    wire.feed(server, wire.raw_frame(16, msgspec.msgpack.encode(stream_fields(spec, {}))))
    meta = msgspec.msgpack.encode(stream_fields(spec, changes))
    with pytest.raises(ProtocolError, match=match) as caught:
        wire.feed(server, wire.raw_frame(16, meta))
    assert caught.value.remote


def test_a_spec_arrives_equal_with_its_fingerprint(wire: Any, spec: KVSpec) -> None:
    client, server = wire.shaken()
    message = m.BeginStream(stream="s", spec=spec, keys=b"", tail_tokens=1)
    (event,) = wire.feed(server, wire.frame(client, message))
    assert event.message == message
    assert event.message.spec.fingerprint() == spec.fingerprint()
    assert event.message.spec.block_nbytes == spec.block_nbytes


def test_fields_of_a_newer_peer_are_ignored(wire: Any) -> None:
    _, server = wire.shaken()
    meta = msgspec.msgpack.encode({"t": "pong", "at": 2.0, "from_the_future": [1, {"deep": None}]})
    (event,) = wire.feed(server, wire.raw_frame(5, meta))
    assert event.message == m.Pong(at=2.0)


def test_mistakes_of_this_side_send_nothing_and_change_nothing(wire: Any, spec: KVSpec) -> None:
    class Unknown(Message, frozen=True, tag="unknown"):
        pass

    client, server = wire.shaken(limits=Limits(max_meta_nbytes=100, max_payload_nbytes=10))
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
    assert wire.feed(server, wire.frame(client, m.Ping())) == [MessageReceived(m.Ping(), 0, 0, True)]


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


def test_credentials_never_show() -> None:
    hello = m.Hello(min_version=1, max_version=1, session="s", credential=b"hunter2")
    assert "hunter2" not in f"{hello!r} {hello}"
    assert "***" in repr(hello)


def test_printable_keeps_log_lines_whole() -> None:
    assert printable("a\nb\x1b[31mc") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}[31mc"
    assert len(printable("x" * 1000)) == 500
