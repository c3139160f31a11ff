"""``kvferry serve``: the cache daemon."""

from __future__ import annotations

import gc
from typing import Annotated, Optional

import typer

from kvferry.cli.options import ConfigFile, Sets, absolute, load_and_log

__all__ = ["serve"]

# ruff: noqa: UP045  typer evaluates the annotations, also on Python 3.10


def serve(
    *,
    socket: Annotated[
        Optional[str],
        typer.Option("--socket", metavar="PATH|none", help="Socket for this machine. [daemon.socket]"),
    ] = None,
    listen: Annotated[
        Optional[list[str]],
        typer.Option("--listen", metavar="URL|none", help="Take clients there; repeatable. [daemon.listen]"),
    ] = None,
    capacity: Annotated[
        Optional[str],
        typer.Option("--capacity", metavar="SIZE", help="Memory for blocks. [store.dram_capacity]"),
    ] = None,
    disk: Annotated[
        Optional[str],
        typer.Option("--disk", metavar="DIR|none", help="Folder of the disk tier. [daemon.disk]"),
    ] = None,
    disk_capacity: Annotated[
        Optional[str],
        typer.Option("--disk-capacity", metavar="SIZE", help="What it may take. [daemon.disk_capacity]"),
    ] = None,
    http: Annotated[
        Optional[str],
        typer.Option("--http", metavar="URL|none", help="Status, metrics and live page there. [daemon.http]"),
    ] = None,
    credentials: Annotated[
        Optional[str],
        typer.Option(
            "--credentials", metavar="FILE|none", help="Tenants and their tokens. [daemon.credentials]"
        ),
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Run the cache daemon: it keeps blocks in memory and on disk for every engine of this node.

    Without options: 1 GiB of memory, 16 GiB of disk in the cache folder, a socket for this machine,
    `tcp://127.0.0.1:8450`, and a live page at `http://127.0.0.1:8451`.
    Prints one line `ready role=daemon listen='URL …' …` when it takes clients.
    SIGTERM ends it in good order: what is under way is finished, and what is not on disk yet is written.
    A second one ends it at once.
    """
    gc.disable()  # nothing of a start is garbage, and looking for it takes a sixth of the time
    flags = {
        "daemon.socket": ("--socket", absolute(socket, "--socket")),
        "daemon.listen": ("--listen", listen or None),
        "store.dram_capacity": ("--capacity", capacity),
        "daemon.disk": ("--disk", absolute(disk, "--disk")),
        "daemon.disk_capacity": ("--disk-capacity", disk_capacity),
        "daemon.http": ("--http", http),
        "daemon.credentials": ("--credentials", absolute(credentials, "--credentials")),
    }
    loaded = load_and_log(config, sets, flags)
    from kvferry.daemon.main import run_daemon

    run_daemon(loaded)
