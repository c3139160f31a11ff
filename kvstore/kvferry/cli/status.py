"""``kvferry status``: what a daemon holds and does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvferry.cli.daemon_http import Port, TokenOption, UrlOption
from kvferry.cli.options import ConfigFile, Json
from kvferry.cli.output import print_json, print_table, say
from kvferry.core.units import format_nbytes

if TYPE_CHECKING:
    from kvferry.daemon.status import DaemonStatus, TierStatus

__all__ = ["found_shares", "seconds", "share", "status", "tier_problems", "tier_state"]


def status(
    *, url: UrlOption = None, token_file: TokenOption = None, json: Json = False, config: ConfigFile = None
) -> None:
    """Show what the daemon of this node holds and does: tiers, clients, requests, recent faults.

    With `--json` it prints the whole status as one object, as `/status` of its HTTP port has it.
    """
    found = Port.of(url, config, token_file).status()
    if json:
        print_json(msgspec.to_builtins(found))
    else:
        _show(found)


def seconds(value: float) -> str:
    """A time for people."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def share(part: float, whole: float) -> str:
    """A percentage, or a dash where there is nothing yet."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def tier_state(tier: TierStatus) -> str:
    """In a word, how a tier goes."""
    broken = [name for name, works in (("reads", tier.reads_work), ("writes", tier.writes_work)) if not works]
    if broken:
        return f"no {' or '.join(broken)}"
    return "works" if tier.healthy else "in trouble"


def found_shares(found: DaemonStatus) -> str:
    """Which share of blocks was there: of those looked up, and of those that loads asked for."""
    lookups = share(sum(t.hit_blocks for t in found.tenants), sum(t.lookup_blocks for t in found.tenants))
    loads = share(sum(t.loaded_blocks for t in found.tenants), sum(t.load_blocks for t in found.tenants))
    return f"blocks found: {lookups} of lookups, {loads} of loads"


def tier_problems(found: DaemonStatus) -> list[str]:
    """What does not work now, a line each."""
    several = len(found.tenants) > 1
    return [
        f"{f'{tenant.name}, ' if several else ''}tier {tier.name}, {what}: {reason}"
        for tenant in found.tenants
        for tier in tenant.tiers
        for what, reason in tier.problems.items()
    ]


def _show(found: DaemonStatus) -> None:
    state = "draining" if found.draining else "up"
    say(f"kvferry {found.version}, {state} for {seconds(found.uptime_s)}, pid {found.process.pid}")
    say(f"listens on {' '.join(found.addresses)} {found.http}")
    clients = f"{len(found.clients)} clients, {found.connections} connections"
    own = (
        f", {found.requests_under_way} requests under way, "
        f"{format_nbytes(found.process.resident_nbytes)} resident, {found.process.cpu_s:.1f} s of CPU"
    )
    say(clients if found.tenant else clients + own)
    say(found_shares(found))
    say("")
    print_table(
        ["tenant", "tier", "used", "of", "blocks", "hit rate", "state", "queued", "lost"],
        [
            (
                tenant.name, tier.name, format_nbytes(tier.used_nbytes),
                format_nbytes(tier.capacity_nbytes) if tier.capacity_nbytes else "–", tier.entries,
                share(tier.hit_blocks, tenant.lookup_blocks), tier_state(tier),
                format_nbytes(tier.queued_nbytes), tier.lost_blocks,
            )
            for tenant in found.tenants
            for tier in tenant.tiers
        ],
        optional=3,
    )  # fmt: skip
    for line in tier_problems(found):
        say(line)
    if found.guarded:
        _show_tenants(found)
    _show_requests(found)
    for note in found.notes:
        say(f"at the start: {note}")
    for fault in found.faults[:5]:
        say(f"{seconds(max(0.0, found.at - fault.at))} ago {fault.level}: {fault.message}")


def _show_tenants(found: DaemonStatus) -> None:
    say("")
    print_table(
        ["tenant", "memory", "of", "hit rate", "loads found", "connections", "over rate", "no right"],
        [
            (
                one.name, format_nbytes(one.used_nbytes), format_nbytes(one.capacity_nbytes),
                share(one.hit_blocks, one.lookup_blocks), share(one.loaded_blocks, one.load_blocks),
                one.connections,
                one.refused.get("rate", 0), one.refused.get("right", 0),
            )
            for one in found.tenants
        ],
        optional=2,
    )  # fmt: skip
    if not found.tenant:
        say(f"{found.refused_connections} connections were refused for want of a valid token")


def _show_requests(found: DaemonStatus) -> None:
    if found.operations:
        say("")
        print_table(
            ["request", "count", "failed", "p50 ≤", "p99 ≤", "blocks", "bytes"],
            [
                (
                    o.verb,
                    o.count,
                    o.failed,
                    seconds(o.p50_s),
                    seconds(o.p99_s),
                    o.blocks,
                    format_nbytes(o.nbytes),
                )
                for o in found.operations
            ],
        )
    if found.clients:
        say("")
        print_table(
            ["client", "tenant", "connections", "leases", "loaded", "saved", "processes"],
            [
                (
                    c.session,
                    c.tenant,
                    c.connections,
                    c.leases,
                    c.loaded_blocks,
                    c.saved_blocks,
                    " ".join(map(str, c.processes)) or "–",
                )
                for c in found.clients[:20]
            ],
        )
