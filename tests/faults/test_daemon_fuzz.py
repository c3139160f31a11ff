"""Frames that no client sends, against a live daemon: it refuses them, says so in few lines, and goes on."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.client import Client, ClientOptions
from kvferry.daemon.credentials import CredentialFile, Limits, edited, new_credential
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.daemon_fuzz import answers_as_they_are, send_mutated
from kvferry.testing.processes import Command

SPEC = small_spec("fuzz")
EACH = {"tcp": 10_000, "unix": 500}  # frames by one process: over unix it is soon not let in any more
SAID = re.compile(r"(?:request .*of|connection from) (\S+) (?:failed|refused) \[(\w+)\]")
SOAK = (
    ("tcp", 1_000_000, False),
    ("tcp", 1_000_000, True),
    ("unix", 100_000, False),
    ("unix", 100_000, True),
)


def rss_nbytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * 4096  # without shared pages: those are the blocks'


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


def sent_by_processes(address: str, count: int, token: bytes | None) -> Iterator[Counter[str]]:
    """What each of some processes was answered, as they end."""
    each = EACH[address.partition(":")[0]]
    if count <= each:
        yield send_mutated(address, 6, count, token)
        return
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        asked = [pool.apply_async(send_mutated, (address, n, each, token)) for n in range(count // each)]
        for one in asked:
            yield one.get(timeout=7200)


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
    url = f"unix://{tmp_path}/d.sock" if scheme == "unix" else "tcp://127.0.0.1:0"
    words = ["serve", "--socket", "none", "--capacity", "4MiB", "--disk", "none", "--http", "none"]
    words += ["--credentials", f"{tmp_path}/c.json"] * guarded
    with Command(*words, "--set", f"daemon.listen={url}", "--set", "wire.checksum=false") as daemon:
        address = daemon.wait_ready()["listen"]
        with Client(address, ClientOptions(checksum=False, credential=token)) as client:
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * 3 * SPEC.block_tokens)
            save_blocks(ns, keys)
            ns.pin(keys, ttl=3600.0 * 3)  # what is stored by the frames would push them out
            names = answers_as_they_are(address, token)
            assert "failure" not in names
            assert len(names) > 20, names
            before = rss_nbytes(daemon.process.pid)
            answered, began = Counter[str](), time.monotonic()
            for some in sent_by_processes(address, count, token):
                answered += some
                assert ns.lookup(keys).prefix == 3  # who behaves is served all the while
            seconds = time.monotonic() - began
            assert rss_nbytes(daemon.process.pid) - before < 32 << 20
            assert client.counters.reconnects == 0
            print(f"{seconds:.0f} s: {dict(answered.most_common())}")
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.err
        assert token is None or token.decode()[18:] not in daemon.err
        refused = sum(answered[name] for name in ("connections", "failure", "hung up"))
        assert answered.total() - refused > count // 20, answered  # many are granted all the same
        said = Counter(SAID.findall(daemon.err))
        assert said, daemon.err
        assert " more " in daemon.err  # how many were not shown
        lines = max(said.values())  # in 10 s one line a peer and reason, and one of how many more there were
        assert lines <= 2 * (2 + seconds // 10), said
