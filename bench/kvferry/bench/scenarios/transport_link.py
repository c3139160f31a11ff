"""``transport.<scheme>.put``, ``.get`` and ``.roundtrip``: messages over a channel, beside a bare socket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from kvferry.bench.ceilings import MemcpyCold
from kvferry.bench.link.channel import Link
from kvferry.bench.link.ends import Ends, LinkEnds
from kvferry.bench.link.memory import LinkMemory, parts_at_once
from kvferry.bench.link.mooncake import MooncakeTe
from kvferry.bench.link.redis import RedisLink
from kvferry.bench.link.requests import Operation
from kvferry.bench.own_cpu import MemcpyHanded, cpu_pair, on_cpu
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, percentile, summarise
from kvferry.bench.scenarios.transport import TransportOptions
from kvferry.core.address import parse_url
from kvferry.transports.lanes import parse_lanes

__all__ = ["Series", "Variant", "link_params", "measure", "run_link", "with_options"]

_ROUNDTRIP_NBYTES = 4096
_UCX_TLS = ("posix,cma", "tcp")
_ROUNDTRIP_WALK_NBYTES = 16 << 20
_ON_OWN_CPU = ("subject", "one_lane", "one_message", "ucxx")
_MOST_TURNS = 8
_TURN_MESSAGES = 4  # at least; the first one finds a peer that was asleep
_PINNED = ("tcp", "tls", "unix")  # with one lane: one thread at each end


class _Mover(Protocol):
    """Who moves parts: the subject, and most baselines."""

    def put(self, batch: int, count: int) -> Sample: ...
    def get(self, batch: int, count: int) -> Sample: ...


def link_params(
    scheme: str, nbytes: int, batch: int, lanes: int, checksum: str, options: TransportOptions
) -> dict[str, Param]:
    """What changes the work."""
    return {
        "transport": scheme,
        "nbytes": nbytes,
        "batch": batch,
        "lanes": lanes,
        "checksum": checksum,
        "peer": "remote" if options.address else "thread" if scheme == "inproc" else "process",
        "walk_nbytes": options.walk_nbytes,
        "cpus": os.cpu_count() or 1,
    }


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to use a scheme.

    Attributes:
        lanes: Sockets of a connection.
        tls: What UCX may use; empty for other schemes.
    """

    lanes: int = 1
    tls: str = ""

    @property
    def url_options(self) -> str:
        """As options of the address."""
        return f"tls={self.tls}" if self.tls else f"lanes={self.lanes}" if self.lanes > 1 else ""

    @classmethod
    def of(cls, scheme: str, options: TransportOptions) -> list[Variant]:
        """Those of ``scheme`` that are to be measured; a peer on another machine has one, its address's."""
        if options.address:
            given = parse_url(options.address, default_port=0).options
            lanes = parse_lanes(given.get("lanes", "1")) if scheme == "tcp" else 1
            return [cls(lanes, given.get("tls", "") if scheme == "ucx" else "")]
        if scheme not in ("tcp", "ucx"):
            return [cls()]
        if scheme == "ucx":
            return [cls(tls=tls) for tls in _UCX_TLS]
        return [cls(lanes=lanes) for lanes in options.lanes]


@dataclass(frozen=True, slots=True)
class Series:
    """What is the same for all sizes of one scenario."""

    scenario: str
    variant: Variant
    checksum: str
    options: TransportOptions
    peers: LinkEnds

    @property
    def scheme(self) -> str:
        """What is measured."""
        return self.scenario.split(".")[1]

    @property
    def kind(self) -> str:
        """The scenario's last word."""
        return self.scenario.split(".")[2]

    @property
    def other(self) -> Ends:
        """The other end."""
        return self.peers.of(self.scheme, self.variant.url_options, pinned=self.pinned)

    @property
    def pinned(self) -> bool:
        """Whether each end has a CPU of its own; several lanes take one thread an end, as one lane does."""
        return self.options.apart and self.scheme in _PINNED

    def link(self, address: str, memory: LinkMemory) -> Link:
        """A subject: a connection to ``address``, which is of the other end."""
        return Link(
            address, memory,
            checksum=self.checksum == "xxh3", verify=self.options.verify, peer_cpu_s=self.other.cpu_s,
        )  # fmt: skip

    def params(self, nbytes: int, batch: int) -> dict[str, Param]:
        """What changes the work."""
        found = link_params(self.scheme, nbytes, batch, self.variant.lanes, self.checksum, self.options)
        found["verify"] = self.options.verify
        if self.variant.tls:
            found["tls"] = self.variant.tls
        return found if self.other.cpu is None else {**found, "pinned": True}

    def run(self, name: str, run: Callable[[], Sample]) -> Callable[[], Sample]:
        """``run`` on the CPU of this end, if that is given to it: others have threads of their own."""
        other = self.other
        if other.cpu is None or other.bare is None or name not in (*_ON_OWN_CPU, other.bare[0]):
            return run
        return on_cpu(other.cpu, {name: run})[name]


def run_link(
    scenario: str, options: TransportOptions, peers: LinkEnds, progress: Progress
) -> Iterator[Result]:
    """One scenario over all sizes, batches, variants and checksums."""
    _, scheme, kind = scenario.split(".")
    for variant in Variant.of(scheme, options):
        for checksum in options.checksums:
            series = Series(scenario, variant, checksum, options, peers)
            if kind == "roundtrip":
                yield _roundtrip(series, progress)
                continue
            for nbytes in options.sizes:
                with contextlib.ExitStack() as stack:
                    movers, handed = _movers(series, nbytes, stack), _handed(series, stack)
                    yield from _moves(series, movers, handed, nbytes, progress)


def _movers(series: Series, nbytes: int, stack: contextlib.ExitStack) -> dict[str, _Mover]:
    """The subject and its baselines for one size, closed with ``stack``.

    Those that are most alike use the same memory in turn and are served by one process, so that they differ
    in nothing else.
    """
    options, other = series.options, series.other
    walk = options.walk_nbytes
    memory = LinkMemory(nbytes, walk)
    link = series.link(other.address, memory)
    stack.callback(link.close)
    movers: dict[str, _Mover] = {"subject": link}
    if other.bare is not None:
        name, make = other.bare
        bare = make(memory)
        stack.callback(bare.close)
        movers[name] = bare
    if series.variant.lanes > 1:
        # its listener takes connections of any number of lanes
        single = series.link(with_options(other.address, lanes="1"), memory)
        stack.callback(single.close)
        movers["one_lane"] = single
    if series.variant.tls and "ucxx" in options.alternatives and not options.address:
        ucxx = other.bare_ucxx(series.variant.tls, memory)
        stack.callback(ucxx.close)
        movers["ucxx"] = ucxx
    if series.scheme == "tcp" and "redis" in options.alternatives and not options.address:
        redis = RedisLink(nbytes, walk, series.peers.redis())
        stack.callback(redis.close)
        movers["redis"] = redis
    if series.scheme == "tcp" and "mooncake" in options.alternatives and not options.address:
        mooncake = MooncakeTe(nbytes, walk, cpu_pair() if other.cpu is not None else (None, None))
        stack.callback(mooncake.close)
        movers["mooncake_te"] = mooncake
    return movers


def with_options(address: str, **options: str) -> str:
    """``address`` with ``options`` in place of those that it has of these names."""
    parsed = parse_url(address, default_port=0)
    return replace(parsed, options={**parsed.options, **options}).url


def _handed(series: Series, stack: contextlib.ExitStack) -> MemcpyHanded | None:
    """Memory handed from the CPU of one end to that of the other, if each has one."""
    here, there = cpu_pair()
    if series.other.cpu is None or here is None or there is None:
        return None
    handed = MemcpyHanded(here, there)
    stack.callback(handed.close)
    return handed


def _moves(
    series: Series,
    movers: Mapping[str, _Mover],
    handed: MemcpyHanded | None,
    nbytes: int,
    progress: Progress,
) -> Iterator[Result]:
    """Puts, or gets, of one size."""
    options = series.options
    walk = options.walk_nbytes
    link, mooncake = movers["subject"], movers.get("mooncake_te")
    assert isinstance(link, Link)
    operation = Operation.PUT if series.kind == "put" else Operation.GET
    for batch in sorted({parts_at_once(nbytes, batch, walk) for batch in options.batches}):
        turns, count = _turns(options.run_nbytes // (nbytes * batch))
        subjects: dict[str, Callable[[], Sample]] = {
            name: series.run(
                name, partial(mover.put if operation is Operation.PUT else mover.get, batch, count)
            )
            for name, mover in movers.items()
        }
        subjects["memcpy_cold"] = MemcpyCold(nbytes, count * batch, walk_nbytes=walk)
        if handed is not None:
            subjects["memcpy_handed"] = handed
        result = measure(
            series.scenario, series.params(nbytes, batch), subjects, link, options, progress,
            operation=operation, count=count, turns=turns,
        )  # fmt: skip
        if isinstance(mooncake, MooncakeTe):
            result.params["mooncake_te_failed"] = mooncake.failed
        yield result


def _turns(messages: int) -> tuple[int, int]:
    """Turns of a round that moves about so many messages, and messages of each."""
    turns = max(1, min(_MOST_TURNS, messages // _TURN_MESSAGES))
    return turns, max(1, messages // turns)


def measure(
    scenario: str,
    params: dict[str, Param],
    subjects: Mapping[str, Callable[[], Sample]],
    link: Link,
    options: TransportOptions,
    progress: Progress,
    *,
    operation: Operation,
    count: int,
    turns: int = 1,
) -> Result:
    """Paired rounds, then a round whose bytes are compared; failures are counted and left out."""
    failed, operations = link.failed, link.operations
    label = " ".join([scenario, *(f"{k}={params[k]}" for k in ("nbytes", "batch", "lanes", "checksum"))])
    samples = run_paired(
        subjects, runs=options.runs, warmup=options.warmup, turns=turns, progress=progress, label=label
    )
    verified = link.verify(operation, int(params["batch"]), count * turns)
    params = {**params, "operations": link.operations - operations, "failed": link.failed - failed}
    values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
    return summarise(scenario, params, "GB/s", values, samples=samples["subject"], verified=verified)


def _roundtrip(series: Series, progress: Progress) -> Result:
    """Requests and answers of 4 KiB; the value is a round's median."""
    options, other = series.options, series.other
    with contextlib.ExitStack() as stack:
        memory = LinkMemory(_ROUNDTRIP_NBYTES, min(options.walk_nbytes, _ROUNDTRIP_WALK_NBYTES))
        link = series.link(other.address, memory)
        stack.callback(link.close)
        subjects = {"subject": series.run("subject", partial(link.echo, options.requests))}
        if other.bare is not None:
            name, make = other.bare
            bare = make(memory)
            stack.callback(bare.close)
            subjects[name] = series.run(name, partial(bare.echo, options.requests))
        params = series.params(_ROUNDTRIP_NBYTES, 1)
        samples = run_paired(
            subjects,
            runs=options.runs,
            warmup=options.warmup,
            progress=progress,
            label=f"{series.scenario} lanes={params['lanes']} checksum={series.checksum}",
        )
        verified = link.verify(Operation.ECHO, 1, options.requests)
        params = {**params, "operations": link.operations, "failed": link.failed}
    values = {
        name: [percentile(s.latencies, 0.5) * 1e6 if s.latencies else 0.0 for s in found]
        for name, found in samples.items()
    }
    return summarise(series.scenario, params, "us", values, samples=samples["subject"], verified=verified)
