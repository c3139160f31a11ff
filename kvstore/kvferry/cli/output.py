"""What commands print: tables for people, one JSON object for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from unicodedata import category

import typer

__all__ = ["plain", "print_json", "print_table", "say"]

_NO_TEXT = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def plain(text: str) -> str:
    """``text`` for a terminal: what would move the cursor, change colours or the order of reading is escaped.

    Names that others chose, of models, tenants and files, can hold such characters.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if category(character) not in _NO_TEXT:
        return character
    return character.encode("unicode_escape").decode()


def say(line: str) -> None:
    """Print a line on standard output; see :func:`plain`."""
    typer.echo(plain(line))


def print_json(value: object) -> None:
    """Print ``value`` as one line of JSON on standard output."""
    text = json.dumps(value, ensure_ascii=False)
    typer.echo(text if text.isprintable() else json.dumps(value))


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, optional: int = 0) -> None:
    """Print a table on standard output, as wide as the terminal; nothing is cut, long cells are folded.

    Args:
        header: Names of the columns.
        rows: Cells of each line.
        optional: How many of the last columns may be left out where the terminal is too narrow for all.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=False)
    lines = [list(header), *([plain(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    if not console.is_terminal:
        console.width = sum(widths)
    shown = len(widths)
    while shown > len(widths) - optional and sum(widths[:shown]) - 2 > console.width:
        shown -= 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(header[:shown]):
        whole = number == 0 and widths[0] <= console.width // 2  # names are worth nothing in pieces
        table.add_column(name, overflow="fold", no_wrap=whole)
    for line in lines[1:]:
        table.add_row(*line[:shown])
    console.print(table, markup=False, highlight=False)
