"""The other end of the transport benchmarks: ``python -m kvferry.bench.link.peer``, or served by hand.

As a child process it reads what to serve as one line of JSON, prints one line with the addresses, and ends
when its standard input closes (so it never outlives the benchmark). On another machine
``kvferry bench server`` runs the same until it is stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvferry import transports
from kvferry.bench.link.bare import BareServer, Certificates, Kind
from kvferry.bench.link.memory import MemoryPool
from kvferry.bench.link.service import LinkService
from kvferry.core.address import parse_url
from kvferry.core.errors import KVFerryError
from kvferry.wire import Channel, ChannelOptions, ChannelServer

__all__ = ["BARE_CAPABILITY", "BareKind", "LinkServer", "PeerProcess", "bare_ports", "open_servers"]

BareKind: TypeAlias = Kind | Literal["ucxx"]

BARE_CAPABILITY = "bench-bare-"
"""A peer on another machine names the ports of its bare sockets so: ``bench-bare-tcp=40000``."""
_WAIT_S = 60.0


def _options(capabilities: tuple[str, ...] = ()) -> ChannelOptions:
    # off here leaves the choice to the other end: payloads carry a checksum unless both want none
    return ChannelOptions(role="bench", session="bench-peer", checksum=False, capabilities=capabilities)


def open_servers(
    listen: str, *, bare_walk_nbytes: int | None = None, pool: MemoryPool | None = None
) -> LinkServer:
    """Serve the benchmarks on ``listen``.

    Args:
        listen: The address.
        bare_walk_nbytes: Serve a bare TCP socket beside it, which walks through so much.
        pool: Memory that others use in turn with these; else their own.

    Raises:
        ConnectError: If it cannot be bound.
        ConfigError: If the address is malformed.
    """
    pool = pool or MemoryPool()
    service = LinkService(pool)
    listener = transports.listen(listen)
    capabilities: tuple[str, ...] = ()
    bare = None
    if bare_walk_nbytes is not None:
        asked = parse_url(listen, default_port=0)
        bare = BareServer("tcp", (asked.host or "127.0.0.1", 0), bare_walk_nbytes, pool=pool)
        capabilities = (f"{BARE_CAPABILITY}tcp={bare.port}",)
    return LinkServer(ChannelServer(listener, _options(capabilities), service.serve, name="bench"), bare)


class LinkServer:
    """A server of channels, and the bare socket beside it.

    Attributes:
        address: Of the channels.
    """

    def __init__(self, channels: ChannelServer, bare: BareServer | None) -> None:
        self._channels = channels
        self._bare = bare
        self.address = channels.address

    def close(self) -> None:
        """End both."""
        self._channels.close()
        if self._bare is not None:
            self._bare.close()


def bare_ports(channel: Channel) -> dict[str, int]:
    """Ports of the bare sockets that the peer of ``channel`` named."""
    found = {}
    for capability in channel.peer.capabilities:
        kind, _, port = capability.removeprefix(BARE_CAPABILITY).partition("=")
        if capability.startswith(BARE_CAPABILITY) and port.isdigit():
            found[kind] = int(port)
    return found


class PeerProcess:
    """A child process that serves channels, bare sockets, or both, which then use the same memory in turn.

    Args:
        walk_nbytes: What it walks through.
        listen: Addresses of channels.
        bare: Bare sockets: ``(kind, path or host)``.
        certificates: For those over TLS.
        cpu: The only one that it may run on.
    """

    def __init__(
        self,
        walk_nbytes: int,
        *,
        listen: tuple[str, ...] = (),
        bare: tuple[tuple[BareKind, str], ...] = (),
        certificates: Certificates | None = None,
        cpu: int | None = None,
    ) -> None:
        request: dict[str, object] = {"walk": walk_nbytes, "listen": listen, "bare": bare, "cpu": cpu}
        if certificates is not None:
            request["certificates"] = [certificates.cert, certificates.key, certificates.ca]
        command = [sys.executable, "-m", "kvferry.bench.link.peer"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()

    @cached_property
    def _answer(self) -> dict[str, Any]:
        """What it serves; waited for when it is asked for first, so that several can start at once."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait(_WAIT_S)
            raise KVFerryError(f"the benchmark's other process ended with code {code}; is memory short?")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def addresses(self) -> list[str]:
        """Of the channels, in order."""
        return list(self._answer["addresses"])

    @property
    def bare(self) -> list[tuple[str, int] | str]:
        """Addresses of the bare sockets, in order."""
        return [host if port == 0 else (host, port) for host, port in self._answer["bare"]]

    def cpu_s(self) -> float:
        """Processor seconds that it has used."""
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it; a second call does nothing."""
        if self._child.stdin is not None and not self._child.stdin.closed:
            self._child.communicate(timeout=_WAIT_S)


def _serve(request: Mapping[str, object]) -> tuple[list[LinkServer], dict[str, object]]:
    if isinstance(cpu := request.get("cpu"), int):
        os.sched_setaffinity(0, {cpu})  # before there is another thread
    walk = request["walk"]
    listen, bare = request["listen"], request["bare"]
    assert isinstance(walk, int)
    assert isinstance(listen, list)
    assert isinstance(bare, list)
    files = request.get("certificates")
    certificates = Certificates(*files) if isinstance(files, list) else None
    pool = MemoryPool()
    servers = [open_servers(str(url), pool=pool) for url in listen]
    sockets = []
    for kind, where in bare:
        if kind == "ucxx":
            from kvferry.bench.link.ucxx import UcxxServer  # needs the extra

            sockets.append((where, UcxxServer(where, pool).port))
            continue
        server = BareServer(kind, where if kind == "unix" else (where, 0), walk, certificates, pool)
        sockets.append((where, server.port))
    return servers, {"addresses": [server.address for server in servers], "bare": sockets}


def main() -> None:
    """Serve until standard input closes, as it does however the benchmark ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    servers, answer = _serve(json.loads(sys.stdin.readline()))
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for server in servers:
        server.close()


if __name__ == "__main__":
    main()
