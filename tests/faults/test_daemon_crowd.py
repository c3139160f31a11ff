"""Many engines at one daemon: every byte is looked at, nothing stays behind, lookups are quick; and kills."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvferry.client import Client
from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.testing.blocks import save_blocks, small_spec, wait_until
from kvferry.testing.processes import Command

SPEC = small_spec("crowd", pages=16)
CAPACITY = 64 << 20
HEAL_S = 2.0

START = """
import json, random, sys, time
from kvferry.client import Client
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, LeaseExpiredError, UnavailableError
from kvferry.testing.blocks import block_bytes, small_spec
url, seed, seconds, chains = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
rng = random.Random(seed)
client = Client(url)
ns = client.namespace(small_spec("crowd", pages=16))
nbytes = ns.spec.block_nbytes
print("ready", flush=True)
"""
# Saves, loads and looks up blocks of many chains, which do not fit; compares every byte that it is given.
MIXED = (
    START
    + """
counts = dict(saved=0, loaded=0, looked=0, expired=0, refused=0)
until = time.monotonic() + seconds
late = until + 60
while (now := time.monotonic()) < until or (now < late and not min(list(counts.values())[:3])):
    keys = ns.keys([rng.randrange(chains)] * 8 * ns.spec.block_tokens)
    kind = rng.randrange(10)
    try:
        if kind < 3:
            ns.lookup(keys)
            counts["looked"] += 1
        elif kind < 6:
            blocks = [(key, memoryview(block_bytes(key, nbytes))) for key in keys]
            counts["saved"] += ns.save(blocks, parent=None, deadline=deadline_in(60))
        else:
            with ns.load(keys, deadline=deadline_in(60)) as lease:
                right = all(
                    bytes(lease.view(n)) == block_bytes(key, nbytes) for n, key in enumerate(lease.keys)
                )
                lease.check()
                assert right, "wrong bytes"
                counts["loaded"] += len(lease)
    except LeaseExpiredError:
        counts["expired"] += 1
    except (CapacityError, UnavailableError):
        counts["refused"] += 1
        time.sleep(0.01)
client.close()
print(json.dumps(counts), flush=True)
"""
)
# The same; tells of each answer from the daemon, at most one in 20 ms, as the time when it came.
HEALING = MIXED.replace(
    "    except LeaseExpiredError:",
    """        if not client.away and now - counts.get("told", 0.0) > 0.02:
            if ns.lookup(keys[:1]) is not None and client.stats().entries and not client.away:
                counts["told"] = now
                print(time.monotonic(), flush=True)
    except LeaseExpiredError:""",
)
# Saves 32 MiB at a time that are new, loads them and takes every byte out.
BULK = (
    START
    + """
ns = client.namespace(small_spec("bulk", pages=256))
data, place = memoryview(rng.randbytes(ns.block_nbytes)), bytearray(ns.block_nbytes)
moved, until = 0, time.monotonic() + seconds
while time.monotonic() < until:
    keys = ns.keys([rng.randrange(2**32) for _ in range(32 * ns.spec.block_tokens)])
    moved += ns.save([(key, data) for key in keys], parent=None, deadline=deadline_in(60)) * len(data)
    with ns.load(keys, deadline=deadline_in(60)) as lease:
        for index in range(len(lease)):
            place[:] = lease.view(index)
            moved += len(place)
client.close()
print(json.dumps(moved), flush=True)
"""
)
# Open loop: a lookup is due every 20 ms, and late ones count from when they were due.
LOOKUPS = (
    START
    + """
keys = ns.keys([1] * 64 * ns.spec.block_tokens)
found, due = [], time.monotonic() + rng.random() * 0.02
for _ in range(int(50 * seconds)):
    time.sleep(max(0.0, due - time.monotonic()))
    assert ns.lookup(keys).prefix == 64
    found.append(time.monotonic() - due)
    due += 0.02
client.close()
print(json.dumps(found), flush=True)
"""
)


def serve(folder: Path, *more: str) -> Command:
    words = ("--socket", f"{folder}/d.sock", "--capacity", str(CAPACITY), "--http", "none")
    return Command("serve", *words, *(() if "--listen" in more else ("--set", "daemon.listen=none")), *more)


@contextmanager
def crowd(
    program: str, url: str, count: int, seconds: float, chains: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that have begun; killed at the end."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, url, str(seed), str(seconds), str(chains)],
            stdout=subprocess.PIPE, text=True,
        )
        for seed in range(count)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            # unbuffered: what a buffer has taken of the rest, communicate() does not give
            with open(process.stdout.fileno(), "rb", buffering=0, closefd=False) as said:
                assert said.readline() == b"ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


def results(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[str]:
    """What each says at its end, which it comes to."""
    found = []
    for process in processes:
        text, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, process.returncode
        found.append(text)
    return found


def open_files(pid: int) -> int:
    """Descriptors without those of the arena's segments, which stay."""
    count = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += "/memfd:kvferry-" not in str(path.readlink())
    return count


def own_nbytes(pid: int) -> int:
    """Resident memory without shared pages: those are blocks'."""
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return (int(fields[1]) - int(fields[2])) * 4096


SOAK = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("way", "clients", "seconds"),
    [
        ("shared", 3, 1.0),
        pytest.param("shared", 64, 300.0, marks=SOAK),
        pytest.param("copy", 16, 60.0, marks=SOAK),
        pytest.param("tcp", 16, 60.0, marks=SOAK),
    ],
)
def test_many_clients_get_right_bytes_and_leave_nothing(
    tmp_path: Path, way: str, clients: int, seconds: float
) -> None:
    chains = 2 * CAPACITY // (8 * SPEC.block_nbytes)
    words: dict[str, tuple[str, ...]] = {
        "shared": (),
        "copy": ("--set", "daemon.arena=copy"),
        "tcp": ("--socket", "none", "--listen", "tcp://127.0.0.1:0"),
    }
    with serve(tmp_path, "--disk", "none", *words[way]) as daemon:
        url = daemon.wait_ready()["listen"]
        pid = daemon.process.pid
        with Client(url) as client:
            ns = client.namespace(SPEC)
            save_blocks(ns, ns.keys([0] * 2 * SPEC.block_tokens))
            files, memory = open_files(pid), own_nbytes(pid)
            with crowd(MIXED, url, clients, seconds, chains) as processes:
                counts = [json.loads(text) for text in results(processes, seconds + 120)]
            total = {name: sum(count[name] for count in counts) for name in counts[0]}
            print(total)
            assert min(total["saved"], total["loaded"], total["looked"]) > 0
            wait_until(lambda: client.stats().leases == 0, 20)
            stats = client.stats()
            assert stats.pinned_nbytes == stats.quarantined_nbytes == 0
            wait_until(lambda: open_files(pid) <= files + 2, 20)  # a connection more of this client
            grown = own_nbytes(pid) - memory
            print(f"its own memory has grown by {grown / 2**20:.1f} MiB")
            assert grown < 32 << 20
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.err


@pytest.mark.parametrize(("clients", "seconds"), [(1, 0.5), pytest.param(16, 20.0, marks=pytest.mark.soak)])
def test_lookups_are_answered_soon(tmp_path: Path, clients: int, seconds: float) -> None:
    """At full scale, on a machine that does nothing else: p99 5 ms, and 20 ms beside two that move bulk."""
    with serve(tmp_path, "--disk", "none", "--capacity", "256MiB") as daemon:
        url = daemon.wait_ready()["listen"]
        with Client(url) as client:
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * 64 * SPEC.block_tokens)
            save_blocks(ns, keys)
            assert ns.pin(keys, ttl=600) == 64
        for movers, most in ((0, 0.005), (min(2, clients), 0.020)):
            with (
                crowd(BULK, url, movers, seconds, 1) as moving,
                crowd(LOOKUPS, url, clients, seconds, 1) as asking,
            ):
                waits = sorted(w for text in results(asking, seconds + 60) for w in json.loads(text))
                moved = sum(json.loads(text) for text in results(moving, seconds + 60))
            p99 = waits[int(0.99 * len(waits))]
            print(f"{len(waits)} lookups of 64 keys beside {movers} that move bulk: p99 {1e3 * p99:.2f} ms")
            print(f"moved {moved / 1e9 / seconds:.2f} GB/s")
            assert moved >= movers * seconds * 64e6
            assert len(waits) == clients * int(50 * seconds)
            assert p99 < most or clients < 16
        assert daemon.terminate() == 0


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_twenty_kills_under_load(tmp_path: Path, way: str) -> None:
    """All clients heal within two seconds of its return; disk hits; no wrong byte; the old memory goes."""
    disk = ["--disk", f"{tmp_path}/disk", "--disk-capacity", "256MiB"]
    chance = random.Random(20)
    daemon = serve(tmp_path, *disk, *(("--listen", "tcp://127.0.0.1:0") if way == "tcp" else ()))
    try:
        url = daemon.wait_ready()["listen"].split()[-1]
        if way == "tcp":
            disk += ["--listen", url]
        with Client(url) as client, crowd(HEALING, url, 4, 600, 64) as processes:
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * 8 * SPEC.block_tokens)
            save_blocks(ns, keys)
            assert client.flush(deadline=deadline_in(20))
            for _ in range(20):
                time.sleep(chance.random())  # how far the load has come differs
                daemon.kill()
                assert ns.lookup(keys).prefix == 0
                daemon = serve(tmp_path, *disk)
                daemon.wait_ready()
                back = time.monotonic()
                wait_until(lambda: ns.lookup(keys).prefix == 8, 10)
                assert time.monotonic() - back < HEAL_S
                healed = [answered_after(process, back) - back for process in processes]
                print(f"the loaded clients were away for at most {max(healed):.2f} s more")
                assert max(healed) < HEAL_S
                with ns.load(keys, deadline=deadline_in(60)) as lease:
                    assert len(lease) == 8
            assert all(process.poll() is None for process in processes), "a client saw wrong bytes, or ended"
            assert client.counters.restarts == 20
            wait_until(lambda: len(mapped(os.getpid(), ns)) <= 2, 60)
            for process in processes:
                wait_until(lambda pid=process.pid: len(segments(pid)) <= 2, 60)  # type: ignore[misc]
    finally:
        daemon.kill()


def mapped(pid: int, ns: Namespace) -> set[str]:
    """Segments that a process has mapped, by inode, while it holds no lease."""
    with ns.load(ns.keys([1] * SPEC.block_tokens), deadline=deadline_in(20)):
        pass
    return segments(pid)


def answered_after(process: subprocess.Popen[str], moment: float) -> float:
    """When a client says that it was first answered after ``moment``, on the clock of the machine."""
    assert process.stdout is not None
    while True:
        line = process.stdout.readline()
        assert line, "a client saw wrong bytes, or ended"
        if (answered := float(line)) > moment:
            return answered


def segments(pid: int) -> set[str]:
    """Segments that a process has mapped, by inode."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[4] for line in lines if "kvferry-segment" in line}
