"""``transport.tcp.batch`` and ``transport.tcp.rate``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from kvferry.bench.link.channel import Link
from kvferry.bench.link.requests import Operation
from kvferry.bench.pairing import Progress
from kvferry.bench.results import Param, Result, Sample, summarise
from kvferry.bench.scenarios.transport import TransportOptions
from kvferry.bench.scenarios.transport_link import ends, link_params, measure
from kvferry.core.units import parse_rate

__all__ = ["run_batch", "run_rate"]

_PART_NBYTES = 64 << 10
_PARTS = 64
_RATE_LANES = (1, 4)
_RATE_RUNS = 3
_RATE_PART_NBYTES = 1 << 20


def run_batch(scenario: str, options: TransportOptions, progress: Progress) -> Iterator[Result]:
    """64 parts of 64 KiB in one message, beside one part of 4 MiB."""
    whole_nbytes = _PARTS * _PART_NBYTES
    walk = max(options.walk_nbytes, whole_nbytes)
    messages = max(1, options.run_nbytes // whole_nbytes)
    for checksum in options.checksums:
        with contextlib.ExitStack() as stack:
            other = stack.enter_context(ends("tcp", options))
            links = [
                Link(other.address, nbytes, walk, checksum=checksum == "xxh3", peer_cpu_s=other.cpu_s)
                for nbytes in (_PART_NBYTES, whole_nbytes)
            ]
            for link in links:
                stack.callback(link.close)
            parts, whole = links
            subjects = {
                "subject": partial(parts.put, _PARTS, messages),
                "one_message": partial(whole.put, 1, messages),
            }
            if other.bare is not None:
                bare = other.bare[1](_PART_NBYTES)
                stack.callback(bare.close)
                subjects[other.bare[0]] = partial(bare.put, _PARTS, messages)
            params = link_params("tcp", _PART_NBYTES, _PARTS, 1, checksum, options)
            yield measure(
                scenario, params, subjects, parts, None, options, progress,
                operation=Operation.PUT, batch=_PARTS, count=messages,
            )  # fmt: skip


def run_rate(scenario: str, options: TransportOptions, progress: Progress) -> Iterator[Result]:
    """A connection that is limited, over some seconds; the ratio is that to the rate that was asked for."""
    rate = parse_rate(options.rate)
    nbytes = min(_RATE_PART_NBYTES, options.walk_nbytes)
    batch = max(1, round(rate * options.seconds / nbytes))  # one message: nothing waits for the peer
    runs = min(options.runs, _RATE_RUNS)
    for lanes in _RATE_LANES:
        extra = f"rate={options.rate}" + (f"&lanes={lanes}" if lanes > 1 else "")
        with ends("tcp", options, url_options=extra) as other, contextlib.ExitStack() as stack:
            link = Link(other.address, nbytes, options.walk_nbytes, checksum=True, peer_cpu_s=other.cpu_s)
            stack.callback(link.close)
            samples: list[Sample] = []
            for done in range(runs):
                progress(f"{scenario} lanes={lanes}", done, runs)
                samples.append(link.put(batch, 1))
            progress(f"{scenario} lanes={lanes}", runs, runs)
            verified = link.verify(Operation.PUT, 1, 1)
            params: dict[str, Param] = {
                **link_params("tcp", nbytes, batch, lanes, "xxh3", options),
                "rate": options.rate,
                "seconds": options.seconds,
                "operations": link.operations,
                "failed": link.failed,
            }
        values = {
            "subject": [s.nbytes / s.seconds / 1e6 for s in samples],
            "asked": [rate / 1e6] * runs,
        }
        yield summarise(scenario, params, "MB/s", values, samples=samples, verified=verified)
