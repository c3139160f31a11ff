"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Optional, TypeAlias, overload

import typer

if TYPE_CHECKING:
    from kvferry.core.config import Config

__all__ = ["ConfigFile", "Flags", "Json", "Sets", "absolute", "load_and_log"]

ConfigFile = Annotated[
    Optional[str],  # noqa: UP045  typer evaluates it
    typer.Option("--config", metavar="FILE", help="Configuration file, TOML. [default: $KVFERRY_CONFIG]"),
]
Sets = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", metavar="KEY=VALUE", help="Set any value of the configuration; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text for people.")]

Flags: TypeAlias = Mapping[str, tuple[str, object]]
"""Dotted key to the option as users write it and its value; a value of ``None`` was not given."""


@overload
def absolute(path: str, option: str) -> str: ...


@overload
def absolute(path: str | None, option: str) -> str | None: ...


def absolute(path: str | None, option: str) -> str | None:
    """A path of the command line is from the folder that the command was given in; words stay as they are.

    Raises:
        ConfigError: If it begins with ``~`` and there is no such home folder.
    """
    from kvferry.core.user_path import user_path

    if path is None or path in ("", "auto", "none"):
        return path
    return str(user_path(path, option).absolute())


def load_and_log(config: str | None, assignments: Sequence[str] | None, flags: Flags | None = None) -> Config:
    """Read the configuration for a command that runs on, and set up its log lines.

    Args:
        config: The value of :data:`ConfigFile`.
        assignments: The value of :data:`Sets`.
        flags: Of the command's own options, by dotted key.

    Raises:
        ConfigError: As :func:`kvferry.core.config_sources.load_config`.
    """
    from kvferry.core import log
    from kvferry.core.config_sources import Flag, load_config

    named = {key: Flag(option, value) for key, (option, value) in (flags or {}).items()}
    loaded = load_config(config, assignments=assignments or (), flags=named)
    log.configure(loaded.config.log.level, loaded.config.log.format)
    return loaded.config
