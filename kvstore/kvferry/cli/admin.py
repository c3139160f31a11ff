"""``kvferry clear``, ``pin``, ``evict``, ``drain`` and ``reload``: what an operator changes in a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import msgspec
import typer

from kvferry.cli.daemon_http import Port, TokenOption, UrlOption
from kvferry.cli.options import ConfigFile, Json
from kvferry.cli.output import print_json, say
from kvferry.core.units import parse_nbytes, parse_seconds

if TYPE_CHECKING:
    from kvferry.daemon.admin import AdminDone

__all__ = ["clear", "drain", "evict", "pin", "reload"]

# ruff: noqa: UP045  typer evaluates the annotations, also on Python 3.10

_Tenant = Annotated[
    Optional[str],
    typer.Option("--tenant", metavar="NAME", help="Whose. [default: the token's, else default]"),
]
_Namespace = Annotated[
    Optional[str],
    typer.Option("--namespace", metavar="HEX", help="Its id, or the first 8 digits or more. [default: all]"),
]
_Model = Annotated[
    Optional[str],
    typer.Option(
        "--model", metavar="MODEL", help="Namespaces of that model, or MODEL@REVISION. [default: all]"
    ),
]
_UNDONE = 1


def _tell(done: AdminDone, json: bool) -> None:
    if json:
        print_json(msgspec.to_builtins(done))
    else:
        say(done.text)
    if not done.done:
        raise typer.Exit(_UNDONE)


def clear(
    *,
    namespace: _Namespace = None,
    model: _Model = None,
    tenant: _Tenant = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    json: Json = False,
    config: ConfigFile = None,
) -> None:
    """Make the daemon forget all blocks, in memory and on slower tiers, or those of one namespace or model.

    Also what lies on disk from before its start. `kvferry inspect` shows what is on disk, `kvferry status
    --json` lists the namespaces that it knows.
    """
    from kvferry.daemon.admin import Clear

    port = Port.of(url, config, token_file)
    _tell(port.admin("clear", Clear(tenant=tenant, namespace=namespace, model=model)), json)


def pin(
    keys: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="KEY...", help="Keys of blocks, 64 hexadecimal digits each. [default: all]"),
    ] = None,
    *,
    namespace: _Namespace = None,
    model: _Model = None,
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="For how long, as 90s or 2h.")] = "1h",
    tenant: _Tenant = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    json: Json = False,
    config: ConfigFile = None,
) -> None:
    """Keep blocks of a namespace from eviction for a while; exit code 1 if some are not stored.

    Without keys, all that memory and disk hold of it now.
    """
    from kvferry.daemon.admin import Pin

    port = Port.of(url, config, token_file)
    request = Pin(
        tenant=tenant, namespace=namespace, model=model, keys=tuple(keys or ()), ttl_s=parse_seconds(ttl)
    )
    _tell(port.admin("pin", request), json)


def evict(
    size: Annotated[str, typer.Argument(metavar="SIZE", help="How much, as 512MiB.")],
    *,
    tenant: _Tenant = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    json: Json = False,
    config: ConfigFile = None,
) -> None:
    """Evict blocks from memory, those first that would go first; exit code 1 if less could go."""
    from kvferry.daemon.admin import Evict

    port = Port.of(url, config, token_file)
    _tell(port.admin("evict", Evict(tenant=tenant, nbytes=parse_nbytes(size))), json)


def drain(
    *,
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="How long to wait.")] = "5s",
    resume: Annotated[bool, typer.Option("--resume", help="Take new work again instead.")] = False,
    url: UrlOption = None,
    token_file: TokenOption = None,
    json: Json = False,
    config: ConfigFile = None,
) -> None:
    """Make the daemon take no new work, and write what slower tiers lack. It runs on.

    `/ready` is 503 meanwhile. Exit code 1 if not all was written in time; ask again then. SIGTERM drains and
    ends it.
    """
    from kvferry.daemon.admin import Drain

    port = Port.of(url, config, token_file)
    _tell(port.admin("drain", Drain(timeout_s=parse_seconds(timeout), resume=resume)), json)


def reload(
    *, url: UrlOption = None, token_file: TokenOption = None, json: Json = False, config: ConfigFile = None
) -> None:
    """Make the daemon read again what it can while it runs: the admin token, and the credentials file."""
    from kvferry.daemon.admin import Reload

    _tell(Port.of(url, config, token_file).admin("reload", Reload()), json)
