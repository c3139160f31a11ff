"""What each tenant gets of the daemon's memory and disk, and the store that it has for itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvferry.core.errors import ConfigError
from kvferry.core.placement import Placement
from kvferry.core.tier_plugins import TIERS
from kvferry.core.units import format_nbytes
from kvferry.daemon.disks import capacity_of, disk_tiers, folders_of
from kvferry.store.disk.names import tenant_folder

if TYPE_CHECKING:
    from kvferry.core.config import StoreConfig
    from kvferry.core.config_tiers import TierConfig
    from kvferry.daemon.credentials import Limits
    from kvferry.store.tier import Tier

__all__ = ["Quota", "disk_shares", "placement_of", "quotas", "require_usable", "tenant_store"]

_LEAST: Final = 1 << 20
_FOLDER: Final = "tenants.d"
"""Below a directory of a disk tier; no tenant's own folder has a dot."""


class Quota:
    """Bytes of one tenant; ``disk`` is of all disk tiers together, 0 where there is none."""

    __slots__ = ("disk", "dram")

    def __init__(self, dram: int, disk: int) -> None:
        self.dram = dram
        self.disk = disk

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quota) and (self.dram, self.disk) == (other.dram, other.disk)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Quota(dram={self.dram}, disk={self.disk})"

    def __str__(self) -> str:
        disk = f", disk {format_nbytes(self.disk)}" if self.disk else ""
        return f"memory {format_nbytes(self.dram)}{disk}"


def quotas(store: StoreConfig, tenants: Mapping[str, Limits]) -> dict[str, Quota]:
    """The quota of each tenant: its own, or an equal share of what those with one leave.

    Args:
        store: What there is in all.
        tenants: Who they are, and what they are to have.

    Raises:
        ConfigError: If it is more than there is; with the figures.
    """
    disk = sum(map(capacity_of, disk_tiers(store)))
    dram_of = _shares(
        store.dram_capacity,
        {name: one.dram for name, one in tenants.items()},
        "memory",
        "store.dram_capacity (--capacity)",
    )
    disk_of = dict.fromkeys(tenants, 0)
    if disk:
        wanted = {name: one.disk for name, one in tenants.items()}
        disk_of = _shares(disk, wanted, "disk", "the capacity of the disk tiers (--disk-capacity)")
    return {name: Quota(dram_of[name], disk_of[name]) for name in tenants}


def _shares(total: int, wanted: Mapping[str, int | None], what: str, option: str) -> dict[str, int]:
    given = sum(number for number in wanted.values() if number is not None)
    others = [name for name, number in wanted.items() if number is None]
    if given > total:
        raise ConfigError(
            f"the tenants' quotas of {what} are {format_nbytes(given)} in all, {option} is "
            f"{format_nbytes(total)}: raise it, or lower them (kvferry credentials limit)"
        )
    share = (total - given) // len(others) if others else 0
    if others and share < _LEAST:
        raise ConfigError(
            f"{', '.join(map(repr, others))}: no quota of {what} is given, and of {option}, which is "
            f"{format_nbytes(total)}, the others leave {format_nbytes(share)} for each: raise it, or lower "
            "theirs (kvferry credentials limit)"
        )
    return {name: share if number is None else number for name, number in wanted.items()}


def tenant_store(store: StoreConfig, tenant: str, quota: Quota) -> StoreConfig:
    """The ``store`` section of one tenant: its memory, and its own folder of every disk tier."""
    own = disk_shares(store, quota)
    tiers = tuple(_own(tier, tenant, own[n]) if n in own else tier for n, tier in enumerate(store.tiers))
    limit = store.write_quota
    return store.model_copy(
        update={
            "dram_capacity": quota.dram,
            "write_quota": None if limit is None else min(limit, quota.dram),
            "tiers": tiers,
        }
    )


def disk_shares(store: StoreConfig, quota: Quota) -> dict[int, int]:
    """What of a quota each disk tier has, by its number among the tiers: as their capacities are."""
    disk = sum(map(capacity_of, disk_tiers(store)))
    return {
        number: quota.disk * capacity_of(tier) // disk
        for number, tier in enumerate(store.tiers)
        if tier.kind == "disk"
    }


def placement_of(store: StoreConfig) -> Placement:
    """Where memory comes from."""
    return Placement(hugepages=store.hugepages, numa_node=store.numa_node)


def require_usable(name: str, tenant: StoreConfig) -> None:
    """See that a tenant can do with what it has, before its store is opened or resized.

    Raises:
        ConfigError: If its memory, or one of its disk tiers, would be too small.
    """
    least = placement_of(tenant).granule_nbytes
    if tenant.dram_capacity < least:
        pages = " (store.hugepages)" if tenant.hugepages else ""
        raise ConfigError(
            f"tenant {name!r}: its quota of memory is {format_nbytes(tenant.dram_capacity)}, below one page "
            f"of {format_nbytes(least)}{pages}: raise it (kvferry credentials limit)"
        )
    for tier in disk_tiers(tenant):
        plugin: type[Tier] = TIERS.load(tier.kind)
        plugin.describe_options(tier.name or tier.kind, tier.options)


def _own(tier: TierConfig, tenant: str, capacity: int) -> TierConfig:
    options = dict(tier.options)
    options.pop("directory", None)
    folder = tenant_folder(tenant)
    options["directories"] = [os.path.join(path, _FOLDER, folder) for path in folders_of(tier)]  # noqa: PTH118
    options["capacity"] = capacity
    return tier.model_copy(update={"options": options})
