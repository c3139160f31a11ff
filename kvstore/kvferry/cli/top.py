"""``kvferry top``: a daemon's figures as they change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Literal, Optional

import msgspec
import typer

from kvferry.cli.daemon_http import Port, TokenOption, UrlOption
from kvferry.cli.options import ConfigFile, Json
from kvferry.cli.output import plain, print_json
from kvferry.cli.status import found_shares, seconds, share, tier_problems, tier_state
from kvferry.core.errors import ConfigError, ConnectError
from kvferry.core.units import format_nbytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kvferry.daemon.status import DaemonStatus

__all__ = ["top"]

# ruff: noqa: UP045  typer evaluates the annotations, also on Python 3.10

_LEAST_S = 0.2
_SAVES = ("commit", "save")
_BAR = 20
_PIPE_WIDTH = 200
_LEFT = ("use", "client")


def top(
    *,
    url: UrlOption = None,
    token_file: TokenOption = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
    count: Annotated[
        Optional[int], typer.Option("--count", metavar="N", help="End after N looks. [default: never]")
    ] = None,
    json: Json = False,
    config: ConfigFile = None,
) -> None:
    """Show live what the daemon does: throughput, tiers, requests, clients, faults. Ctrl-C ends it.

    Into a pipe or a file it writes one look below the other; a narrow terminal shows fewer columns.

    With `--json` it prints one status a line, as `kvferry status --json` does.
    """
    if not _LEAST_S <= interval <= 3600 or (count is not None and count < 1):
        raise ConfigError(
            f"--interval {interval:g} --count {count}: needs {_LEAST_S} to 3600 s, and 1 or more"
        )
    port = Port.of(url, config, token_file)
    status = port.status()  # the first must be there, later ones may come back
    if json:
        _print_lines(port, status, interval, count)
    else:
        _live(port, status, interval, count)


def _print_lines(port: Port, status: DaemonStatus, interval: float, count: int | None) -> None:
    shown = 0
    while True:
        print_json(msgspec.to_builtins(status))
        shown += 1
        if shown == count:
            return
        time.sleep(interval)
        status = port.status()


def _live(port: Port, status: DaemonStatus, interval: float, count: int | None) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    before: DaemonStatus | None = None
    now: DaemonStatus | None = status
    shown = 0
    with (
        Live(console=console, screen=True, auto_refresh=False)
        if console.is_terminal
        else nullcontext() as live
    ):
        while True:
            view: RenderableType = Text(f"{port.url} does not answer; asking again")
            if now is not None:
                view = _view(now, before, console.width)
            if live is not None:
                live.update(view, refresh=True)
            else:  # one look below the other
                console.print(view, Text(""))
            shown += 1
            if shown == count:
                return
            time.sleep(interval)
            before = now
            try:
                now = port.status()
            except ConnectError:
                now = None


def _rates(now: DaemonStatus, before: DaemonStatus | None) -> str:
    if before is None or now.uptime_s <= before.uptime_s:
        return "…"
    passed = now.uptime_s - before.uptime_s

    def moved(status: DaemonStatus, *verbs: str) -> int:
        return sum(o.nbytes for o in status.operations if o.verb in verbs)

    loaded = (moved(now, "load") - moved(before, "load")) / passed
    saved = (moved(now, *_SAVES) - moved(before, *_SAVES)) / passed
    requests = sum(o.count for o in now.operations) - sum(o.count for o in before.operations)
    return (
        f"loads {format_nbytes(round(loaded))}/s, saves {format_nbytes(round(saved))}/s, "
        f"{requests / passed:.0f} requests/s"
    )


def _view(now: DaemonStatus, before: DaemonStatus | None, width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = [
        Text(f"kvferry {now.version}, {'draining' if now.draining else 'up'} for {seconds(now.uptime_s)}"),
        Text(_rates(now, before), style="bold"),
        Text(
            f"{len(now.clients)} clients, {now.connections} connections"
            + ("" if now.tenant else f", {now.requests_under_way} under way")
        ),
        Text(found_shares(now)),
        _tiers(now, width),
        *(Text(plain(line), style="red") for line in tier_problems(now)),
    ]
    if now.operations:
        lines.append(_operations(now, width))
    if now.slowest:
        lines.append(_slowest(now, width))
    for fault in now.faults[:5]:
        ago = seconds(max(0.0, now.at - fault.at))
        lines.append(Text(plain(f"{ago} ago {fault.level}: {fault.message}"), style="red"))
    return Group(*lines)


def _table(
    width: int, columns: Sequence[str], rows: Sequence[Sequence[object]], optional: Sequence[str]
) -> Table:
    """A table in which nothing is cut: columns that are ``optional`` go, in that order, if it is too wide."""
    from rich.table import Table
    from rich.text import Text

    lines = [list(columns), *([plain(str(cell)) for cell in row] for row in rows)]
    widths = {cells[0]: max(map(len, cells)) + 2 for cells in zip(*lines, strict=True)}
    for name in optional:
        if sum(widths.values()) - 2 > width:
            del widths[name]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(widths):
        justify: Literal["right", "left"] = "right" if name not in _LEFT and number else "left"
        table.add_column(name, justify=justify, no_wrap=number == 0)
    shown = [number for number, name in enumerate(columns) if name in widths]
    for line in lines[1:]:
        table.add_row(*(Text(line[number]) for number in shown))
    return table


def _tiers(now: DaemonStatus, width: int) -> Table:
    rows: list[tuple[object, ...]] = []
    for tenant in now.tenants:
        for tier in tenant.tiers:
            limit = tier.capacity_nbytes
            filled = round(_BAR * min(1.0, tier.used_nbytes / limit)) if limit else 0
            name = tier.name if len(now.tenants) == 1 else f"{tenant.name} {tier.name}"
            rows.append((
                name, "█" * filled + "░" * (_BAR - filled), format_nbytes(tier.used_nbytes),
                format_nbytes(limit) if limit else "–", tier.entries,
                share(tier.hit_blocks, tenant.lookup_blocks), tier_state(tier),
            ))  # fmt: skip
    columns = ("tier", "use", "used", "of", "blocks", "hit rate", "state")
    return _table(width, columns, rows, ("use", "blocks", "hit rate"))


def _operations(now: DaemonStatus, width: int) -> Table:
    rows = [
        (o.verb, o.count, o.failed, seconds(o.p50_s), seconds(o.p99_s), format_nbytes(o.nbytes))
        for o in now.operations
    ]
    columns = ("request", "count", "failed", "p50 ≤", "p99 ≤", "bytes")
    return _table(width, columns, rows, ("p50 ≤", "bytes"))


def _slowest(now: DaemonStatus, width: int) -> Table:
    rows = [
        (slow.verb, slow.session, seconds(slow.seconds), slow.blocks, seconds(max(0.0, now.at - slow.at)))
        for slow in now.slowest[:5]
    ]
    return _table(width, ("slowest", "client", "took", "blocks", "ago"), rows, ("client", "blocks"))
