"""``transport.<scheme>.batch``: many parts in one message, beside one part of as many bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from kvferry.bench.link.ends import LinkEnds
from kvferry.bench.link.memory import LinkMemory
from kvferry.bench.link.requests import Operation
from kvferry.bench.pairing import Progress
from kvferry.bench.results import Result, Sample
from kvferry.bench.scenarios.transport import TransportOptions
from kvferry.bench.scenarios.transport_link import Series, Variant, measure

__all__ = ["run"]

_PART_NBYTES = 64 << 10
_PARTS = 64


def run(scenario: str, options: TransportOptions, peers: LinkEnds, progress: Progress) -> Iterator[Result]:
    """64 parts of 64 KiB in one message, beside one part of 4 MiB."""
    for variant in Variant.of(scenario.split(".")[1], options):
        for checksum in options.checksums:
            yield _one(Series(scenario, variant, checksum, options, peers), progress)


def _one(series: Series, progress: Progress) -> Result:
    options, other = series.options, series.other
    whole_nbytes = _PARTS * _PART_NBYTES
    walk = max(options.walk_nbytes, whole_nbytes)
    messages = max(1, options.run_nbytes // whole_nbytes)
    with contextlib.ExitStack() as stack:
        memories = [LinkMemory(nbytes, walk) for nbytes in (_PART_NBYTES, whole_nbytes)]
        parts, whole = (series.link(other.address, memory) for memory in memories)
        stack.callback(parts.close)
        stack.callback(whole.close)
        subjects: dict[str, Callable[[], Sample]] = {
            "subject": partial(parts.put, _PARTS, messages),
            "one_message": partial(whole.put, 1, messages),
        }
        if other.bare is not None:
            name, make = other.bare
            bare = make(memories[0])
            stack.callback(bare.close)
            subjects[name] = partial(bare.put, _PARTS, messages)
        return measure(
            series.scenario, series.params(_PART_NBYTES, _PARTS),
            {name: series.run(name, one) for name, one in subjects.items()},
            parts, options, progress, operation=Operation.PUT, count=messages,
        )  # fmt: skip
