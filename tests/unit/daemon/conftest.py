"""A daemon in this process with its HTTP port; and folders of daemons with credentials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from kvferry.cli.daemon_http import Port
from kvferry.client import Client, ClientOptions
from kvferry.core.config_sources import load_config
from kvferry.daemon import Daemon
from kvferry.daemon.credentials import Limits, Right, edited, new_credential
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


_SMALL = ("store.dram_capacity=4MiB", "daemon.disk=none")


class Site:
    """A folder with a credentials file, daemons over it, and clients of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.path = folder / "credentials.json"
        self.stack = stack
        self.url = f"unix://{folder}/d.sock"

    def tenant(self, name: str, limits: Limits = Limits()) -> None:  # noqa: B008
        with edited(self.path) as box:
            tenants = {**box[0].tenants, name: limits}
            box[0] = msgspec.structs.replace(box[0], tenants=tenants)

    def token(self, tenant: str, *rights: Right) -> bytes:
        credential, token = new_credential(tenant, rights or ("read", "write"))
        with edited(self.path) as box:
            tenants = {tenant: Limits(), **box[0].tenants}
            credentials = (*box[0].credentials, credential)
            box[0] = msgspec.structs.replace(box[0], tenants=tenants, credentials=credentials)
        return token.encode()

    def revoke(self, token: bytes) -> None:
        with edited(self.path) as box:
            left = tuple(c for c in box[0].credentials if not token.startswith(b"kvf1_" + c.id.encode()))
            assert len(left) < len(box[0].credentials)
            box[0] = msgspec.structs.replace(box[0], credentials=left)

    def start(self, *settings: str) -> Daemon:
        own = (f"daemon.socket={self.folder}/d.sock", "daemon.listen=none", f"daemon.credentials={self.path}")
        daemon = Daemon(load_config(None, assignments=[*own, *_SMALL, *settings]).config)
        self.stack.callback(daemon.close)
        return daemon

    def client(self, token: bytes | None, url: str | None = None, **options: object) -> Client:
        client = Client(url or self.url, ClientOptions(credential=token, **options))  # type: ignore[arg-type]
        return self.stack.enter_context(client)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)
