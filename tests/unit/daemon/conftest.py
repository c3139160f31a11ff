"""A daemon in this process with its HTTP port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvferry.cli.daemon_http import Port
from kvferry.client import Client
from kvferry.core.config_sources import load_config
from kvferry.daemon import Daemon
from kvferry.daemon.http import DaemonHttp


class Running(NamedTuple):
    """One daemon, its port and a client."""

    daemon: Daemon
    http: DaemonHttp
    port: Port
    client: Client
    token: str


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    token = tmp_path / "token"
    token.write_text("correct-horse-battery\n")
    token.chmod(0o600)
    given = [
        f"daemon.socket={tmp_path}/d.sock",
        "daemon.listen=none",
        f"daemon.disk={tmp_path}/disk",
        "daemon.disk_capacity=64MiB",
        "store.dram_capacity=4MiB",
        f"daemon.token_file={token}",
    ]
    daemon = Daemon(load_config(None, assignments=given).config)
    try:
        http = DaemonHttp(daemon, "http://127.0.0.1:0")
        http.start()
        try:
            with Client(daemon.addresses[0]) as client:
                yield Running(daemon, http, Port(http.url), client, "correct-horse-battery")
        finally:
            http.close()
    finally:
        daemon.close()
