"""A running daemon whose remote stores stop, hang, fill up, refuse it, are slow or cut off.

It goes on, says so once, and heals; no request outlives its deadline.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from kvferry.client import Client, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError
from kvferry.core.keys import BlockKey
from kvferry.store.remote.redis.resp import ReplyError
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.testing.fake_s3 import FakeS3
from kvferry.testing.fault_link import Faults
from kvferry.testing.fault_proxy import FaultProxy
from kvferry.testing.processes import Command
from kvferry.testing.redis_server import RedisServer
from kvferry.testing.s3_server import S3Server

SPEC = small_spec("daemon-remote", pages=16)
CAPACITY = 1 << 20
CHAIN = 4
SLOTS = CAPACITY // SPEC.block_nbytes
CALL_S = 0.3  # what callers give under a fault; a store that hangs would take until the tier's timeout
MOST_S = 20.0  # what a busy machine may add
TIMEOUT_S = 300
HEAL_S = 60.0
WORK = ("requests", "reads", "writes")
FULL = "no memory left for writes"
ONCE = (*(f"no {work} for" for work in WORK), "going on without it", "the daemon is away, nothing is found")

Act = Callable[[], object]


class Fault(NamedTuple):
    """What a store does.

    Attributes:
        name: For messages.
        begin: Makes it so.
        end: Makes it well again.
        said: In the daemon's line about it.
        forgets: Whether the store forgets what it had.
    """

    name: str
    begin: Act
    end: Act
    said: str = "no requests for"
    forgets: bool = False


class Said:
    """The lines of a daemon about its tiers."""

    def __init__(self, daemon: Command) -> None:
        self._daemon = daemon

    def __str__(self) -> str:
        return self._daemon.err

    def count(self, text: str) -> int:
        return sum(text in line for line in self._daemon.err.splitlines())

    def all_work(self) -> bool:
        return all(self.count(f"no {work} for") == self.count(f"{work} work again") for work in WORK)

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``; a failure shows what the daemon said."""
        try:
            wait_until(condition, HEAL_S)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}\n{self}") from error


@contextmanager
def serving(folder: Path, kind: str, **options: object) -> Iterator[tuple[Said, Client]]:
    """A daemon with a tier that is written through and tried again soon, and a client of it."""
    given = {
        "kind": kind, "write": "write_through", "pause": "0.05s", "timeout": f"{TIMEOUT_S}s",
        "read_timeout": f"{TIMEOUT_S}s", "write_timeout": "1s", "lookup_timeout": f"{CALL_S}s", **options,
    }  # fmt: skip
    config = folder / "kvferry.toml"
    config.write_text(
        "[[store.tiers]]\n" + "".join(f"{name} = {text(value)}\n" for name, value in given.items())
    )
    words = ("--config", str(config), "--socket", f"{folder}/d.sock", "--capacity", str(CAPACITY))
    with Command("serve", *words, "--set", "daemon.listen=none", "--http", "none") as daemon:
        url = daemon.wait_ready()["listen"]
        with Client(url, ClientOptions(call_timeout_s=60)) as client:
            yield Said(daemon), client
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.err


def text(value: object) -> str:
    return json.dumps(value)  # as TOML writes strings, lists, numbers and truth, too


class Blocks:
    """Chains of one namespace; more of them than memory holds, so that the first lie in the store alone."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.ns = client.namespace(SPEC)
        self._next = 0

    def chain(self) -> list[BlockKey]:
        self._next += 1
        return self.ns.keys([self._next] * CHAIN * SPEC.block_tokens)

    def saves(self, keys: Sequence[BlockKey]) -> bool:
        began = time.monotonic()
        try:
            save_blocks(self.ns, keys, seconds=CALL_S)
        except CapacityError:  # what was to be evicted is on its way to the store
            return False
        finally:
            assert time.monotonic() - began < CALL_S + MOST_S
        return True

    def saved(self) -> list[BlockKey]:
        keys = self.chain()
        wait_until(lambda: self.saves(keys), HEAL_S)
        return keys

    def push_out(self) -> list[BlockKey]:
        """Fill memory with others; the last of them."""
        last: list[BlockKey] = []
        for _ in range(SLOTS // CHAIN + 2):
            last = self.saved()
            self.client.flush(deadline=deadline_in(HEAL_S))
        return last

    def loaded(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """Blocks that come, all of them right, by the deadline."""
        began = time.monotonic()
        with self.ns.load(keys, deadline=deadline_in(seconds)) as lease:
            assert time.monotonic() - began < seconds + MOST_S
            for n, key in enumerate(lease.keys):
                assert lease.view(n) == block_bytes(key, SPEC.block_nbytes)
            return len(lease)

    def parted(self, said: Said) -> tuple[list[BlockKey], list[BlockKey]]:
        """A chain that lies in the store, all but its first block there alone, and one in memory."""
        while True:  # a busy machine may cost one its way there
            below, here = self.saved(), self.push_out()
            if self.loaded(below[:1], HEAL_S) and self.ns.lookup(below).prefix == CHAIN:
                return below, here
            said.until("a chain comes back", self.comes_back)

    def comes_back(self) -> bool:
        """Whether a chain goes to the store and comes from there."""
        keys = self.saved()
        self.client.flush(deadline=deadline_in(HEAL_S))
        self.push_out()
        return self.loaded(keys, HEAL_S) == CHAIN


def pass_through(said: Said, blocks: Blocks, fault: Fault) -> None:
    """One fault, from before it begins to after it has ended."""
    if fault.said == FULL:  # it is over when writes were taken for a while
        said.until("it is not full", lambda: blocks.comes_back() and said.count(FULL) % 2 == 0)
    below, here = blocks.parted(said)
    said.until("all works", said.all_work)
    begun, before = said.count(fault.said), {what: said.count(what) for what in ONCE}
    fault.begin()
    try:
        for _ in range(2):
            began = time.monotonic()
            blocks.ns.lookup(below)
            assert time.monotonic() - began < MOST_S, fault.name
            blocks.loaded(below, CALL_S)
            blocks.saves(blocks.chain())
            assert blocks.loaded(here, HEAL_S) == CHAIN, f"{fault.name}: memory does not answer"
        said.until(fault.said, lambda: blocks.ns.lookup(below).prefix >= 0 and said.count(fault.said) > begun)
        began = time.monotonic()
        blocks.client.flush(deadline=deadline_in(CALL_S))
        assert time.monotonic() - began < CALL_S + MOST_S, fault.name
        for what, count in before.items():
            assert said.count(what) <= count + 1, f"{fault.name}: {what!r} was said again\n{said}"
    finally:
        fault.end()
    if not fault.forgets:
        said.until(f"what it had comes after {fault.name}", lambda: blocks.loaded(below, HEAL_S) == CHAIN)
    said.until(f"a chain comes back after {fault.name}", blocks.comes_back)


def pass_all(said: Said, client: Client, faults: Sequence[Fault], rounds: int) -> None:
    blocks, chance = Blocks(client), random.Random(rounds)
    for _ in range(rounds):
        for fault in chance.sample(faults, len(faults)):
            pass_through(said, blocks, fault)
    assert client.counters.restarts == 0


ROUNDS = pytest.mark.parametrize(
    "rounds", [1, pytest.param(12, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])]
)


@ROUNDS
def test_a_valkey_that_stops_hangs_fills_up_or_refuses(tmp_path: Path, rounds: int) -> None:
    secret = tmp_path / "password"
    secret.write_text("right\n")
    with RedisServer() as server, ExitStack() as hanging:

        def users(password: str) -> None:
            server.call("ACL", "SETUSER", "kv", "reset", "on", f">{password}", "~*", "+@all")
            with suppress(ReplyError):  # none is there
                server.call("CLIENT", "KILL", "USER", "kv")

        def start() -> None:
            server.start()
            users("right")

        def fill() -> None:
            server.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
            server.call("CONFIG", "SET", "maxmemory", "1")

        users("right")
        faults = (
            Fault("stopped", server.kill, start, forgets=True),
            Fault("hung", lambda: hanging.enter_context(server.hanging()), hanging.close),
            Fault("full", fill, lambda: server.call("CONFIG", "SET", "maxmemory", "0"), FULL),
            Fault("wrong password", lambda: users("other"), lambda: users("right"), "refused the password"),
        )
        options = {"urls": [server.url], "username": "kv", "password_file": str(secret)}
        with serving(tmp_path, "redis", server_pause="0.05s", **options) as (said, client):
            pass_all(said, client, faults, rounds)


def s3(store: FakeS3 | S3Server, **options: object) -> dict[str, object]:
    given = {"access_key_id": "kvferry-test", "secret_access_key": "of-the-tests", "endpoint": store.endpoint}
    return {**given, "bucket": store.bucket, "retries": 1, "server_pause": "0.05s", **options}


@ROUNDS
def test_an_s3_that_refuses_is_overloaded_or_slow(tmp_path: Path, rounds: int) -> None:
    with FakeS3() as store:

        def answer(status: int) -> Act:
            return lambda: setattr(store, "always", status)

        faults = (
            Fault("403", answer(403), answer(0), "403"),
            Fault("503", answer(503), answer(0), "503"),
            Fault("slow", store.gate.clear, store.gate.set),
        )
        with serving(tmp_path, "s3", **s3(store)) as (said, client):
            pass_all(said, client, faults, rounds)


def link_faults(proxy: FaultProxy, said: str) -> tuple[Fault, ...]:
    """Of a link, whatever is at its other end."""

    def make(faults: Faults) -> Act:
        return lambda: setattr(proxy, "faults", faults)

    bad = {"cut": Faults(link="cut"), "reset": Faults(link="reset"), "half open": Faults(link="half_open")}
    return tuple(Fault(name, make(faults), make(Faults()), said) for name, faults in bad.items())


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_seaweedfs_behind_a_bad_link(tmp_path: Path) -> None:
    with S3Server() as store, FaultProxy(store.endpoint.replace("http", "tcp")) as proxy:
        endpoint = proxy.address.replace("tcp", "http")
        with serving(tmp_path, "s3", **s3(store, endpoint=endpoint)) as (said, client):
            pass_all(said, client, link_faults(proxy, "no requests for"), 6)


@ROUNDS
def test_a_peer_behind_a_bad_link(tmp_path: Path, rounds: int) -> None:
    words = ("--socket", "none", "--listen", "tcp://127.0.0.1:0", "--capacity", "64MiB", "--disk", "none")
    with Command("serve", *words, "--http", "none") as peer, ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy(peer.wait_ready()["listen"]))
        options = {"peers": [proxy.address], "timeout": f"{CALL_S}s"}
        with serving(tmp_path, "peer", **options) as (said, client):
            faults = link_faults(proxy, "is away")
            pass_all(said, client, faults if rounds > 1 else faults[:1], rounds)
