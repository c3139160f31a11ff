"""The ``BlockStore`` suite against :class:`kvferry.client.Client`, over each way to a daemon elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvferry.client import Client, ClientOptions
from kvferry.testing.blockstore import BlockStoreSuite

# One process for the daemons of a class: each test has a daemon of its own, without the start of a process.
HOST = """
import json, sys
from kvferry.core.config_sources import load_config
from kvferry.daemon import Daemon
daemon = None
for line in sys.stdin:
    if daemon is not None:
        daemon.close()
    assignments, store = json.loads(line)
    config = load_config(None, assignments=assignments).config
    daemon = Daemon(config.model_copy(update={"store": config.store.model_copy(update=store)}))
    print(daemon.addresses[0], flush=True)
"""


class _OverDaemon(BlockStoreSuite):
    options: ClassVar[ClientOptions] = ClientOptions(call_timeout_s=30)
    settings: ClassVar[tuple[str, ...]] = ()
    host: ClassVar[subprocess.Popen[str]]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _host(cls) -> Iterator[None]:
        with subprocess.Popen(
            [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as cls.host:
            yield
            cls.host.kill()

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def listen(self) -> list[str]:
        raise NotImplementedError

    def make_store(self, capacity_nbytes: int, *, lease_s: float = 30.0) -> Any:
        settings = [*self.listen(), *self.settings, "daemon.disk=none"]
        store = {"dram_capacity": capacity_nbytes, "lease": lease_s}  # less than the configuration takes
        assert self.host.stdin is not None
        assert self.host.stdout is not None
        print(json.dumps([settings, store]), file=self.host.stdin, flush=True)
        return Client(self.host.stdout.readline().strip(), self.options)


class TestUnix(_OverDaemon):
    def listen(self) -> list[str]:
        return [f"daemon.socket={self.folder}/d.sock", "daemon.listen=none"]


class TestUnixWithoutSharedMemory(TestUnix):
    options = ClientOptions(call_timeout_s=30, share_memory=False)


class TestUnixReadOnly(TestUnix):
    settings = ("daemon.arena=copy",)


class TestTcp(_OverDaemon):
    def listen(self) -> list[str]:
        return ["daemon.socket=none", "daemon.listen=tcp://127.0.0.1:0"]


class TestAuto(_OverDaemon):
    """Which finds the daemon on this host: its memory is shared."""

    def listen(self) -> list[str]:
        return ["daemon.socket=none", "daemon.listen=auto://127.0.0.1:0"]
