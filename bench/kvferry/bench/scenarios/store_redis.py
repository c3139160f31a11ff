"""``redis.set`` and ``redis.get``: the redis tier beside a client library and a bare socket, same server.

``redis.set.raw`` and ``redis.get.raw`` are of the same runs: the bare socket beside the library, which says
how much faster than that a client is that does nothing but send.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvferry.bench.blocks import BlockSource, block_spec, chain_tokens
from kvferry.bench.ceilings import ColdWalk
from kvferry.bench.own_cpu import cpu_pair, on_cpu, staying_on
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, summarise
from kvferry.bench.scenarios.store import StoreOptions
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError, PluginUnavailableError
from kvferry.core.keys import BlockKey, block_keys
from kvferry.store.remote.redis import RedisOptions, RedisTier
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, TierNamespace, WriteOutcome
from kvferry.testing.redis_server import RedisServer
from kvferry.transports.ip import tune

__all__ = ["run_get", "run_set"]

_WAIT_S = 60.0
_RUNS_A_WALK = 4
_BATCH = 32
_BATCH_NBYTES = 32 << 20
_REPLY = b"+OK\r\n"


class _BareSocket:
    """SET and GET with nothing around them: the commands of a batch are sent, then its replies are taken."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _WAIT_S)
        tune(self._socket)  # as a connection's
        self._socket.settimeout(None)
        self._small = memoryview(bytearray(64))

    def set(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(view))
            self._send([memoryview(head), view, memoryview(b"\r\n")])
        for _ in names:
            self._take(self._small[: len(_REPLY)])
            if self._small[: len(_REPLY)] != _REPLY:
                raise KVFerryError(f"a bare SET was answered by {bytes(self._small[:32])!r}")

    def get(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        commands = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names]
        self._send([memoryview(b"".join(commands))])
        for view in views:
            self._take(self._small[: len(b"$%d\r\n" % len(view))])
            self._take(view)
            self._take(self._small[:2])

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def _take(self, view: memoryview) -> None:
        if self._socket.recv_into(view, len(view), socket.MSG_WAITALL) != len(view):
            raise KVFerryError("the server ended the connection of the baseline")

    def close(self) -> None:
        self._socket.close()


class _Place:
    """A server of our own, the tier, the two baselines, and blocks that walk through memory."""

    def __init__(
        self, server: RedisServer, nbytes: int, batch: int, options: StoreOptions, *, pinned: bool
    ) -> None:
        self.nbytes, self.batch, self.pinned = nbytes, batch, pinned
        self.calls = max(1, options.walk_nbytes // _RUNS_A_WALK // (nbytes * batch))
        self.count = self.calls * batch
        self.walk = max(self.count, options.walk_nbytes // nbytes)
        self.source = BlockSource(nbytes, options.walk_nbytes)
        self.into = ColdWalk(nbytes, max(options.walk_nbytes, self.count * nbytes), fill=0)
        self.space = TierNamespace.of("bench", block_spec(nbytes))
        self.tier = RedisTier("redis", RedisOptions(urls=(server.url,), timeout_s=_WAIT_S))
        self.tier.open(self.space)
        self.bare = _BareSocket(server.port)
        self.client = _client(server.port)
        self.server = server
        self.turn = 0

    def numbers(self) -> list[list[int]]:
        """The blocks of one run, call by call."""
        first = self.turn * self.count % self.walk
        self.turn += 1
        return [[first + c * self.batch + n for n in range(self.batch)] for c in range(self.calls)]

    def keys(self, first: int) -> list[BlockKey]:
        return block_keys(
            self.space.namespace_id, chain_tokens(first, self.batch), self.space.spec.block_tokens
        )

    def names(self, kind: bytes, numbers: Sequence[int]) -> list[bytes]:
        return [b"%b-%064d" % (kind, number) for number in numbers]

    def timed(self, calls: Sequence[Callable[[], object]]) -> Sample:
        latencies: list[float] = []
        cpu = time.process_time()
        for call in calls:
            start = time.perf_counter()
            call()
            latencies.append(time.perf_counter() - start)
        seconds = sum(latencies)
        return Sample(seconds, self.count * self.nbytes, time.process_time() - cpu, tuple(latencies))

    # -- set -------------------------------------------------------------------------------------------

    def _remove_all(self) -> None:
        """By the time that it returns: else the server still frees memory while it is measured."""
        self.server.call("FLUSHALL", "SYNC")

    def tier_set(self) -> Sample:
        """New blocks in place of those there, which are removed first, untimed, as are those of others."""
        self._remove_all()
        self.last = self.numbers()
        writes = [
            [BlockWrite(k, self.source[n], None, -1) for k, n in zip(self.keys(call[0]), call, strict=True)]
            for call in self.last
        ]
        return self.timed([lambda w=w: self._write(w) for w in writes])  # type: ignore[misc]

    def _write(self, writes: list[BlockWrite]) -> None:
        for result in self.tier.write(self.space, writes, deadline=deadline_in(_WAIT_S)):
            if result.outcome is not WriteOutcome.STORED:
                raise KVFerryError(f"a block was not written: {result.outcome.value} {result.reason}")

    def bare_set(self) -> Sample:
        self._remove_all()
        calls = [(self.names(b"bare", c), [self.source[n] for n in c]) for c in self.numbers()]
        return self.timed([lambda c=c: self.bare.set(*c) for c in calls])  # type: ignore[misc]

    def client_set(self) -> Sample:
        self._remove_all()
        calls = [(self.names(b"client", c), [self.source[n] for n in c]) for c in self.numbers()]
        return self.timed([lambda c=c: self._client_set(*c) for c in calls])  # type: ignore[misc]

    def _client_set(self, names: list[bytes], views: list[memoryview]) -> None:
        if len(names) == 1:
            self.client.set(names[0], views[0])
            return
        pipeline = self.client.pipeline(transaction=False)
        for name, view in zip(names, views, strict=True):
            pipeline.set(name, view)
        pipeline.execute()

    # -- get -------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """What the runs read: as much as one of them, under the names of each side."""
        self.tier_set()
        self.stored = self.last
        for call in self.stored:
            views = [self.source[n] for n in call]
            self.bare.set(self.names(b"bare", call), views)
            self.bare.set(self.names(b"client", call), views)

    def _views(self) -> list[list[memoryview]]:
        return [[self.into.take() for _ in call] for call in self.stored]

    def tier_get(self) -> Sample:
        self.views = self._views()
        reads = [
            [BlockRead(k, v) for k, v in zip(self.keys(call[0]), views, strict=True)]
            for call, views in zip(self.stored, self.views, strict=True)
        ]
        return self.timed([lambda r=r: self._read(r) for r in reads])  # type: ignore[misc]

    def _read(self, reads: list[BlockRead]) -> None:
        for result in self.tier.read_into(self.space, reads, deadline=deadline_in(_WAIT_S)):
            if result.outcome is not ReadOutcome.HIT:
                raise KVFerryError(f"a block was not read: {result.outcome.value} {result.reason}")

    def bare_get(self) -> Sample:
        calls = [(self.names(b"bare", c), v) for c, v in zip(self.stored, self._views(), strict=True)]
        return self.timed([lambda c=c: self.bare.get(*c) for c in calls])  # type: ignore[misc]

    def client_get(self) -> Sample:
        calls = [self.names(b"client", call) for call in self.stored]
        return self.timed([lambda c=c: self._client_get(c) for c in calls])  # type: ignore[misc]

    def _client_get(self, names: list[bytes]) -> None:
        if len(names) == 1:
            self.client.get(names[0])
            return
        pipeline = self.client.pipeline(transaction=False)
        for name in names:
            pipeline.get(name)
        pipeline.execute()

    def is_right(self, calls: Sequence[Sequence[int]], views: Sequence[Sequence[memoryview]]) -> bool:
        """Whether ``views`` hold the blocks, byte for byte."""
        return all(
            self.source.matches(number, view)
            for call, own in zip(calls, views, strict=True)
            for number, view in zip(call, own, strict=True)
        )

    def params(self, options: StoreOptions) -> dict[str, Param]:
        facts = next(iter(self.tier.usage().status.values()), "unknown")
        return {
            "nbytes": self.nbytes,
            "batch": self.batch,
            "threads": 1,
            "checksum": "xxh3; none in the baselines",
            "server": facts.split(",")[0],
            "walk_nbytes": options.walk_nbytes,
            "cpus": os.cpu_count() or 1,
            "pinned": self.pinned,
        }

    def close(self) -> None:
        self.tier.close()
        self.bare.close()
        self.client.close()


def _client(port: int) -> Any:  # noqa: ANN401  its types are not needed
    try:
        module = importlib.import_module("redis")
    except ImportError as error:
        raise PluginUnavailableError("the baseline redis_py needs it: pip install redis hiredis") from error
    return module.Redis(host="127.0.0.1", port=port)


def run_set(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Blocks from memory to the server."""
    yield from _run("redis.set", options, progress)


def run_get(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Blocks from the server to memory."""
    yield from _run("redis.get", options, progress)


def _run(scenario: str, options: StoreOptions, progress: Progress) -> Iterator[Result]:
    here, there = cpu_pair()
    with contextlib.ExitStack() as stack:
        with staying_on(there):
            server = stack.enter_context(RedisServer())
        for nbytes in options.sizes:
            for batch in sorted({1, max(1, min(_BATCH, _BATCH_NBYTES // nbytes))}):
                place = _Place(server, nbytes, batch, options, pinned=here is not None)
                try:
                    yield from _measure(scenario, place, options, here, progress)
                finally:
                    place.close()


def _measure(
    scenario: str, place: _Place, options: StoreOptions, cpu: int | None, progress: Progress
) -> Iterator[Result]:
    subjects: dict[str, Callable[[], Sample]]
    bare = "raw_set" if scenario == "redis.set" else "raw_get"
    if scenario == "redis.set":
        subjects = {"subject": place.tier_set, "raw_set": place.bare_set, "redis_py": place.client_set}
    else:
        place.fill()
        subjects = {"subject": place.tier_get, "raw_get": place.bare_get, "redis_py": place.client_get}
    samples = run_paired(
        on_cpu(cpu, subjects),
        runs=options.runs,
        warmup=options.warmup,
        progress=progress,
        label=f"{scenario} nbytes={place.nbytes} batch={place.batch}",
    )
    if scenario == "redis.set":
        place.fill()
    place.tier_get()
    verified = place.is_right(place.stored, place.views)
    values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
    params = place.params(options)
    yield summarise(scenario, params, "GB/s", values, samples=samples["subject"], verified=verified)
    values = {bare: values[bare], "redis_py": values["redis_py"]}
    yield summarise(f"{scenario}.raw", params, "GB/s", values, subject=bare, samples=samples[bare])
