"""A real Mooncake Store for tests, on loopback: a master, and a process that gives it memory.

It needs ``mooncake-transfer-engine-non-cuda``, whose wheel has the master.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import KVFerryError, PluginUnavailableError
from kvferry.testing.redis_server import free_ports
from kvferry.transports.mooncake.library import environment, load_library

__all__ = ["MooncakePool", "master_binary"]

_START_S: Final = 30.0
_STOP_S: Final = 10.0
_QUIET: Final = {"GLOG_minloglevel": "3", "MC_FORCE_TCP": "1", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
_HOLDER: Final = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1:0", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
os._exit(0)
"""


def master_binary() -> Path:
    """The master's program, out of the wheel.

    Raises:
        PluginUnavailableError: If it is not installed.
    """
    found = importlib.util.find_spec("mooncake")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    paths = [Path(folder, "mooncake_master") for folder in folders]
    for path in paths:
        if path.exists():
            return path
    raise PluginUnavailableError("no mooncake_master: pip install mooncake-transfer-engine-non-cuda")


class MooncakePool:
    """A master and a holder of memory; both are killed at the end by their process ids.

    Args:
        nbytes: Memory of the holder.
        lease_s: How long the master keeps from eviction what was asked for.

    Attributes:
        address: Of the master, ``host:port``.
        master: Its process.
        holder: The other one.
    """

    def __init__(self, nbytes: int = 64 << 20, *, lease_s: float = 5.0) -> None:
        self._nbytes = nbytes
        self._lease_s = lease_s
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-mooncake-")
        port, self._metrics_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self.master = self._start_master()
        try:
            self.holder = self._start_holder()
        except BaseException:
            self.master.kill()
            self.master.wait(_STOP_S)
            self._folder.cleanup()
            raise

    def __enter__(self) -> MooncakePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_master(self) -> subprocess.Popen[bytes]:
        port = self.address.rpartition(":")[2]
        process = subprocess.Popen(
            [
                str(master_binary()), f"--rpc_port={port}", "--rpc_address=127.0.0.1",
                f"--metrics_port={self._metrics_port}", "--metrics_host=127.0.0.1", "--rpc_thread_num=2",
                f"--default_kv_lease_ttl={int(1000 * self._lease_s)}", "--enable_metric_reporting=false",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=self._folder.name,
        )  # fmt: skip
        deadline = deadline_in(_START_S)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 1):
                return process
            if process.poll() is not None or is_past(deadline):
                process.kill()
                process.wait(_STOP_S)
                raise KVFerryError("mooncake_master did not start")
            time.sleep(0.01)

    def _start_holder(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, self.address, str(self._nbytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | _QUIET,
        )  # fmt: skip
        assert process.stdout is not None
        if process.stdout.readline().strip() != "0":
            process.kill()
            process.wait(_STOP_S)
            raise KVFerryError("Mooncake's client that is to hold memory did not start")
        return process

    def restart_master(self) -> None:
        """Kill the master and start another at the same port; what it knew is lost."""
        self.master.kill()
        self.master.wait(_STOP_S)
        self.master = self._start_master()

    def client(self) -> Any:  # noqa: ANN401  the library has no types
        """A client of the library's own, over nothing of kvferry; the caller closes it."""
        with environment(_QUIET):
            store = load_library("mooncake.store").MooncakeDistributedStore()
            code = store.setup("127.0.0.1:0", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", self.address)
        if code:
            raise KVFerryError(f"Mooncake's client did not start ({code})")
        return store

    def close(self) -> None:
        """Kill both and remove the folder."""
        for process in (self.holder, self.master):
            process.kill()
            process.wait(_STOP_S)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._folder.cleanup()
