"""Results as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvferry.bench.results import Result

__all__ = ["print_table"]


def _figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _against(result: Result) -> str:
    lines = []
    for name, baseline in result.baselines.items():
        ratio = result.ratios.get(name)
        low, high = result.ratio_spread.get(name, (0.0, 0.0))
        times = f"{ratio:.2f} ({low:.2f}-{high:.2f}) x " if ratio is not None else ""
        lines.append(f"{times}{name} {_figure(baseline)}")
    return "\n".join(lines)


def print_table(results: Sequence[Result], console: Console) -> None:
    """Print one row a result: the figure, its quartiles, and each baseline with the paired ratio."""
    table = Table(title="kvferry bench", title_justify="left", show_lines=True)
    for column in ("scenario", "params", "value", "quartiles", "against (same run)", "checked"):
        table.add_column(column, overflow="fold")
    for result in results:
        table.add_row(
            result.scenario,
            "\n".join(f"{k}={v}" for k, v in result.params.items()),
            f"[bold]{_figure(result.value)}[/bold] {result.unit}",
            f"{_figure(result.spread[0])}-{_figure(result.spread[1])}\nof {result.runs} runs",
            _against(result),
            "bytes compared" if result.verified else "",
        )
    console.print(table)
