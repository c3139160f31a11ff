"""Frames that no client sends, against a live daemon: it refuses them, says so in few lines, and goes on."""

from __future__ import annotations

import random
import re
import struct
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from kvferry.client import Client, ClientOptions
from kvferry.core.keys import block_keys
from kvferry.core.spec import KeyScope, KVSpec, namespace_id
from kvferry.daemon.credentials import CredentialFile, Limits, edited, new_credential
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.daemon_frames import daemon_frames
from kvferry.testing.daemon_requests import daemon_requests, opening
from kvferry.testing.processes import Command
from kvferry.testing.raw_sockets import answer_to
from kvferry.wire import ChannelOptions, WireProtocol
from kvferry.wire.protocol import HEADER_NBYTES, MAGIC, TRAILER_NBYTES, Side
from kvferry.wire.shared_arena import SHARED_ARENA
from kvferry.wire.tables import NAMES, TYPES

SPEC = small_spec("fuzz")
HEADER = struct.Struct("<6xHI8xIQ")
SAID = re.compile(r"(?:request .*of|connection from) (\S+) (?:failed|refused) \[(\w+)\]")
SOAK = (("unix", 1_000_000, False), ("unix", 1_000_000, True), ("tcp", 100_000, True))


def rss_nbytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * 4096  # without shared pages: those are the blocks'


class Frame(NamedTuple):
    """A request, up to its payload, and that."""

    head: bytes
    payload: bytes = b""


def hello(address: str, token: bytes | None) -> bytes:
    options = ChannelOptions(
        role="client", session="fuzz", checksum=False, credential=token, capabilities=(SHARED_ARENA,)
    )
    return bytes(options.protocol(Side.CLIENT, address).encode(options.hello(time.monotonic())))


def mutated(frame: Frame, rng: random.Random) -> bytes:
    """A frame with none to three bytes of it changed, most often before its payload."""
    data = bytearray(frame.head + frame.payload)
    for _ in range(rng.randrange(4)):
        data[rng.randrange(len(frame.head) if rng.randrange(8) else len(data))] = rng.randrange(256)
    return bytes(data)


def answers_to(data: bytes, address: str) -> list[str]:
    """What the daemon answers one connection: names of messages, in order.

    The end of what is sent follows at once, so that the daemon waits for no more. What it answers is read to
    its end: who leaves before is not let in, and none of his frames are read.
    """
    came = answer_to(address, data)
    names: list[str] = []
    at = 0
    while (at := came.find(MAGIC, at)) >= 0 and at + HEADER_NBYTES <= len(came):  # bytes go with descriptors
        number, flags, meta_nbytes, payload_nbytes = HEADER.unpack_from(came, at)
        at += HEADER_NBYTES + meta_nbytes + payload_nbytes + (TRAILER_NBYTES if flags else 0)
        names.append(NAMES[TYPES[number]])
    return names


def send_mutated(
    address: str, rng: random.Random, frames: list[Frame], opening: bytes, token: bytes | None
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
        hello(address, token) + opening * opens,
        rng.randrange(1, 6),
        rng.randrange(len(frames)),
    )
    chosen = (frames * 2)[start : start + many] if rng.randrange(2) else rng.choices(frames, k=many)
    names = answers_to(data + b"".join(mutated(frame, rng) for frame in chosen), address)
    others = 1 + opens  # the welcome, and that a namespace is open
    return Counter(names[others:] or ["hung up"]) if len(names) >= others else Counter()


def with_credentials(folder: Path) -> bytes:
    """A credentials file of two tenants; the token of one."""
    tokens = []
    for tenant in ("a", "b"):
        credential, token = new_credential(tenant, ("read", "write"))
        with edited(folder / "c.json") as box:
            tenants = {**box[0].tenants, tenant: Limits()}
            box[0] = CredentialFile(tenants=tenants, credentials=(*box[0].credentials, credential))
        tokens.append(token.encode())
    return tokens[0]


def conversation(spec: KVSpec, *, local: bool) -> tuple[bytes, list[Frame], list[Frame]]:
    """The frame that opens a namespace, requests that are granted behind it in this order, and others."""
    plain = WireProtocol(Side.CLIENT, checksum=False)
    server = WireProtocol(Side.SERVER, checksum=False)
    options = ChannelOptions(role="client", session="fuzz", checksum=False)
    for one, other in ((plain, server), (server, plain)):
        data = one.encode(options.hello(0.0) if one is plain else options.welcome(server, 0.0, 0.0))
        while data:
            taken, data = data[: other.wanted], data[other.wanted :]
            other.receive(taken)
    keys = block_keys(namespace_id(spec, KeyScope()), [1] * 3 * spec.block_tokens, spec.block_tokens)
    granted = [Frame(plain.encode(m, len(p), 7), p) for m, p in daemon_requests(spec, keys, local=local)]
    others = [Frame(plain.encode(m, len(p), 7), p) for m, p in daemon_frames(spec, KeyScope())]
    return plain.encode(opening(spec, KeyScope()), 0, 6), granted, others


@pytest.mark.parametrize(
    ("scheme", "count", "guarded"),
    [
        ("unix", 500, False),
        ("tcp", 100, False),
        ("unix", 300, True),
        *(pytest.param(*case, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]) for case in SOAK),
    ],
)
def test_mutated_frames(tmp_path: Path, scheme: str, count: int, guarded: bool) -> None:
    token = with_credentials(tmp_path) if guarded else None
    rng = random.Random(6)
    opened, granted, others = conversation(small_spec("fuzz", pages=1), local=scheme == "unix")
    url = f"unix://{tmp_path}/d.sock" if scheme == "unix" else "tcp://127.0.0.1:0"
    words = ["serve", "--socket", "none", "--capacity", "4MiB", "--disk", "none", "--http", "none"]
    words += ["--credentials", f"{tmp_path}/c.json"] * guarded
    with Command(*words, "--set", f"daemon.listen={url}", "--set", "wire.checksum=false") as daemon:
        address = daemon.wait_ready()["listen"]
        talk = hello(address, token) + opened + b"".join(frame.head + frame.payload for frame in granted)
        with Client(address, ClientOptions(checksum=False, credential=token)) as client:
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * 3 * SPEC.block_tokens)
            save_blocks(ns, keys)
            ns.pin(keys, ttl=3600.0 * 3)  # what is stored by the frames would push them out
            names = answers_to(talk, address)  # as they are, all are granted
            assert "failure" not in names
            assert len(names) == 2 + len(granted), names
            before = rss_nbytes(daemon.process.pid)
            answered, connections, began = Counter[str](), 0, time.monotonic()
            while answered.total() < count:
                connections += 1
                assert connections < 2 * count + 100, f"of most connections no frame was read: {answered}"
                answered += send_mutated(address, rng, granted + others, opened, token)
                if connections % 256 == 0:  # who behaves is served all the while
                    assert ns.lookup(keys).prefix == 3
            seconds = time.monotonic() - began
            assert ns.lookup(keys).prefix == 3
            assert rss_nbytes(daemon.process.pid) - before < 32 << 20
            assert client.counters.reconnects == 0
            print(f"{connections} connections in {seconds:.0f} s: {dict(answered.most_common())}")
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.err
        assert token is None or token.decode()[18:] not in daemon.err
        assert 5 * answered["failure"] < 4 * answered.total(), answered  # at least a fifth was granted
        said = Counter(SAID.findall(daemon.err))
        assert said, daemon.err
        assert " more " in daemon.err  # how many were not shown
        lines = max(said.values())  # in 10 s one line a peer and reason, and one of how many more there were
        assert lines <= 2 * (2 + seconds // 10), said
