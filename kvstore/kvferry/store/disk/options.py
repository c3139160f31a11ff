"""Options of the disk tier."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Literal, cast, get_args

from kvferry.core.errors import ConfigError
from kvferry.core.nearest import did_you_mean
from kvferry.core.tier_plugins import TierOption
from kvferry.core.units import format_nbytes, parse_nbytes, parse_seconds
from kvferry.core.values import require_bool, require_number, require_text, require_whole

__all__ = ["MAX_CAPACITY_NBYTES", "Direct", "DiskOptions", "Sync"]

Sync = Literal["none", "data", "full"]
Direct = Literal["auto", "on", "off"]
_MAX_RETRY_S = 3600
_MIN_CAPACITY = 64 << 10
MAX_CAPACITY_NBYTES: Final = 1 << 50


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Options of the disk tier.

    Attributes:
        directories: One a device; blocks are spread over them by their keys. Made absolute, ``~`` included.
        capacity_nbytes: Cap on what all directories together take up, as ``du`` counts.
        keep_free_nbytes: Bytes that stay free on the file system of each directory, whoever fills it.
        sync: What is done before a block counts as stored. ``none``: nothing, the kernel writes it when
            it likes; survives a crash of the process, and a crash of the machine may cost blocks, never
            make one wrong. ``data``: its data is durable. ``full``: its name too.
        direct: O_DIRECT: ``auto`` measures at the start whether it pays, for reads and writes apart.
        read_threads: Threads that read; with O_DIRECT each has up to 8 reads in flight.
        write_threads: Files written at once; if more than one, another thread gets the next ones ready.
        quarantine_nbytes: Bytes of corrupt files kept for a look, the oldest go first; part of the capacity.
        eviction: Name of the eviction policy.
        verify: Compare all headers in the background after the start.
        retry_s: Pause between attempts to use a directory that has failed.
    """

    directories: tuple[str, ...]
    capacity_nbytes: int
    keep_free_nbytes: int = 0
    sync: Sync = "none"
    direct: Direct = "auto"
    read_threads: int = 4
    write_threads: int = 2
    quarantine_nbytes: int = 64 << 20
    eviction: str = "lru"
    verify: bool = True
    retry_s: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.directories, (str, bytes)) or not isinstance(self.directories, Sequence):
            raise ConfigError(f"directories is {self.directories!r}: give a tuple of paths")
        object.__setattr__(self, "directories", tuple(map(_absolute, self.directories)))
        if not self.directories or len(set(self.directories)) != len(self.directories):
            raise ConfigError(f"directories is {list(self.directories)}: give one or more, each once")
        require_whole("capacity", self.capacity_nbytes)
        if self.capacity_nbytes < _MIN_CAPACITY:
            raise ConfigError(f"capacity is {self.capacity_nbytes} bytes, must be at least {_MIN_CAPACITY}")
        if self.capacity_nbytes > MAX_CAPACITY_NBYTES:
            raise ConfigError(
                f"capacity is {format_nbytes(self.capacity_nbytes)}, may be at most "
                f"{format_nbytes(MAX_CAPACITY_NBYTES)}: see the unit"
            )
        for name in ("keep_free_nbytes", "quarantine_nbytes"):
            require_whole(name.removesuffix("_nbytes"), getattr(self, name), least=0)
        for name, allowed in (("sync", get_args(Sync)), ("direct", get_args(Direct))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(allowed)}")
        for name in ("read_threads", "write_threads"):
            require_whole(name, getattr(self, name), least=1, most=64)
        require_text("eviction", self.eviction)
        require_bool("verify", self.verify)
        require_number("retry_s", self.retry_s, above=0, most=_MAX_RETRY_S)

    @property
    def quarantine_bound_nbytes(self) -> int:
        """Most bytes of corrupt files that each directory keeps."""
        return min(self.quarantine_nbytes, self.capacity_nbytes // 8)

    @classmethod
    def from_mapping(cls, where: str, values: Mapping[str, object]) -> DiskOptions:
        """Options from a table of the configuration; sizes also as ``8GiB``, times as ``5s``.

        Names are those of the attributes, those of sizes without ``_nbytes``; ``directory`` for a single one.

        Raises:
            ConfigError: For an unknown name, a missing or a wrong value.
        """
        known = {f.name.removesuffix("_nbytes"): f.name for f in fields(cls)}
        found: dict[str, object] = {}
        if "directory" in values and "directories" in values:
            raise ConfigError(f"{where}: give directory or directories, not both")
        for name, value in values.items():
            if name == "directory":
                name, value = "directories", value if isinstance(value, (list, tuple)) else [value]
            if name not in known:
                near = did_you_mean(name, list(known))
                raise ConfigError(f"{where}: no option {name!r}{near} (existing: {', '.join(known)})")
            found[known[name]] = _converted(f"{where}.{name}", known[name], value)
        missing = [n for n in ("directories", "capacity_nbytes") if n not in found]
        if missing:
            raise ConfigError(
                f"{where}: {' and '.join(n.removesuffix('_nbytes') for n in missing)} must be given"
            )
        try:
            options = cls(**found)  # type: ignore[arg-type]  # checked by _converted and __post_init__
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        kept, most = options.quarantine_nbytes, options.capacity_nbytes
        if "quarantine_nbytes" in found and kept > most:  # the default is for large tiers
            raise ConfigError(
                f"{where}: quarantine is {kept} bytes, a part of the capacity, which is {most}: lower "
                f"quarantine (at most an eighth of the capacity is used, {most // 8}), or raise capacity"
            )
        return options

    @classmethod
    def describe(cls, where: str, values: Mapping[str, object]) -> list[TierOption]:
        """Check a table of the configuration, and tell every option with the value that holds.

        Raises:
            ConfigError: As :meth:`from_mapping`.
        """
        options = cls.from_mapping(where, values)
        given = {"directories" if name == "directory" else name for name in values}
        found = []
        for each in fields(cls):
            name = each.name.removesuffix("_nbytes")
            value = getattr(options, each.name)
            if isinstance(value, tuple):
                value = list(value)
            about = _ABOUT[name]
            found.append(TierOption(name, value, name in given, _shown(each.name, value), *about))
        return found


_SIZE = "a size such as 8GiB"
_ABOUT: dict[str, tuple[str, str]] = {
    "directories": ("a list of paths", "One a device; blocks are spread over them by their keys."),
    "capacity": (f"{_SIZE}, 64 KiB to 1 PiB", "Cap on what all directories together take up, as du counts."),
    "keep_free": (_SIZE, "What stays free on the file system of each directory, whoever fills it."),
    "sync": ("one of none, data, full", "What is done before a block counts as stored."),
    "direct": ("one of auto, on, off", "O_DIRECT; auto measures at the start whether it pays."),
    "read_threads": ("1 to 64", "Threads that read; with O_DIRECT each has up to 8 reads in flight."),
    "write_threads": ("1 to 64", "Files written at once."),
    "quarantine": (_SIZE, "Corrupt files kept for a look, a part of the capacity, at most an eighth of it."),
    "eviction": ("the name of an eviction policy", "What is evicted first, such as lru or s3fifo."),
    "verify": ("true or false", "Whether all headers are compared in the background after the start."),
    "retry_s": (
        "a time such as 5s, above 0, at most 1h",
        "Pause between attempts to use a directory that has failed.",
    ),
}
"""What each option takes and does, for people."""


def _shown(name: str, value: object) -> str:
    if name.endswith("_nbytes") and isinstance(value, int):
        text = format_nbytes(value)
        return text if parse_nbytes(text) == value else f"{value} B"
    if name.endswith("_s"):
        return f"{value:g} s"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _converted(where: str, name: str, value: object) -> object:
    """The value of an option, which may be text: a tier can be given in one line."""
    if name == "directories":
        return _paths(where, value)
    if isinstance(value, (list, tuple)):
        raise ConfigError(f"{where} is {list(cast('Sequence[object]', value))}: give it once, as one value")
    try:
        if name.endswith("_nbytes") and isinstance(value, (str, int)):
            return parse_nbytes(value)
        if name.endswith("_s") and isinstance(value, (str, int, float)):
            return parse_seconds(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    wanted = {"sync": str, "direct": str, "eviction": str, "verify": bool}.get(name, int)
    if wanted is bool and isinstance(value, str):
        value = _WORDS.get(value.lower(), value)
    if wanted is int and isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r}, must be {_NAMES[wanted]}")
    return value


_NAMES: dict[type, str] = {str: "text", bool: "true or false", int: "a whole number"}


def _absolute(path: object) -> str:
    """A path that stays the same when the process goes elsewhere."""
    if not isinstance(path, (str, Path)) or not str(path) or "\0" in str(path):
        raise ConfigError(f"directories has {path!r}, must be paths")
    found = os.path.expanduser(path)  # noqa: PTH111  Path raises for an unknown user
    if found.startswith("~"):
        raise ConfigError(f"directory {path}: there is no home directory of that user")
    return os.path.normpath(f"/{str(Path(found).absolute()).lstrip('/')}")  # //x is /x here


def _paths(where: str, value: object) -> tuple[str, ...]:
    """A list of paths, or text with commas between them."""
    if isinstance(value, str):
        value = value.split(",")
    paths: list[object] = list(cast("Sequence[object]", value)) if isinstance(value, (list, tuple)) else []
    if not paths or not all(isinstance(p, str) and p and "\0" not in p for p in paths):
        raise ConfigError(f"{where} is {value!r}, must be a list of paths, or paths with commas between them")
    return tuple(cast("list[str]", paths))
