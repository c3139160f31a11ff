"""Real daemons and real clients that are killed, stopped and restarted."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from kvferry.client import Client, ClientOptions
from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, LeaseExpiredError, UnavailableError
from kvferry.core.keys import BlockKey
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, stop_process, wait_until
from kvferry.testing.blockstore_common import no_room
from kvferry.testing.processes import Command

SPEC = small_spec("daemon-faults")
BLOCKS = (1 << 20) // SPEC.block_nbytes
SOON_S = 20.0  # of what takes a moment, on a machine that does much else; 2 s where it does nothing else
LEASE_S = 1.0

CLIENT = """
import sys
from kvferry.client import Client
from kvferry.core.clock import deadline_in
from kvferry.core.errors import LeaseExpiredError
from kvferry.testing.blocks import block_bytes, small_spec
ns = Client(sys.argv[1]).namespace(small_spec("daemon-faults"))
keys = ns.keys([7] * 3 * ns.spec.block_tokens)
"""
FILLER = (
    CLIENT
    + """
lease = ns.reserve(keys, parent=None, deadline=deadline_in(20))
views = [lease.view(index) for index in range(3)]
print("busy", flush=True)
while True:
    for view in views:
        view[:] = b"\\xee" * len(view)
"""
)
READER = (
    CLIENT
    + """
lease = ns.load(keys, deadline=deadline_in(20))
assert len(lease) == 3
views = [lease.view(index) for index in range(3)]
print("busy", flush=True)
wrong = 0
while True:
    right = all(view == block_bytes(key, len(view)) for key, view in zip(keys, views))
    try:
        lease.check()
    except LeaseExpiredError:
        print("expired", wrong, flush=True)
        break
    wrong += not right
"""
)


def serve(folder: Path, *more: str) -> Command:
    return Command(
        "serve",
        "--socket",
        f"{folder}/d.sock",
        "--capacity",
        "1MiB",
        "--set",
        "daemon.listen=none",
        *(() if "--http" in more else ("--http", "none")),
        *more,
    )


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Command]:
    with serve(tmp_path, "--disk", "none", "--set", f"store.lease={LEASE_S}s") as command:
        command.wait_ready()
        yield command


def loaded(ns: Namespace, keys: list[BlockKey]) -> int:
    with ns.load(keys, deadline=deadline_in(20)) as lease:
        for index, key in enumerate(lease.keys):
            assert lease.view(index) == block_bytes(key, SPEC.block_nbytes)
        return len(lease)


def child(program: str, folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, f"unix://{folder}/d.sock"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    return process


@pytest.mark.parametrize("soon_s", [SOON_S, pytest.param(2.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("url", ["unix", "tcp"])
def test_a_killed_daemon_is_missed_and_found_again(tmp_path: Path, url: str, soon_s: float) -> None:
    """C061: nothing of before is valid, what is on disk hits again, all soon after its return."""
    disk = ("--disk", f"{tmp_path}/disk", "--disk-capacity", "64MiB")
    port = ("--listen", "tcp://127.0.0.1:0") if url == "tcp" else ()
    with serve(tmp_path, *disk, *port) as first:
        addresses = first.wait_ready()["listen"].split()
        with Client(addresses[-1]) as client:
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * 3 * SPEC.block_tokens)
            save_blocks(ns, keys)
            assert client.flush(deadline=deadline_in(60))
            read = ns.load(keys, deadline=deadline_in(20))
            write = ns.reserve(ns.keys([2] * SPEC.block_tokens), parent=None, deadline=deadline_in(20))
            first.kill()
            started = time.monotonic()
            assert ns.lookup(keys).prefix == 0
            assert len(ns.load(keys, deadline=deadline_in(60))) == 0
            with pytest.raises(UnavailableError):
                save_blocks(ns, keys, seconds=60)
            assert time.monotonic() - started < soon_s, "waited for a daemon that is away"
            assert client.counters.refused_blocks == 3
            listen = ("--listen", addresses[-1]) if url == "tcp" else ()
            with serve(tmp_path, *disk, *listen) as second:
                second.wait_ready()
                wait_until(lambda: ns.lookup(keys).prefix == 3, soon_s)
                assert loaded(ns, keys) == 3
                for call in (write.commit, read.renew):
                    with pytest.raises(LeaseExpiredError):
                        call()
                write.abort()
                assert ns.lookup(write.keys).prefix == 0
                read.release()
                wait_until(lambda: client.stats().leases == 0)
                assert (client.counters.restarts, client.counters.reconnects) == (1, 1)


def test_slots_of_a_stopped_client_are_not_used_again(tmp_path: Path, daemon: Command) -> None:
    """Past its lease it may still write; only the end of its process gives the slots back."""
    process = child(FILLER, tmp_path)
    try:
        stop_process(process.pid)
        with Client(f"unix://{tmp_path}/d.sock") as client:
            ns = client.namespace(SPEC)
            wait_until(lambda: client.stats().quarantined_nbytes == 3 * SPEC.block_nbytes)
            keys = ns.keys([1] * (BLOCKS - 3) * SPEC.block_tokens)
            assert save_blocks(ns, keys) == BLOCKS - 3
            no_room(ns, ns.keys([2] * (BLOCKS - 2) * SPEC.block_tokens))
            process.send_signal(signal.SIGCONT)  # and it writes on
            for _ in range(5):
                assert loaded(ns, keys) == BLOCKS - 3
            process.kill()
            process.wait()
            wait_until(lambda: client.stats().quarantined_nbytes == 0)
            assert save_blocks(ns, ns.keys([3] * BLOCKS * SPEC.block_tokens)) == BLOCKS
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_stopped_reader_takes_no_wrong_byte(tmp_path: Path, daemon: Command) -> None:
    """Stopped past its lease, its slots are used for other blocks; its check tells."""
    with Client(f"unix://{tmp_path}/d.sock") as client:
        ns = client.namespace(SPEC)
        save_blocks(ns, ns.keys([7] * 3 * SPEC.block_tokens))
        process = child(READER, tmp_path)
        try:
            stop_process(process.pid)
            assert save_blocks(ns, ns.keys([8] * BLOCKS * SPEC.block_tokens), seconds=60) == BLOCKS
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            assert process.stdout.readline() == "expired 0\n"
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_hung_daemon_costs_no_more_than_the_deadline(tmp_path: Path, daemon: Command) -> None:
    with Client(f"unix://{tmp_path}/d.sock", ClientOptions(call_timeout_s=0.3)) as client:
        ns = client.namespace(SPEC)
        keys = ns.keys([1] * SPEC.block_tokens)
        save_blocks(ns, keys)
        stop_process(daemon.process.pid)
        try:
            for _ in range(3):
                started = time.monotonic()
                assert len(ns.load(keys, deadline=deadline_in(0.3))) == 0
                assert ns.lookup(keys).prefix == 0
                assert time.monotonic() - started < SOON_S
            assert client.away
            started = time.monotonic()
            with pytest.raises(UnavailableError):
                save_blocks(ns, keys, seconds=60)
            assert time.monotonic() - started < 5, "waited, though the daemon is known to be away"
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        wait_until(lambda: ns.lookup(keys).prefix == 1, SOON_S)
        assert loaded(ns, keys) == 1
        wait_until(lambda: client.stats().leases == 0)
        assert client.counters.restarts == 0


@pytest.mark.soak
@pytest.mark.parametrize("url", ["unix", "tcp"])
def test_no_call_outlives_its_deadline_at_a_hung_daemon(tmp_path: Path, url: str) -> None:
    """On a machine that does nothing else: each verb is over 0.2 s after its deadline, the very first too."""
    port = ("--listen", "tcp://127.0.0.1:0") if url == "tcp" else ()
    options = ClientOptions(call_timeout_s=0.3, first_pause_s=0.01, last_pause_s=0.01)
    took: dict[str, float] = {}
    numbers = itertools.count(2)
    with serve(tmp_path, "--disk", "none", *port) as daemon:
        address = daemon.wait_ready()["listen"].split()[-1]
        for verb in ("lookup", "load", "save", "reserve"):
            for _ in range(3):
                with Client(address, options) as client:
                    ns = client.namespace(SPEC)
                    keys = ns.keys([1] * SPEC.block_tokens)
                    save_blocks(ns, keys)
                    new = ns.keys([next(numbers)] * SPEC.block_tokens)
                    calls: dict[str, Callable[[], object]] = {
                        "lookup": partial(ns.lookup, keys),
                        "load": lambda: ns.load(keys, deadline=deadline_in(0.3)),  # noqa: B023 - called here
                        "save": partial(save_blocks, ns, new, seconds=0.3),
                        "reserve": lambda: ns.reserve(new, parent=None, deadline=deadline_in(0.3)),  # noqa: B023
                    }
                    stop_process(daemon.process.pid)
                    try:
                        for _ in range(4):  # when it is known to be away, and is tried again, too
                            started = time.monotonic()
                            with suppress(CapacityError):
                                calls[verb]()
                            took[verb] = max(took.get(verb, 0.0), time.monotonic() - started)
                            time.sleep(0.02)
                    finally:
                        daemon.process.send_signal(signal.SIGCONT)
    print({verb: round(seconds, 3) for verb, seconds in took.items()})
    assert max(took.values()) < 0.3 + 0.2


def own_nbytes(pid: int) -> int:
    """Resident memory without shared pages: those are blocks'."""
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return (int(fields[1]) - int(fields[2])) * 4096


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_a_killed_client_leaves_nothing(tmp_path: Path, kills: int) -> None:
    """C048: sessions, leases and slots go with the process; status and memory are as before."""
    words = ("--disk", "none", "--set", f"store.lease={LEASE_S}s", "--http", "http://127.0.0.1:0")
    with serve(tmp_path, *words) as daemon, Client(f"unix://{tmp_path}/d.sock") as client:
        http = daemon.wait_ready()["http"]
        ns = client.namespace(SPEC)
        before = 0
        for kill in range(kills):
            if kill % 2:
                save_blocks(ns, ns.keys([7] * 3 * SPEC.block_tokens))
            process = child(READER if kill % 2 else FILLER, tmp_path)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            wait_until(lambda: client.stats().leases == 0)
            wait_until(lambda: client.stats().quarantined_nbytes == client.stats().pinned_nbytes == 0)
            if kill % 2:
                assert ns.remove(ns.keys([7] * 3 * SPEC.block_tokens)) == 3
            if kill == 1:  # each kind has been seen
                before = own_nbytes(daemon.process.pid)
        wait_until(lambda: clients_in(http) == [client.session])
        assert own_nbytes(daemon.process.pid) - before < 4 << 20


def clients_in(http: str) -> list[str]:
    """Sessions of the clients that the status names."""
    with urllib.request.urlopen(f"{http}/status", timeout=20) as answer:
        return [one["session"] for one in json.load(answer)["clients"]]
