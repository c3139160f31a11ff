"""Which benchmarks there are: names, groups and how to run them."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvferry.bench.pairing import MIN_RUNS, Progress
from kvferry.bench.results import Param, Result
from kvferry.core.errors import UnknownPluginError
from kvferry.core.nearest import did_you_mean

__all__ = ["GROUPS", "Comparison", "Group", "Options", "run_group"]


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a group: rounds that count, and the group's own parameters."""

    runs: int = MIN_RUNS
    warmup: int = 1
    params: Mapping[str, Param | None] | None = None

    def param(self, name: str, default: Param) -> Param:
        """The value asked for ``name``, else ``default``."""
        value = (self.params or {}).get(name)
        return default if value is None else value

    def scenario(self, known: Collection[str]) -> str:
        """The one scenario that was asked for, or empty for all.

        Raises:
            UnknownPluginError: If it is none of ``known``.
        """
        name = str(self.param("scenario", ""))
        if name and name not in known:
            near = did_you_mean(name, list(known))
            raise UnknownPluginError(f"no scenario {name!r}{near}; there are: {', '.join(known)}")
        return name


class Runner(Protocol):
    """Runs a group and yields each result as soon as it is there."""

    def __call__(self, options: Options, progress: Progress) -> Iterator[Result]: ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """A table for people with one row a subject and its figures as columns.

    Attributes:
        title: Above it.
        row: The parameter that names the subject.
        columns: Last parts of the names of scenarios; their results are shown here only.
        repeated: The same, of results that also have a row in the table of all others.
    """

    title: str
    row: str
    columns: tuple[str, ...]
    repeated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Benchmarks that run together under ``kvferry bench NAME``."""

    name: str
    summary: str
    scenarios: tuple[str, ...]
    runner: str  # "module:function", imported when it runs
    comparison: Comparison | None = None


GROUPS: dict[str, Group] = {
    "stream": Group(
        name="stream",
        summary="KV streamed layer by layer between two processes",
        scenarios=("stream.layers",),
        runner="kvferry.bench.scenarios.stream_layers:run",
    ),
    "transport": Group(
        name="transport",
        summary="messages between two processes over each transport, and a block through a shared arena",
        scenarios=(
            "transport.<scheme>.put",
            "transport.<scheme>.get",
            "transport.<scheme>.roundtrip",
            "transport.<scheme>.batch",
            "transport.tcp.rate",
            "transport.unix.arena",
            "transport.mooncake.write",
            "transport.mooncake.read",
        ),
        runner="kvferry.bench.scenarios.transport:run",
    ),
    "codec": Group(
        name="codec",
        summary="codecs on the KV of a model: size, speed against memory, and what they do to its answers",
        scenarios=(
            "codec.<id>.ratio",
            "codec.<id>.encode",
            "codec.<id>.decode",
            "codec.<id>.memcpy_threads",
            "codec.<id>.<quality>",
            "codec.adaptive",
        ),
        runner="kvferry.bench.scenarios.codec:run",
        comparison=Comparison(
            title="what codecs do to K, V and the answers: medians of the texts (quartiles)",
            row="codec",
            columns=(
                "relative_l2_k",
                "relative_l2_v",
                "max_error",
                "kl",
                "top1",
                "perplexity",
                "out_of_bound",
            ),
            repeated=("ratio",),
        ),
    ),
    "store": Group(
        name="store",
        summary="blocks saved, found, loaded and evicted, in memory, on disk, through a daemon and in Redis",
        scenarios=(
            "store.save.dram",
            "store.load.dram",
            "store.lookup",
            "store.evict",
            "store.write.disk",
            "store.read.disk",
            "store.restart",
            "redis.set",
            "redis.set.raw",
            "redis.get",
            "redis.get.raw",
            "daemon.save",
            "daemon.load",
            "daemon.gather",
            "daemon.scatter",
        ),
        runner="kvferry.bench.scenarios.store:run",
    ),
    "device": Group(
        name="device",
        summary="copies from and to a device, its pages gathered and scattered, layers saved behind compute",
        scenarios=(
            "device.copy_in",
            "device.copy_out",
            "device.gather",
            "device.scatter",
            "device.save_layers",
        ),
        runner="kvferry.bench.scenarios.device:run",
    ),
}


def run_group(name: str, options: Options, progress: Progress) -> Iterator[Result]:
    """Run the benchmarks of a group.

    Raises:
        UnknownPluginError: If there is no such group; the message names those there are.
    """
    group = GROUPS.get(name)
    if group is None:
        raise UnknownPluginError(f"no benchmark group {name!r}; there are: {', '.join(sorted(GROUPS))}")
    module, function = group.runner.split(":")
    runner: Runner = getattr(importlib.import_module(module), function)
    yield from runner(options, progress)
