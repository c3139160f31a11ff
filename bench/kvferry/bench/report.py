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
        times = f"{ratio:.2f} ({low:.2f} to {high:.2f}) x " if ratio is not None else ""
        lines.append(f"{times}{name} = {_figure(baseline)}")
    return "\n".join(lines)


def print_table(results: Sequence[Result], console: Console) -> None:
    """Print one row a result: the figure, its quartiles, and each baseline with the paired ratio."""
    table = Table(title="kvferry bench", title_justify="left", show_lines=True)
    table.add_column("scenario", overflow="fold", min_width=24)
    table.add_column("value", no_wrap=True)
    table.add_column("in the same run: ratio (quartiles) to", overflow="fold")
    for result in results:
        params = " ".join(f"{k}={v}" for k, v in result.params.items())
        low, high = result.spread
        checked = "\n[green]bytes compared[/green]" if result.verified else ""
        table.add_row(
            f"[bold]{result.scenario}[/bold]\n{params}",
            f"[bold]{_figure(result.value)} {result.unit}[/bold]\n"
            f"{_figure(low)} to {_figure(high)}\n{result.runs} runs{checked}",
            _against(result),
        )
    console.print(table)
