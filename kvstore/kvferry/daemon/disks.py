"""The daemon's disks as they are at its start: whether they can be used, and how much fits on them."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvferry.core.errors import ConfigError
from kvferry.core.units import format_nbytes, parse_nbytes
from kvferry.store.disk.files import reason_of
from kvferry.store.disk.places import make_directory

if TYPE_CHECKING:
    from kvferry.core.config import Config, StoreConfig
    from kvferry.core.config_tiers import TierConfig

__all__ = ["capacity_of", "disk_tiers", "folders_of", "require_disks", "room_notes"]

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def disk_tiers(store: StoreConfig) -> list[TierConfig]:
    """The disk tiers of a store."""
    return [tier for tier in store.tiers if tier.kind == "disk"]


def capacity_of(tier: TierConfig) -> int:
    """What a disk tier may take, in bytes."""
    return parse_nbytes(tier.options.get("capacity", 0))


def folders_of(tier: TierConfig) -> list[str]:
    """The directories of a disk tier, as they were given."""
    given = tier.options.get("directory") or tier.options.get("directories") or ()
    return [os.path.expanduser(one) for one in ([given] if isinstance(given, str) else given)]  # noqa: PTH111


def require_disks(config: Config, store: StoreConfig) -> None:
    """Make the directories of all disk tiers, and see that files can be made there.

    One of several that does not work now costs its blocks alone: it is tried again later. A tier without any
    that works was not meant.

    Raises:
        ConfigError: With the directory, what is wrong, and the option.
    """
    option = "store.tiers" if config.store.tiers else "daemon.disk, --disk"
    for tier in disk_tiers(store):
        reasons = {folder: _why_not(folder) for folder in folders_of(tier)}
        if reasons and all(reasons.values()):
            folder, error = next(iter(reasons.items()))
            assert error is not None
            remedy = "" if config.store.tiers else ", or give none to keep blocks in memory only"
            raise ConfigError(
                f"{folder} ({option}) cannot be used for blocks: {reason_of(error)}; name a directory in "
                f"which uid {os.geteuid()} may make files{remedy}"
            )


def _why_not(folder: str) -> OSError | None:
    try:
        make_directory(folder)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return None if error.errno in _FULL and os.path.isdir(folder) else error  # noqa: PTH112


def room_notes(config: Config, store: StoreConfig, used: Mapping[str, int]) -> list[str]:
    """What is to be said of disk tiers whose capacity is more than their devices can hold now.

    Args:
        config: For the name of the option.
        store: Whose tiers.
        used: Bytes that each tier takes up now, all tenants together, by its name.
    """
    notes: list[str] = []
    option = "its capacity in store.tiers" if config.store.tiers else "daemon.disk_capacity (--disk-capacity)"
    for tier in disk_tiers(store):
        name, capacity = tier.name or tier.kind, capacity_of(tier)
        own, free = used.get(name, 0), _free(folders_of(tier))
        if free is not None and capacity > own + free:
            notes.append(
                f"tier {name} may take {format_nbytes(capacity)}, and its device has {format_nbytes(free)} "
                f"free beside the {format_nbytes(own)} that it takes up: it fills the device, and evicts at "
                f"{format_nbytes(own + free)}; lower {option}, or make room"
            )
    return notes


def _free(folders: list[str]) -> int | None:
    """Free bytes of all devices together; ``None`` if one cannot tell."""
    free: dict[int, int] = {}
    try:
        for folder in folders:
            room = os.statvfs(folder)
            free[os.stat(folder).st_dev] = room.f_bavail * room.f_frsize  # noqa: PTH116
    except OSError:
        return None
    return sum(free.values())
