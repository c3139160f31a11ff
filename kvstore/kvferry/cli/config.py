"""``kvferry config``."""

from __future__ import annotations

import typer

from kvferry.cli.options import ConfigFile, Json, Sets
from kvferry.cli.output import print_json, print_table
from kvferry.core.config_sources import load_config

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")


@app.callback()
def _config() -> None:
    """Look at the configuration."""


@app.command("show")
def show(*, config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Show every value, where it comes from and what is allowed.

    Where the terminal is too narrow for all four columns, the last is left out.
    """
    loaded = load_config(config, assignments=sets or ())
    values = list(loaded.values())
    if as_json:
        rows = {
            v.key: {"value": v.value, "source": v.source, "allowed": v.allowed, "description": v.description}
            for v in values
        }
        print_json({"config": rows})
        return
    rows_of_text = [(v.key, v.text, v.source, v.allowed) for v in values]
    print_table(("key", "value", "source", "allowed"), rows_of_text, optional=1)
