"""Frames that no client sends, against a live daemon: it refuses them, says so in few lines, and goes on."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from kvferry import transports
from kvferry.client import Client, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.core.spec import KeyScope
from kvferry.daemon.credentials import CredentialFile, Limits, edited, new_credential
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.daemon_frames import daemon_frames
from kvferry.testing.processes import Command
from kvferry.wire import ChannelOptions, WireProtocol
from kvferry.wire.protocol import Side

SPEC = small_spec("fuzz")
SOAK = ((1_000_000, False), (1_000_000, True))


def rss_nbytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * 4096  # without shared pages: those are the blocks'


def send_mutated(address: str, rng: random.Random, frames: list[bytes], token: bytes | None) -> int:
    """One connection: a handshake, then frames with bytes of theirs changed, until the daemon has enough.

    One in four shows a token that is not quite right.

    Returns:
        How many frames were sent.
    """
    sent = 0
    if token is not None and not rng.randrange(4):
        wrong = bytearray(token)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        token = bytes(wrong)
    options = ChannelOptions(role="client", session="fuzz", checksum=False, credential=token)
    connection = transports.connect(address, deadline_in(60))
    try:
        protocol: WireProtocol = options.protocol(Side.CLIENT, address)
        connection.send([protocol.encode(options.hello(time.monotonic()))], deadline_in(60))
        for _ in range(rng.randrange(1, 6)):
            data = bytearray(rng.choice(frames))
            for _ in range(rng.randrange(4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            connection.send([bytes(data)], deadline_in(60))
            sent += 1
    except KVFerryError:
        pass  # it has hung up
    finally:
        connection.abort()
    return sent


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
            sent = 0
            while sent < count:
                sent += send_mutated(address, rng, frames, token)
            assert ns.lookup(keys).prefix == 3
            assert rss_nbytes(daemon.process.pid) - before < 32 << 20
            assert client.counters.reconnects == 0
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.err
        assert token is None or token.decode()[18:] not in daemon.err
        assert len(daemon.err.splitlines()) < 60 + count // 150
