"""The daemon's status: one typed tree, which ``/status``, the page, the metrics and the commands show."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from kvferry.core.log import redact

if TYPE_CHECKING:
    from kvferry.daemon.faults import Faults
    from kvferry.daemon.node import Daemon
    from kvferry.daemon.sessions import EngineSession
    from kvferry.daemon.tenants import Tenant

__all__ = [
    "ClientStatus",
    "DaemonStatus",
    "FaultStatus",
    "NamespaceStatus",
    "OperationStatus",
    "ProcessStatus",
    "SlowStatus",
    "TenantStatus",
    "TierStatus",
    "collect",
]

_NAME_LENGTH = 100
_MOST_LISTED = 1000
_REASON_LENGTH = 300


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a tenant. ``counters`` are the tier's own and those of its use; they only grow."""

    name: str
    entries: int
    used_nbytes: int
    capacity_nbytes: int
    """0: none, or not known."""
    hit_blocks: int
    """Blocks that lookups found there first."""
    healthy: bool = True
    reads_work: bool = True
    writes_work: bool = True
    queued_nbytes: int = 0
    lost_blocks: int = 0
    problems: dict[str, str] = {}
    """What does not work now, and why, by what it is about: ``writes``, a server, a directory."""
    counters: dict[str, float] = {}


class NamespaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace that was used since the start."""

    namespace: str
    """Its id, 64 hexadecimal digits."""
    model: str
    group: str
    block_nbytes: int


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The store of one tenant; sizes are those of its memory."""

    name: str
    used_nbytes: int
    capacity_nbytes: int
    pinned_nbytes: int
    quarantined_nbytes: int
    entries: int
    leases: int
    lookups: int
    lookup_blocks: int
    hit_blocks: int
    saved_blocks: int
    evicted_blocks: int
    expired_leases: int
    load_blocks: int = 0
    """Blocks that loads of clients asked for: with or without a lookup before."""
    loaded_blocks: int = 0
    """Blocks that they got."""
    tiers: tuple[TierStatus, ...]
    connections: int = 0
    refused: dict[str, int] = {}
    """Requests, or connections, refused so far, by reason: ``rate``, ``right``; ``connections``."""
    rate_nbytes: float | None = None
    """Bytes a second that it may move."""
    rate_requests: float | None = None
    namespaces: tuple[NamespaceStatus, ...]
    """At most 1000, the first that were used."""


class ClientStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One session that is connected, and the blocks that it has loaded and written since it came."""

    session: str
    tenant: str
    connections: int
    leases: int
    loaded_blocks: int = 0
    saved_blocks: int = 0
    processes: tuple[int, ...]


class OperationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What requests of one verb have cost since the start; quantiles are bounds of buckets."""

    verb: str
    count: int
    failed: int
    seconds: float
    blocks: int
    nbytes: int
    p50_s: float
    p99_s: float


class SlowStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One of the slowest requests of the last minutes."""

    at: float
    verb: str
    seconds: float
    session: str
    tenant: str
    blocks: int
    nbytes: int
    failed: bool


class FaultStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One warning or error of the log."""

    at: float
    level: str
    logger: str
    message: str


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The process itself."""

    pid: int
    cpu_s: float
    resident_nbytes: int
    """With pages of shared memory that it has touched."""


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``at`` is ``time.time()``, times of the process are seconds."""

    version: str
    at: float
    uptime_s: float
    draining: bool
    addresses: tuple[str, ...]
    http: str
    arena: str
    connections: int
    max_connections: int
    """Of each address."""
    sessions_left_behind: int
    refused_connections: int = 0
    """For want of a valid token."""
    guarded: bool = False
    """Whether everybody needs a token."""
    requests_under_way: int
    process: ProcessStatus
    tenants: tuple[TenantStatus, ...]
    clients: tuple[ClientStatus, ...]
    """At most 1000, those with the most connections."""
    operations: tuple[OperationStatus, ...]
    slowest: tuple[SlowStatus, ...]
    faults: tuple[FaultStatus, ...]
    fault_counts: dict[str, int]
    tenant: str = ""
    """Whose view it is; what is not this tenant's to see is 0 or empty. Empty: the operator's, of all."""
    notes: tuple[str, ...] = ()
    """What was not as it should be at the start: a capacity that the device cannot hold."""


def collect(daemon: Daemon, faults: Faults, *, version: str, http: str) -> DaemonStatus:
    """The status as it is now. Takes each store's lock for a moment; tiers may be asked what they hold."""
    clients = [_client(session) for session in daemon.sessions.active]
    clients.sort(key=lambda client: (-client.connections, client.tenant, client.session))
    return DaemonStatus(
        version=version,
        at=time.time(),
        uptime_s=time.monotonic() - daemon.started_at,
        draining=daemon.draining,
        addresses=tuple(daemon.addresses),
        http=http,
        arena=daemon.config.daemon.arena,
        connections=daemon.connections,
        max_connections=daemon.max_connections,
        sessions_left_behind=daemon.sessions.left_behind,
        refused_connections=daemon.tenants.refused_connections,
        guarded=daemon.tenants.guarded,
        requests_under_way=daemon.work.count,
        process=_process(),
        tenants=_tenants(daemon),
        clients=tuple(clients[:_MOST_LISTED]),
        operations=_operations(daemon),
        slowest=tuple(
            SlowStatus(**{**slow._asdict(), "session": slow.session[:_NAME_LENGTH]})
            for slow in daemon.operations.slowest()
        ),
        faults=tuple(FaultStatus(**line._asdict()) for line in faults.recent()),
        fault_counts=faults.counts,
        notes=daemon.notes,
    )


def _operations(daemon: Daemon) -> tuple[OperationStatus, ...]:
    return tuple(
        OperationStatus(
            verb=verb,
            count=figures.count,
            failed=figures.failed,
            seconds=figures.seconds,
            blocks=figures.blocks,
            nbytes=figures.nbytes,
            p50_s=figures.quantile(0.5),
            p99_s=figures.quantile(0.99),
        )
        for verb, figures in sorted(daemon.operations.figures().items())
    )


def _client(session: EngineSession) -> ClientStatus:
    return ClientStatus(
        session=session.name[:_NAME_LENGTH],
        tenant=session.tenant,
        connections=session.connections,
        leases=session.lease_count,
        loaded_blocks=session.loaded_blocks,
        saved_blocks=session.saved_blocks,
        processes=tuple(sorted(session.processes)),
    )


_OWN_FIELDS = frozenset(TierStatus.__struct_fields__) | {"mapped_nbytes"}


def _tenants(daemon: Daemon) -> tuple[TenantStatus, ...]:
    connections = daemon.tenants.connections()
    return tuple(_tenant(one, connections[one.name]) for one in daemon.tenants.all.values())


def _tenant(tenant: Tenant, connections: int) -> TenantStatus:
    stats, spaces, problems = tenant.store.stats(), tenant.store.spaces(), tenant.store.problems()
    rate_nbytes, rate_requests = tenant.meter.limits
    asked, got = tenant.loads
    return TenantStatus(
        name=tenant.name,
        connections=connections,
        refused=tenant.refused,
        rate_nbytes=rate_nbytes,
        rate_requests=rate_requests,
        used_nbytes=stats.used_nbytes,
        capacity_nbytes=stats.capacity_nbytes,
        pinned_nbytes=stats.pinned_nbytes,
        quarantined_nbytes=stats.quarantined_nbytes,
        entries=stats.entries,
        leases=stats.leases,
        lookups=stats.lookups,
        lookup_blocks=stats.lookup_blocks,
        hit_blocks=stats.hit_blocks,
        load_blocks=asked,
        loaded_blocks=got,
        saved_blocks=stats.saved_blocks,
        evicted_blocks=stats.evicted_blocks,
        expired_leases=stats.expired_leases,
        tiers=tuple(
            _tier(tier, dict(figures), problems.get(tier, {})) for tier, figures in stats.per_tier.items()
        ),
        namespaces=tuple(
            NamespaceStatus(
                namespace=space.namespace_id.hex(),
                model=space.spec.model[:_NAME_LENGTH],
                group=space.spec.group[:_NAME_LENGTH],
                block_nbytes=space.spec.block_nbytes,
            )
            for space in spaces[:_MOST_LISTED]
        ),
    )


def _tier(name: str, figures: dict[str, float], problems: dict[str, str]) -> TierStatus:
    def whole(key: str) -> int:
        return int(figures.get(key, 0))

    return TierStatus(
        name=name,
        entries=whole("entries"),
        used_nbytes=whole("used_nbytes"),
        capacity_nbytes=whole("capacity_nbytes"),
        hit_blocks=whole("hit_blocks"),
        healthy=bool(figures.get("healthy", 1)),
        reads_work=bool(figures.get("reads_work", 1)),
        writes_work=bool(figures.get("writes_work", 1)),
        queued_nbytes=whole("queued_nbytes"),
        lost_blocks=whole("lost_blocks"),
        problems={what: redact(reason)[:_REASON_LENGTH] for what, reason in problems.items()},
        counters={key: value for key, value in figures.items() if key not in _OWN_FIELDS},
    )


def _process() -> ProcessStatus:
    times = os.times()
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        resident = 0
    return ProcessStatus(pid=os.getpid(), cpu_s=times.user + times.system, resident_nbytes=resident)
