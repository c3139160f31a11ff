"""``transport.tcp.rate``: connections whose rate is limited."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvferry.bench.link.channel import Link
from kvferry.bench.link.ends import LinkEnds
from kvferry.bench.link.memory import LinkMemory
from kvferry.bench.link.requests import Operation
from kvferry.bench.pairing import Progress
from kvferry.bench.results import Param, Result, Sample, summarise
from kvferry.bench.scenarios.transport import TransportOptions
from kvferry.bench.scenarios.transport_link import Variant, link_params, with_options
from kvferry.core.units import parse_rate

__all__ = ["lanes_of", "run"]

_RATE_RUNS = 3
_RATE_PART_NBYTES = 1 << 20
_RATE_MESSAGE_NBYTES = 1 << 30


def run(scenario: str, options: TransportOptions, peers: LinkEnds, progress: Progress) -> Iterator[Result]:
    """A connection that is limited, over some seconds; the ratio is that to the rate that was asked for.

    A run is one message, up to 1 GiB, so that nothing waits for the peer in between.
    """
    rate = parse_rate(options.rate)
    nbytes = min(_RATE_PART_NBYTES, options.walk_nbytes)
    parts = max(1, round(rate * options.seconds / nbytes))
    messages = int(-(-parts * nbytes // _RATE_MESSAGE_NBYTES))
    batch = -(-parts // messages)
    runs = min(options.runs, _RATE_RUNS)
    for lanes in lanes_of(options):
        other = peers.of("tcp", f"rate={options.rate}" + (f"&lanes={lanes}" if lanes > 1 else ""))
        memory = LinkMemory(nbytes, options.walk_nbytes)
        address = with_options(other.address, rate=options.rate)  # that of another machine has none
        link = Link(address, memory, checksum=True, peer_cpu_s=other.cpu_s)
        with contextlib.closing(link):
            samples: list[Sample] = []
            for done in range(runs):
                progress(f"{scenario} lanes={lanes}", done, runs)
                samples.append(link.put(batch, messages))
            progress(f"{scenario} lanes={lanes}", runs, runs)
            params: dict[str, Param] = {
                **link_params("tcp", nbytes, batch, lanes, "xxh3", options),
                "rate": options.rate,
                "seconds": options.seconds,
                "operations": link.operations,
                "failed": link.failed,
            }
            verified = link.verify(Operation.PUT, 1, 1)
        values = {
            "subject": [s.nbytes / s.seconds / 1e6 if s.seconds else 0.0 for s in samples],
            "asked": [rate / 1e6] * runs,
        }
        yield summarise(scenario, params, "MB/s", values, samples=samples, verified=verified)


def lanes_of(options: TransportOptions) -> tuple[int, ...]:
    """Of the connections; one to another machine has those of its address."""
    if options.address:
        return tuple(variant.lanes for variant in Variant.of("tcp", options))
    return options.rate_lanes
