"""``kvferry credentials``: tenants and tokens of the daemon, in its credentials file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import msgspec
import typer

from kvferry.cli.options import ConfigFile, Json, absolute
from kvferry.cli.output import print_json, print_table, say
from kvferry.core.errors import ConfigError, RequestError
from kvferry.core.units import (
    format_nbytes,
    format_rate,
    format_seconds,
    parse_nbytes,
    parse_rate,
    parse_seconds,
)

if TYPE_CHECKING:
    from kvferry.daemon.credentials import Credential, CredentialFile, Limits, Right

__all__ = ["app"]

# ruff: noqa: UP045  typer evaluates the annotations, also on Python 3.10

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Tenants and tokens of the daemon, in its credentials file. A running daemon reads it again at "
    "`kvferry reload` or SIGHUP.",
)

_Connections = Annotated[
    Optional[str], typer.Option("--connections", metavar="N", help="Connections at once, or none.")
]
_File = Annotated[
    Optional[str],
    typer.Option("--file", metavar="FILE", help="The credentials file. [default: daemon.credentials]"),
]
_Out = Annotated[
    Optional[str],
    typer.Option("--out", metavar="FILE", help="Write the token there, mode 600, instead of showing it."),
]
_Dram = Annotated[Optional[str], typer.Option("--dram", metavar="SIZE", help="Memory of the tenant.")]
_Disk = Annotated[Optional[str], typer.Option("--disk", metavar="SIZE", help="Its disk, all tiers together.")]
_Rate = Annotated[
    Optional[str], typer.Option("--rate", metavar="RATE", help="What it may move, as 500MB/s; or none.")
]
_Requests = Annotated[
    Optional[str],
    typer.Option("--requests", metavar="N", help="Requests a second, or none."),
]


def _path(file: str | None, config: str | None) -> Path:
    from kvferry.core.config_sources import load_config
    from kvferry.daemon.credentials import credentials_path

    setting = absolute(file, "--file") if file else load_config(config).config.daemon.credentials
    path = credentials_path(setting)
    if path is None:
        raise ConfigError("daemon.credentials is none: say with --file where the credentials file is")
    return path


def _limits(old: Limits | None, **given: str | None) -> Limits:
    """The limits of a tenant with what an option gives, as text."""
    from kvferry.daemon.credentials import Limits

    values = msgspec.to_builtins(old or Limits())
    for name, text in given.items():
        if text is not None:
            values[name] = None if text == "none" else _PARSERS[name](text)
            try:
                msgspec.convert({name: values[name]}, Limits)
            except msgspec.ValidationError as error:
                what = str(error).partition(" - at ")[0].replace("Expected", "expected")
                raise ConfigError(f"--{name} {text}: {what}") from None
    return msgspec.convert(values, Limits)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{text!r} is no number of connections")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no number of requests") from None


_PARSERS: dict[str, Callable[[str], object]] = {
    "dram": parse_nbytes,
    "disk": parse_nbytes,
    "rate": parse_rate,
    "requests": _number,
    "connections": _whole,
}


class _Place:
    """Where a token goes: the screen, or a new file, made before there is a token that could be lost."""

    def __init__(self, out: str | None) -> None:
        self._out = out
        self._number = -1
        if out is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                self._number = os.open(out, flags, 0o600)
            except OSError as error:
                there = "; nothing is written over: remove it, or name another file"
                remedy = there if isinstance(error, FileExistsError) else ""
                raise ConfigError(
                    f"the token cannot be written to {out}: {error.strerror}{remedy}"
                ) from error

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._number >= 0:
            os.close(self._number)
            if kind is not None and self._out is not None:
                Path(self._out).unlink(missing_ok=True)

    def give(self, credential: Credential, token: str, json: bool) -> None:
        """The token, this once."""
        if self._number >= 0:
            os.write(self._number, f"{token}\n".encode())
        if json:
            print_json(_public(credential) | ({} if self._out is not None else {"token": token}))
            return
        say(f"credential {credential.id} of {credential.tenant}: {', '.join(credential.rights)}")
        say(token if self._out is None else f"its token is in {self._out}")


def _public(credential: Credential) -> dict[str, object]:
    """What may be shown of a credential."""
    return {
        "id": credential.id,
        "tenant": credential.tenant,
        "rights": list(credential.rights),
        "expires_at": credential.expires_at,
        "note": credential.note,
    }


def _find(file: CredentialFile, credential_id: str) -> Credential:
    found = next((one for one in file.credentials if one.id == credential_id), None)
    if found is None:
        raise RequestError(f"there is no credential {credential_id!r}; kvferry credentials list shows them")
    return found


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose blocks the token opens.")],
    *,
    right: Annotated[
        Optional[list[str]],
        typer.Option(
            "--right", metavar="RIGHT", help="read, write, admin; may be repeated. [default: read, write]"
        ),
    ] = None,
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="For people.")] = "",
    expires: Annotated[
        Optional[str],
        typer.Option("--expires", metavar="TIME", help="Valid so long, as 12h. [default: ever]"),
    ] = None,
    dram: _Dram = None,
    disk: _Disk = None,
    rate: _Rate = None,
    requests: _Requests = None,
    connections: _Connections = None,
    out: _Out = None,
    file: _File = None,
    json: Json = False,
    config: ConfigFile = None,
) -> None:
    """Make a token for a tenant, who is made too if he is new. It is shown this once and kept nowhere."""
    from kvferry.daemon.credentials import RIGHTS, edited, new_credential

    wanted = tuple(dict.fromkeys(right or ["read", "write"]))
    rights: tuple[Right, ...] = tuple(one for one in RIGHTS if one in wanted)
    if len(rights) < len(wanted):
        raise ConfigError(f"{', '.join(wanted)}: rights are {', '.join(RIGHTS)}")
    over = None if expires is None else time.time() + parse_seconds(expires)
    credential, token = new_credential(tenant, rights, note=note, expires_at=over)
    with _Place(out) as place:
        with edited(_path(file, config)) as box:
            old = box[0]
            limits = _limits(
                old.tenants.get(tenant),
                dram=dram,
                disk=disk,
                rate=rate,
                requests=requests,
                connections=connections,
            )
            box[0] = msgspec.structs.replace(
                old, tenants={**old.tenants, tenant: limits}, credentials=(*old.credentials, credential)
            )
        place.give(credential, token, json)


@app.command()
def rotate(
    credential_id: Annotated[str, typer.Argument(metavar="ID", help="Of the credential that is replaced.")],
    *,
    keep: Annotated[
        str, typer.Option("--keep", metavar="TIME", help="How long the old token stays valid, as 1h.")
    ] = "0s",
    out: _Out = None,
    file: _File = None,
    json: Json = False,
    config: ConfigFile = None,
) -> None:
    """Make a new token in place of an old one, with the same tenant, rights and end."""
    from kvferry.daemon.credentials import edited, new_credential

    keep_s = parse_seconds(keep)
    with _Place(out) as place:
        with edited(_path(file, config)) as box:
            old = _find(box[0], credential_id)
            new, token = new_credential(old.tenant, old.rights, note=old.note, expires_at=old.expires_at)
            others = [one for one in box[0].credentials if one is not old]
            if keep_s > 0:
                until = min(time.time() + keep_s, old.expires_at or float("inf"))
                others.append(msgspec.structs.replace(old, expires_at=until))
            box[0] = msgspec.structs.replace(box[0], credentials=(*others, new))
        place.give(new, token, json)


@app.command()
def remove(
    credential_id: Annotated[
        Optional[str], typer.Argument(metavar="ID", help="Of the credential to remove.")
    ] = None,
    *,
    tenant: Annotated[
        Optional[str], typer.Option("--tenant", metavar="NAME", help="Remove that tenant and all its tokens.")
    ] = None,
    file: _File = None,
    json: Json = False,
    config: ConfigFile = None,
) -> None:
    """Remove a token, or a tenant with all of its tokens. What it has on disk stays there."""
    from kvferry.daemon.credentials import edited

    if (credential_id is None) == (tenant is None):
        raise ConfigError("say which: the ID of a credential, or --tenant NAME")
    with edited(_path(file, config)) as box:
        old = box[0]
        if tenant is not None and tenant not in old.tenants:
            raise RequestError(f"there is no tenant {tenant!r}; kvferry credentials list shows them")
        gone = [one for one in old.credentials if one.tenant == tenant]
        if credential_id is not None:
            gone = [_find(old, credential_id)]
        box[0] = msgspec.structs.replace(
            old,
            tenants={name: one for name, one in old.tenants.items() if name != tenant},
            credentials=tuple(one for one in old.credentials if one not in gone),
        )
    if json:
        print_json({"removed": [one.id for one in gone], "tenant": tenant})
    else:
        say(f"{len(gone)} credentials{f' and tenant {tenant}' if tenant is not None else ''} were removed")


@app.command()
def limit(
    tenant: Annotated[str, typer.Argument(metavar="TENANT")],
    *,
    dram: _Dram = None,
    disk: _Disk = None,
    rate: _Rate = None,
    requests: _Requests = None,
    connections: _Connections = None,
    file: _File = None,
    json: Json = False,
    config: ConfigFile = None,
) -> None:
    """Change what a tenant may use; `none` takes a limit away. Counts from `kvferry reload`."""
    from kvferry.daemon.credentials import edited

    with edited(_path(file, config)) as box:
        old = box[0].tenants.get(tenant)
        if old is None:
            raise RequestError(f"there is no tenant {tenant!r}; kvferry credentials add makes one")
        new = _limits(old, dram=dram, disk=disk, rate=rate, requests=requests, connections=connections)
        box[0] = msgspec.structs.replace(box[0], tenants={**box[0].tenants, tenant: new})
    if json:
        print_json({"tenant": tenant, **{name: getattr(new, name) for name in new.__struct_fields__}})
    else:
        say(f"{tenant}: {_described(new)}")


def _described(limits: Limits) -> str:
    words = [
        f"memory {format_nbytes(limits.dram) if limits.dram else 'a share'}",
        f"disk {format_nbytes(limits.disk) if limits.disk else 'a share'}",
    ]
    words += [format_rate(limits.rate)] if limits.rate else []
    words += [f"{limits.requests:g} requests/s"] if limits.requests else []
    words += [f"{limits.connections} connections"] if limits.connections else []
    return ", ".join(words)


@app.command("list")
def show(*, file: _File = None, json: Json = False, config: ConfigFile = None) -> None:
    """Show tenants, their limits, and their credentials; never a token."""
    from kvferry.daemon.credentials import read_credentials

    found = read_credentials(_path(file, config))
    if json:
        tenants = {
            name: {field: getattr(one, field) for field in one.__struct_fields__}
            for name, one in found.tenants.items()
        }
        print_json({"tenants": tenants, "credentials": [_public(one) for one in found.credentials]})
        return
    now = time.time()
    rows: list[tuple[str, ...]] = []
    for name, limits in found.tenants.items():
        own = [one for one in found.credentials if one.tenant == name]
        rows += [
            (name, _described(limits), one.id, ", ".join(one.rights), _valid(one, now), one.note)
            for one in own
        ]
        rows += [] if own else [(name, _described(limits), "none", "", "", "")]
    print_table(["tenant", "limits", "id", "rights", "valid for", "note"], rows)


def _valid(credential: Credential, now: float) -> str:
    if credential.expires_at is None:
        return "ever"
    return "over" if credential.is_over(now) else format_seconds(credential.expires_at - now)
