"""A store from its section of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.core.placement import Placement
from kvferry.core.sessions import Session
from kvferry.core.tenants import check_tenant
from kvferry.core.tier_plugins import TIERS
from kvferry.store.level import LevelOptions
from kvferry.store.options import StoreOptions
from kvferry.store.policies import admission_policy, eviction_policy, promotion_policy, write_policy
from kvferry.store.remote.peer import PeerTier
from kvferry.store.tier import Tier
from kvferry.store.tiered import TieredStore

if TYPE_CHECKING:
    from kvferry.core.config import StoreConfig
    from kvferry.core.config_tiers import TierConfig
    from kvferry.store.remote.peer import PeerMaker

__all__ = ["open_store"]


def open_store(
    config: StoreConfig,
    *,
    tenant: str = "default",
    session: Session | None = None,
    shared: bool = True,
    peers: PeerMaker | None = None,
) -> TieredStore:
    """The store that ``config`` describes, with its tiers and policies.

    Args:
        config: The ``store`` section.
        tenant: Whose KV it holds; 1 to 120 bytes of UTF-8.
        session: See :class:`~kvferry.core.memory.MemoryStore`.
        shared: See :class:`~kvferry.core.memory.MemoryStore`.
        peers: Makes what a ``peer`` tier asks other daemons with; without it there can be no such tier.

    Raises:
        ConfigError: If a plug-in is not known or a value cannot be used; nothing stays open.
        TierError: If a directory of a tier is used by another store; nothing stays open.
    """
    check_tenant(tenant)  # before a tier makes its folders
    eviction = eviction_policy(config.eviction)
    watermarks = None if config.high_watermark >= 1 else (config.low_watermark, config.high_watermark)
    options = StoreOptions(
        watermarks=watermarks,
        prefetch_jobs=config.prefetch_jobs,
        close_s=config.close_timeout,
        placement=Placement(hugepages=config.hugepages, numa_node=config.numa_node),
        shared=shared,
    )
    tiers: list[tuple[Tier, LevelOptions]] = []
    try:
        for table in config.tiers:
            used = _level_options(table)
            plugin: type[Tier] = TIERS.load(table.kind)
            tier = plugin.from_options(table.name or table.kind, table.options)
            tiers.append((tier, used))
            if isinstance(tier, PeerTier):
                tier.connect(peers)
    except BaseException:
        for tier, _ in tiers:
            tier.close()
        raise
    return TieredStore(
        config.dram_capacity,
        tiers,
        tenant=tenant,
        lease_s=config.lease,
        write_quota_nbytes=config.write_quota,
        session=session,
        eviction=eviction,
        options=options,
    )


def _level_options(table: TierConfig) -> LevelOptions:
    return LevelOptions(
        write=write_policy(table.write),
        admission=admission_policy(table.admission),
        promotion=promotion_policy(table.promotion),
        queue_nbytes=table.queue,
        errors=table.errors,
        pause_s=table.pause,
        lookup_timeout_s=table.lookup_timeout,
        read_timeout_s=table.read_timeout,
        write_timeout_s=table.write_timeout,
    )
