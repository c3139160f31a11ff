"""``kvferry plugins``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvferry.cli.output import print_json, print_table
from kvferry.core.registry import GROUPS, PluginInfo, Registry

__all__ = ["plugins"]


def plugins(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """List the plug-ins of every kind, where each comes from, and what is missing where one cannot work."""
    found = [info for group in GROUPS for info in Registry[object](group).describe()]
    if as_json:
        print_json({"plugins": [asdict(info) for info in found]})
        return
    rows = [
        (info.group.removeprefix("kvferry."), info.name, info.module, info.distribution, _state(info))
        for info in found
    ]
    print_table(("kind", "name", "module", "distribution", "state"), rows)


def _state(info: PluginInfo) -> str:
    return "ok" if info.ok else info.problem.removeprefix(f"{info.group}: ")
