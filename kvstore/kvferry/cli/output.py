"""What commands print: tables for people, one JSON object for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import typer

__all__ = ["print_json", "print_table"]


def print_json(value: object) -> None:
    """Print ``value`` as one line of JSON on standard output."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on standard output, as wide as the terminal; into a pipe nothing is cut."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=False)
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    cells = [[str(cell) for cell in row] for row in rows]
    for row in cells:
        table.add_row(*row)
    if not console.is_terminal:
        lines = [list(header), *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        console.width = sum(widths) + 2 * len(widths)
    console.print(table, markup=False, highlight=False)
