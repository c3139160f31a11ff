"""The daemon's status as Prometheus metrics; ``docs/metrics.md`` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.core.metrics import Metrics
from kvferry.daemon.operations import BOUNDS_S

if TYPE_CHECKING:
    from kvferry.daemon.operations import Operations
    from kvferry.daemon.status import DaemonStatus, TenantStatus, TierStatus

__all__ = ["DaemonMetrics", "daemon_metrics"]

_STORE: Final = {  # field of TenantStatus: (name, text)
    "used_nbytes": ("used_bytes", "Memory in use, in whole slots."),
    "capacity_nbytes": ("capacity_bytes", "Memory that may be used."),
    "pinned_nbytes": ("pinned_bytes", "Memory that cannot be evicted: leased, pinned, being filled."),
    "quarantined_nbytes": ("quarantined_bytes", "Memory that a client that is gone might still write."),
    "leases": ("leases", "Leases that hold something."),
    "lookups": ("lookups_total", "Lookups."),
    "lookup_blocks": ("lookup_blocks_total", "Blocks that lookups asked for."),
    "hit_blocks": ("hit_blocks_total", "Blocks of lookups that any tier had."),
    "load_blocks": ("load_blocks_total", "Blocks that loads of clients asked for."),
    "loaded_blocks": ("loaded_blocks_total", "Blocks that loads of clients got."),
    "saved_blocks": ("saved_blocks_total", "Blocks newly stored in memory."),
    "evicted_blocks": ("evicted_blocks_total", "Blocks evicted from memory."),
    "expired_leases": ("expired_leases_total", "Leases that ended by their deadline."),
}
_TIER: Final = {  # field of TierStatus: (name, text)
    "entries": ("blocks", "Blocks that the tier knows of."),
    "used_nbytes": ("used_bytes", "Bytes that the tier takes up."),
    "capacity_nbytes": ("capacity_bytes", "Bytes that the tier may take; 0: no limit of ours."),
    "hit_blocks": ("hit_blocks_total", "Blocks of lookups that this tier was the fastest to have."),
    "reads_work": ("reads_work", "1 while the tier is read; 0 while its breaker for reads is open."),
    "writes_work": ("writes_work", "1 while the tier is written; 0 while its breaker for writes is open."),
    "healthy": ("healthy", "1 while the tier itself says that it works and no breaker is open."),
    "queued_nbytes": ("queued_bytes", "Bytes of blocks that wait to be written to the tier."),
    "lost_blocks": ("lost_blocks_total", "Blocks that did not reach the tier: dropped, refused or failed."),
}
_OUTCOMES: Final = (("read_", "reads"), ("write_", "writes"))
_NO_OUTCOME: Final = frozenset({"write_dropped_nbytes", "read_breaker_opened", "write_breaker_opened"})


def daemon_metrics(collector: DaemonMetrics) -> Metrics:
    """A registry with the daemon's metrics and those of its process."""
    metrics = Metrics(process=True)
    metrics.add(collector)
    return metrics


def _family(name: str, text: str, labels: Iterable[str] = ()) -> Metric:
    if name.endswith("_total"):
        return CounterMetricFamily(name, text, labels=list(labels))
    return GaugeMetricFamily(name, text, labels=list(labels))


def _single(name: str, text: str, value: float) -> Metric:
    found = _family(name, text)
    found.add_metric([], value)  # type: ignore[attr-defined]
    return found


class DaemonMetrics(Collector):
    """Makes the families anew for each scrape, of one status.

    Args:
        status: Gives the present status.
        operations: For the distribution of times.
    """

    def __init__(self, status: Callable[[], DaemonStatus], operations: Operations) -> None:
        self._status = status
        self._operations = operations

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand, so that registering asks for no status."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families."""
        status = self._status()
        yield from _daemon(status)
        yield from self._requests()
        yield from _limits(status)
        yield from _stores(status.tenants)
        yield from _tiers(status.tenants)

    def _requests(self) -> Iterator[Metric]:
        requests = _family("kvferry_daemon_requests_total", "Requests of clients, by verb.", ["verb"])
        failed = _family(
            "kvferry_daemon_failed_requests_total", "Those that were refused or failed.", ["verb"]
        )
        blocks = _family("kvferry_daemon_moved_blocks_total", "Blocks loaded and saved by clients.", ["verb"])
        nbytes = _family("kvferry_daemon_moved_bytes_total", "Their bytes, shared or sent.", ["verb"])
        times = HistogramMetricFamily(
            "kvferry_daemon_request_seconds", "Time from a request's arrival to its answer.", labels=["verb"]
        )
        for verb, figures in sorted(self._operations.figures().items()):
            requests.add_metric([verb], figures.count)  # type: ignore[attr-defined]
            failed.add_metric([verb], figures.failed)  # type: ignore[attr-defined]
            blocks.add_metric([verb], figures.blocks)  # type: ignore[attr-defined]
            nbytes.add_metric([verb], figures.nbytes)  # type: ignore[attr-defined]
            bounds = [*map(str, BOUNDS_S), "+Inf"]
            times.add_metric(
                [verb], list(zip(bounds, accumulate(figures.buckets), strict=True)), figures.seconds
            )
        yield from (requests, failed, blocks, nbytes, times)


def _daemon(status: DaemonStatus) -> Iterator[Metric]:
    info = _family("kvferry_daemon_info", "Always 1; the version is a label.", ["version", "arena"])
    info.add_metric([status.version, status.arena], 1)  # type: ignore[attr-defined]
    yield info
    yield _single("kvferry_daemon_uptime_seconds", "Seconds since the start.", status.uptime_s)
    yield _single("kvferry_daemon_draining", "1 while no new work is taken.", status.draining)
    yield _single("kvferry_daemon_connections", "Connections of clients.", status.connections)
    yield _single("kvferry_daemon_sessions", "Sessions with a connection.", len(status.clients))
    yield _single(
        "kvferry_daemon_sessions_left_behind",
        "Sessions that are over while a process of theirs may still write into memory.",
        status.sessions_left_behind,
    )
    yield _single("kvferry_daemon_requests_under_way", "Requests being served.", status.requests_under_way)
    faults = _family("kvferry_daemon_faults_total", "Warnings and errors that were logged.", ["level"])
    for level, count in sorted(status.fault_counts.items()):
        faults.add_metric([level], count)  # type: ignore[attr-defined]
    yield faults


def _limits(status: DaemonStatus) -> Iterator[Metric]:
    yield _single(
        "kvferry_daemon_refused_connections_total",
        "Connections refused for want of a valid token.",
        status.refused_connections,
    )
    connections = _family("kvferry_tenant_connections", "Connections of a tenant's clients.", ["tenant"])
    refused = _family(
        "kvferry_tenant_refused_total",
        "Requests and connections refused to a tenant: beyond its rate, without the right, too many.",
        ["tenant", "reason"],
    )
    for tenant in status.tenants:
        connections.add_metric([tenant.name], tenant.connections)  # type: ignore[attr-defined]
        for reason, count in tenant.refused.items():
            refused.add_metric([tenant.name, reason], count)  # type: ignore[attr-defined]
    yield from (connections, refused)


def _stores(tenants: Iterable[TenantStatus]) -> Iterator[Metric]:
    for field, (name, text) in _STORE.items():
        family = _family(f"kvferry_store_{name}", text, ["tenant"])
        for tenant in tenants:
            family.add_metric([tenant.name], getattr(tenant, field))  # type: ignore[attr-defined]
        yield family


def _tiers(tenants: Iterable[TenantStatus]) -> Iterator[Metric]:
    tiers = [(tenant.name, tier) for tenant in tenants for tier in tenant.tiers]
    for field, (name, text) in _TIER.items():
        family = _family(f"kvferry_tier_{name}", text, ["tenant", "tier"])
        for tenant_name, tier in tiers:
            family.add_metric([tenant_name, tier.name], getattr(tier, field))  # type: ignore[attr-defined]
        yield family
    for prefix, kind in _OUTCOMES:
        family = _family(
            f"kvferry_tier_{kind}_total",
            f"Blocks by what came of the tier's {kind}.",
            ["tenant", "tier", "outcome"],
        )
        for tenant_name, tier in tiers:
            for outcome, value in _outcomes(tier, prefix):
                family.add_metric([tenant_name, tier.name, outcome], value)  # type: ignore[attr-defined]
        yield family
    events = _family(
        "kvferry_tier_events_total",
        "What else tiers count; which there are depends on the kind of tier.",
        ["tenant", "tier", "event"],
    )
    for tenant_name, tier in tiers:
        for event, value in sorted(tier.counters.items()):
            if event in _NO_OUTCOME or not event.startswith(("read_", "write_")):
                events.add_metric([tenant_name, tier.name, event], value)  # type: ignore[attr-defined]
    yield events


def _outcomes(tier: TierStatus, prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in sorted(tier.counters.items()):
        if name.startswith(prefix) and name not in _NO_OUTCOME:
            yield name[len(prefix) :], value
