"""The ``kvferry`` program: a table of commands, each imported when it is run.

``kvferry --help`` therefore loads neither numpy nor pydantic nor torch. An error of kvferry's own becomes one
line on standard error and an exit code; anything else is a bug and keeps its traceback.
"""

# ruff: noqa: ANN401  the command classes that typer builds on have no public types

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import Annotated, Any, NamedTuple, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["COMMANDS", "CommandEntry", "main"]

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CommandEntry(NamedTuple):
    """One line of the command table."""

    target: str
    """``module:object``: a function with typer annotations, or a ``typer.Typer`` with sub-commands."""
    help: str
    """One line for ``kvferry --help``; the whole help is the docstring of the function."""
    extra: str = ""
    """The extra of the distribution that brings what the command imports, if the base does not."""


COMMANDS: dict[str, CommandEntry] = {
    "bench": CommandEntry(
        "kvferry.cli.bench:app", "Measure what a link, a tier or a deployment delivers.", "engine"
    ),
    "config": CommandEntry(
        "kvferry.cli.config:app", "Show the configuration and where each value comes from."
    ),
    "demo": CommandEntry(
        "kvferry.cli.demo:demo",
        "Hold a conversation split in processes and in one; show where time went.",
        "demo",
    ),
    "doctor": CommandEntry("kvferry.cli.doctor:doctor", "Say what this machine can do, and why not."),
    "gateway": CommandEntry("kvferry.cli.engine:gateway", "Run the HTTP gateway over the workers.", "engine"),
    "prefill": CommandEntry("kvferry.cli.engine:prefill", "Run a prefill worker.", "engine"),
    "decode": CommandEntry("kvferry.cli.engine:decode", "Run a decode worker.", "engine"),
    "serve": CommandEntry("kvferry.cli.serve:serve", "Run the cache daemon of this node."),
    "status": CommandEntry("kvferry.cli.status:status", "Show what the daemon holds and does."),
    "top": CommandEntry("kvferry.cli.top:top", "Show the daemon's figures as they change."),
    "clear": CommandEntry("kvferry.cli.admin:clear", "Make the daemon forget blocks."),
    "pin": CommandEntry("kvferry.cli.admin:pin", "Keep blocks of the daemon from eviction."),
    "evict": CommandEntry("kvferry.cli.admin:evict", "Evict blocks from the daemon's memory."),
    "drain": CommandEntry("kvferry.cli.admin:drain", "Make the daemon take no new work and write all."),
    "reload": CommandEntry("kvferry.cli.admin:reload", "Make the daemon read its tokens again."),
    "credentials": CommandEntry(
        "kvferry.cli.credentials:app", "Say who may use the daemon: tenants and their tokens."
    ),
    "inspect": CommandEntry("kvferry.cli.inspect:inspect", "Show, verify or mend what a disk tier holds."),
    "plugins": CommandEntry("kvferry.cli.plugins:plugins", "List the plug-ins and what is missing for them."),
}
"""Command name to where it is; the order is that of ``kvferry --help``."""


class _LazyGroup(TyperGroup):
    """Knows all commands by name and help line, and imports one when it is run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands.update({name: TyperCommand(name, help=entry.help) for name, entry in COMMANDS.items()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command, imported now."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            command = _import_command(name, COMMANDS[name])
        return name, command, rest


def _import_command(name: str, entry: CommandEntry) -> Any:
    module, _, attribute = entry.target.partition(":")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        group = found
    else:
        group = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        group.command(name)(cast("Callable[..., object]", found))
    command = typer.main.get_command(group)
    command.name = name
    return command


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    rich_markup_mode="markdown",  # joins the lines of a docstring's paragraph, leaves [brackets] alone
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvferry {metadata.version('kvferry')}")
        raise typer.Exit


@app.callback()
def _kvferry(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error arose (also: KVFERRY_DEBUG=1).")
    ] = False,
) -> None:
    """Carry the KV cache of large language models between the places where it is made, kept and used."""
    del version
    if show_traceback:
        os.environ["KVFERRY_DEBUG"] = "1"


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the program and exit.

    The exit code is 0, 2 for a wrong configuration, request or command line, 130 after Ctrl-C, else 1.

    Args:
        args: The command line without the program's name; ``None`` takes that of the process.
    """
    args = sys.argv[1:] if args is None else args
    try:
        code = app(args=args, prog_name="kvferry", standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        code = _report(error, args)
        if code is None:
            raise
    sys.exit(code)


def _report(error: Exception, args: Sequence[str]) -> int | None:
    """Print an error that users can mend as one line; ``None`` for anything else, which is a bug."""
    from kvferry.cli.output import plain
    from kvferry.core.log import redact

    text, code = _missing_extra(error, args), EXIT_USAGE
    if text is None:
        errors = sys.modules.get("kvferry.core.errors")  # not loaded: then none of its errors can have come
        if errors is None or not isinstance(error, errors.KVFerryError):
            return None
        text = str(error)
        code = EXIT_USAGE if isinstance(error, (errors.ConfigError, errors.RequestError)) else EXIT_ERROR
    if os.environ.get("KVFERRY_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    print(f"error: {plain(redact(' '.join(text.split())))}", file=sys.stderr)
    return code


def _missing_extra(error: Exception, args: Sequence[str]) -> str | None:
    """What to install for a command whose imports fail, or ``None`` if that is not what happened."""
    if not isinstance(error, ModuleNotFoundError) or (error.name or "kvferry").split(".")[0] == "kvferry":
        return None
    name = next((arg for arg in args if arg in COMMANDS), None)
    if name is None or not COMMANDS[name].extra:
        return None
    from kvferry.core.install_hint import install_hint

    return f"kvferry {name} needs {error.name}: {install_hint(COMMANDS[name].extra)}"
