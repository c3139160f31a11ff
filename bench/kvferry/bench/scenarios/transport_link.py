"""``transport.<scheme>.put``, ``.get`` and ``.rpc``: messages over a channel, beside a bare socket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

from kvferry.bench.ceilings import MemcpyCold
from kvferry.bench.link.channel import Link
from kvferry.bench.link.ends import Ends, LinkEnds
from kvferry.bench.link.memory import parts_at_once
from kvferry.bench.link.mooncake import MooncakeTe
from kvferry.bench.link.requests import Operation
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, percentile, summarise
from kvferry.bench.scenarios.transport import TransportOptions

__all__ = ["link_params", "measure", "run_link"]

_RPC_NBYTES = 4096
_RPC_WALK_NBYTES = 16 << 20


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


def run_link(
    scenario: str, options: TransportOptions, peers: LinkEnds, progress: Progress
) -> Iterator[Result]:
    """One scenario over all sizes, batches, lanes and checksums."""
    _, scheme, kind = scenario.split(".")
    for lanes in options.lanes if scheme == "tcp" and not options.address else (1,):
        other = peers.of(scheme, f"lanes={lanes}" if lanes > 1 else "")
        for checksum in options.checksums:
            if kind == "rpc":
                yield _rpc(scenario, other, lanes, checksum, options, progress)
                continue
            one_lane = peers.of(scheme) if lanes > 1 else None
            for nbytes in options.sizes:
                with contextlib.ExitStack() as stack:
                    movers = _movers(scheme, other, one_lane, nbytes, checksum, options, stack)
                    yield from _moves(scenario, movers, nbytes, lanes, checksum, options, progress)


def _movers(
    scheme: str,
    other: Ends,
    one_lane: Ends | None,
    nbytes: int,
    checksum: str,
    options: TransportOptions,
    stack: contextlib.ExitStack,
) -> dict[str, _Mover]:
    """The subject and its baselines for one size, closed with ``stack``."""
    walk, with_checksum = options.walk_nbytes, checksum == "xxh3"
    link = Link(other.address, nbytes, walk, checksum=with_checksum, peer_cpu_s=other.cpu_s)
    stack.callback(link.close)
    movers: dict[str, _Mover] = {"subject": link}
    if other.bare is not None:
        name, make = other.bare
        bare = make(nbytes)
        stack.callback(bare.close)
        movers[name] = bare
    if one_lane is not None:
        single = Link(one_lane.address, nbytes, walk, checksum=with_checksum)
        stack.callback(single.close)
        movers["one_lane"] = single
    if scheme == "tcp" and "mooncake" in options.alternatives and not options.address:
        mooncake = MooncakeTe(nbytes, walk)
        stack.callback(mooncake.close)
        movers["mooncake_te"] = mooncake
    return movers


def _moves(
    scenario: str,
    movers: Mapping[str, _Mover],
    nbytes: int,
    lanes: int,
    checksum: str,
    options: TransportOptions,
    progress: Progress,
) -> Iterator[Result]:
    """Puts, or gets, of one size."""
    _, scheme, kind = scenario.split(".")
    walk = options.walk_nbytes
    link, mooncake = movers["subject"], movers.get("mooncake_te")
    assert isinstance(link, Link)
    for batch in sorted({parts_at_once(nbytes, batch, walk) for batch in options.batches}):
        count = max(1, options.run_nbytes // (nbytes * batch))
        subjects: dict[str, Callable[[], Sample]] = {
            name: partial(mover.put if kind == "put" else mover.get, batch, count)
            for name, mover in movers.items()
        }
        subjects["memcpy_cold"] = MemcpyCold(nbytes, count * batch, walk_nbytes=walk)
        params = link_params(scheme, nbytes, batch, lanes, checksum, options)
        operation = Operation.PUT if kind == "put" else Operation.GET
        result = measure(
            scenario, params, subjects, link, options, progress, operation=operation, count=count
        )
        if isinstance(mooncake, MooncakeTe):
            result.params["mooncake_te_failed"] = mooncake.failed
        yield result


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
) -> Result:
    """Paired rounds, then a round whose bytes are compared; failures are counted and left out."""
    failed, operations = link.failed, link.operations
    label = " ".join([scenario, *(f"{k}={params[k]}" for k in ("nbytes", "batch", "lanes", "checksum"))])
    samples = run_paired(subjects, runs=options.runs, warmup=options.warmup, progress=progress, label=label)
    verified = link.verify(operation, int(params["batch"]), count)
    params = {**params, "operations": link.operations - operations, "failed": link.failed - failed}
    values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
    return summarise(scenario, params, "GB/s", values, samples=samples["subject"], verified=verified)


def _rpc(
    scenario: str, other: Ends, lanes: int, checksum: str, options: TransportOptions, progress: Progress
) -> Result:
    """Requests and answers of 4 KiB; the value is a round's median."""
    _, scheme, _ = scenario.split(".")
    with contextlib.ExitStack() as stack:
        walk = min(options.walk_nbytes, _RPC_WALK_NBYTES)
        link = Link(other.address, _RPC_NBYTES, walk, checksum=checksum == "xxh3", peer_cpu_s=other.cpu_s)
        stack.callback(link.close)
        subjects: dict[str, Callable[[], Sample]] = {"subject": partial(link.echo, options.requests)}
        if other.bare is not None:
            name, make = other.bare
            bare = make(_RPC_NBYTES)
            stack.callback(bare.close)
            subjects[name] = partial(bare.echo, options.requests)
        samples = run_paired(
            subjects,
            runs=options.runs,
            warmup=options.warmup,
            progress=progress,
            label=f"{scenario} lanes={lanes} checksum={checksum}",
        )
        verified = link.verify(Operation.ECHO, 1, options.requests)
        params: dict[str, Param] = {
            **link_params(scheme, _RPC_NBYTES, 1, lanes, checksum, options),
            "operations": link.operations,
            "failed": link.failed,
        }
    values = {
        name: [percentile(s.latencies, 0.5) * 1e6 for s in found if s.latencies]
        for name, found in samples.items()
    }
    return summarise(scenario, params, "us", values, samples=samples["subject"], verified=verified)
