"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from kvferry.bench.ceilings import COLD_NBYTES
from kvferry.bench.registry import Comparison
from kvferry.bench.results import Param, Result
from kvferry.core.units import format_nbytes

__all__ = ["print_report", "print_table"]


def _figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _against(result: Result) -> str:
    lines = []
    for name, baseline in result.baselines.items():
        ratio = result.ratios.get(name)
        low, high = result.ratio_spread.get(name, (0.0, 0.0))
        times = f"{ratio:.2f} ({low:.2f} to {high:.2f}) x " if ratio is not None else ""
        lines.append(f"{times}{name} = {_figure(baseline)}")
    return "\n".join(lines)


_QUOTED_RUNS: Final = 9


def _why_unfit(results: Sequence[Result]) -> str:
    """Why the figures are not fit to be quoted, if so."""
    reasons = []
    if results and max(r.runs for r in results) < _QUOTED_RUNS:
        reasons.append(f"fewer than {_QUOTED_RUNS} runs")
    walks = [walk for r in results if isinstance(walk := r.params.get("walk_nbytes"), int)]
    if walks and min(walks) < COLD_NBYTES:
        reasons.append(
            f"buffers of {format_nbytes(min(walks))} are not cold ({format_nbytes(COLD_NBYTES)} are)"
        )
    return " and ".join(reasons)


def print_report(results: Sequence[Result], console: Console, comparison: Comparison | None = None) -> None:
    """Print what ``comparison`` takes as a table of its own, and all others as :func:`print_table`."""
    _print_tables(results, console, comparison)
    if why := _why_unfit(results):
        console.print(f"not fit to be quoted: {why}", markup=False, highlight=False)


def _print_tables(results: Sequence[Result], console: Console, comparison: Comparison | None) -> None:
    compared = [r for r in results if comparison is not None and _last(r) in comparison.columns]
    others = [r for r in results if r not in compared]
    if others:
        print_table(others, console)
    if comparison is not None and compared:
        repeated = [r for r in others if _last(r) in comparison.repeated]
        _print_comparison(comparison, [*repeated, *compared], console)


def _print_comparison(comparison: Comparison, results: Sequence[Result], console: Console) -> None:
    columns = dict.fromkeys((_last(r), r.unit) for r in results)
    rows: dict[Param, dict[str, Result]] = {}
    for result in results:
        rows.setdefault(result.params[comparison.row], {})[_last(result)] = result
    shared = {k: v for k, v in results[-1].params.items() if k != comparison.row}
    caption = " ".join(f"{k}={v}" for k, v in shared.items())
    table = Table(title=comparison.title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column(comparison.row, no_wrap=True)
    for name, unit in columns:
        table.add_column(f"{name.replace('_', ' ')}\n[dim]{unit}[/dim]", overflow="fold")
    for subject, found in rows.items():
        table.add_row(f"[bold]{subject}[/bold]", *(_cell(found.get(name)) for name, _ in columns))
    console.print(table)


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    low, high = map(_figure, result.spread)
    spread = "" if low == high else f"\n[dim]{low} to {high}[/dim]"
    return _figure(result.value) + spread


def _last(result: Result) -> str:
    return result.scenario.rpartition(".")[2]


def print_table(results: Sequence[Result], console: Console) -> None:
    """Print one row a result: the figure, its quartiles, and each baseline with the paired ratio."""
    table = Table(title="kvferry bench", title_justify="left", show_lines=True)
    table.add_column("scenario", overflow="fold", min_width=24)
    table.add_column("value", no_wrap=True)
    table.add_column("in the same run: ratio (quartiles) to", overflow="fold")
    for result in results:
        params = " ".join(f"{k}={v}" for k, v in result.params.items())
        low, high = result.spread
        when = "in all rounds" if result.params.get("verify") else "after the rounds"
        checked = f"\n[green]bytes compared {when}[/green]" if result.verified else ""
        table.add_row(
            f"[bold]{result.scenario}[/bold]\n{params}",
            f"[bold]{_figure(result.value)} {result.unit}[/bold]\n"
            f"{_figure(low)} to {_figure(high)}\n{result.runs} runs{checked}",
            _against(result),
        )
    console.print(table)
