"""Frames that no client sends, against a live daemon: it refuses them, says so in few lines, and goes on."""

from __future__ import annotations

import random
import re
import socket
import struct
import time
from collections import Counter
from pathlib import Path

import pytest

from kvferry.client import Client, ClientOptions
from kvferry.core.spec import KeyScope, namespace_id
from kvferry.daemon.credentials import CredentialFile, Limits, edited, new_credential
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.daemon_frames import daemon_frames
from kvferry.testing.processes import Command
from kvferry.wire import ChannelOptions, WireProtocol
from kvferry.wire.daemon_messages import OpenNamespace
from kvferry.wire.protocol import HEADER_NBYTES, TRAILER_NBYTES, Side

SPEC = small_spec("fuzz")
HEADER = struct.Struct("<8xI8xIQ")
SAID = re.compile(r"(?:request .*of|connection from) (\S+) (?:failed|refused) \[(\w+)\]")
SOAK = ((1_000_000, False), (1_000_000, True))


def rss_nbytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * 4096  # without shared pages: those are the blocks'


def send_mutated(
    address: str, rng: random.Random, frames: list[bytes], opening: bytes, token: bytes | None
) -> int:
    """One connection: a handshake, then frames with bytes of theirs changed, until the daemon hangs up.

    One in four shows a token that is not quite right; every other one opens a namespace first.
    The end of what is sent follows at once, so that the daemon waits for no more. What it answers is read to
    its end: who leaves before is not let in, and none of his frames are read.

    Returns:
        At least how many of them it has read: it answers, or hangs up at the first that is no frame.
    """
    if token is not None and not rng.randrange(4):
        wrong = bytearray(token)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        token = bytes(wrong)
    options = ChannelOptions(role="client", session="fuzz", checksum=False, credential=token)
    data = bytearray(options.protocol(Side.CLIENT, address).encode(options.hello(time.monotonic())))
    opens = rng.randrange(2)
    data += opening * opens
    for _ in range(rng.randrange(1, 6)):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randrange(4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        data += frame
    came = bytearray()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(address.removeprefix("unix://"))
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while got := sock.recv(65536):
                came += got
        except (ConnectionResetError, BrokenPipeError):
            pass  # it has hung up
    answers = at = 0
    while at + HEADER_NBYTES <= len(came):
        flags, meta_nbytes, payload_nbytes = HEADER.unpack_from(came, at)
        at += HEADER_NBYTES + meta_nbytes + payload_nbytes + (TRAILER_NBYTES if flags else 0)
        answers += 1
    others = 1 + opens  # the welcome, and that a namespace is open
    return max(1, answers - others) if answers >= others else 0


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


@pytest.mark.parametrize(
    ("count", "guarded"),
    [
        (600, False),
        (300, True),
        *(pytest.param(n, g, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]) for n, g in SOAK),
    ],
)
def test_mutated_frames(tmp_path: Path, count: int, guarded: bool) -> None:
    token = with_credentials(tmp_path) if guarded else None
    rng = random.Random(6)
    plain = WireProtocol(Side.CLIENT, checksum=False)
    server = WireProtocol(Side.SERVER, checksum=False)
    options = ChannelOptions(role="client", session="fuzz", checksum=False)
    hello = plain.encode(options.hello(0.0))
    while hello:
        taken, hello = hello[: server.wanted], hello[server.wanted :]
        server.receive(taken)
    welcome = server.encode(options.welcome(server, 0.0, 0.0))
    while welcome:
        taken, welcome = welcome[: plain.wanted], welcome[plain.wanted :]
        plain.receive(taken)
    named = OpenNamespace(spec=SPEC, namespace_id=namespace_id(SPEC, KeyScope()))
    opening = plain.encode(named, 0, 6)
    frames = [plain.encode(m, len(data), 7) + data for m, data in daemon_frames(SPEC, KeyScope())]
    words: tuple[str, ...] = (
        "serve",
        "--socket",
        f"{tmp_path}/d.sock",
        "--capacity",
        "4MiB",
        "--disk",
        "none",
        "--http",
        "none",
    )
    if guarded:
        words += ("--credentials", f"{tmp_path}/c.json")
    with Command(*words, "--set", "daemon.listen=none", "--set", "wire.checksum=false") as daemon:
        address = daemon.wait_ready()["listen"]
        with Client(address, ClientOptions(checksum=False, credential=token)) as client:
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * 3 * SPEC.block_tokens)
            save_blocks(ns, keys)
            before = rss_nbytes(daemon.process.pid)
            read, connections, began = 0, 0, time.monotonic()
            while read < count:
                connections += 1
                assert connections < 2 * count + 100, f"of most connections no frame was read, of all {read}"
                read += send_mutated(address, rng, frames, opening, token)
                if connections % 256 == 0:  # who behaves is served all the while
                    assert ns.lookup(keys).prefix == 3
            seconds = time.monotonic() - began
            assert ns.lookup(keys).prefix == 3
            assert rss_nbytes(daemon.process.pid) - before < 32 << 20
            assert client.counters.reconnects == 0
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.err
        assert token is None or token.decode()[18:] not in daemon.err
        said = Counter(SAID.findall(daemon.err))
        assert said, daemon.err
        lines = max(said.values())  # in 10 s one line a peer and reason, and one of how many more there were
        assert lines <= 2 * (2 + seconds // 10), said
