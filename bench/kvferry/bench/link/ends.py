"""The other ends of a benchmark run: child processes that are started when they are first needed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from kvferry.bench.link.bare import BareLink, Certificates, Kind
from kvferry.bench.link.memory import LinkMemory
from kvferry.bench.link.peer import BareKind, PeerProcess, bare_ports, open_servers
from kvferry.bench.own_cpu import cpu_pair
from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.testing.redis_server import RedisServer
from kvferry.wire import Channel, ChannelOptions

if TYPE_CHECKING:
    from kvferry.bench.link.ucxx import UcxxLink

__all__ = ["Ends", "LinkEnds", "make_certificates"]

_WAIT_S = 60.0
_UCXX: Final = "ucxx"
_BARE: Mapping[str, tuple[str, Kind]] = {
    "tcp": ("raw_socket", "tcp"),
    "tls": ("bare_ssl", "tls"),
    "unix": ("raw_unix", "unix"),
    "ucx": ("raw_socket", "tcp"),
}


@dataclass(frozen=True)
class Ends:
    """Where the subject and the bare socket of one scheme are served.

    Attributes:
        address: Of the channel.
        cpu_s: Processor seconds of the process that serves it, if known.
        bare: The baseline's name, and what makes it with memory of this end.
        cpu: Of the end that measures, if each end has one of its own.
        ucxx: Where bare UCXX is served, by the process of the subject.
    """

    address: str
    cpu_s: Callable[[], float] | None = None
    bare: tuple[str, Callable[[LinkMemory], BareLink]] | None = None
    cpu: int | None = None
    ucxx: tuple[str, int] | None = None

    def bare_ucxx(self, tls: str, memory: LinkMemory) -> UcxxLink:
        """Bare UCXX over ``tls``, with the options and the window of the transport ``ucx``."""
        from kvferry.bench.link.ucxx import UcxxLink
        from kvferry.transports.ucx.lane import WINDOW
        from kvferry.transports.ucx.settings import Options, context_config

        assert self.ucxx is not None
        assert self.cpu_s is not None
        config = context_config(Options((("TLS", tls),)))
        return UcxxLink(self.ucxx, config, WINDOW, memory, server_cpu_s=self.cpu_s)


class LinkEnds:
    """Makes other ends and keeps them for the length of a run.

    Args:
        walk_nbytes: What each of them walks through.
        address: A peer on another machine instead; empty: child processes.
    """

    def __init__(self, walk_nbytes: int, address: str = "") -> None:
        self._walk_nbytes = walk_nbytes
        self._address = address
        self._stack = contextlib.ExitStack()
        self._found: dict[tuple[str, str, bool], Ends] = {}
        self._redis: RedisServer | None = None
        self._folder: Path | None = None
        self._files: Certificates | None = None

    def __enter__(self) -> LinkEnds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._stack.close()

    def of(self, scheme: str, options: str = "", *, pinned: bool = False) -> Ends:
        """The other end for ``scheme``, its address with ``options``.

        With ``pinned`` each end of it, and of the bare socket, has a CPU of its own, if there are two; see
        :mod:`kvferry.bench.own_cpu`.

        Raises:
            KVFerryError: If a process cannot be started, or the peer not be reached.
        """
        key = (scheme, options, pinned)
        if key not in self._found:
            pair = cpu_pair() if pinned else (None, None)
            self._found[key] = self._remote() if self._address else self._local(scheme, options, pair)
        return self._found[key]

    def _remote(self) -> Ends:
        """A peer on another machine, with the bare socket that it names."""
        hello = ChannelOptions(role="bench", session="bench")
        channel = Channel.connect(self._address, hello, deadline_in(_WAIT_S))
        port = bare_ports(channel).get("tcp")
        channel.close()
        host = parse_url(self._address, default_port=0).host
        if port is None or not host:
            return Ends(self._address)
        return Ends(self._address, None, ("raw_socket", partial(BareLink, "tcp", (host, port))))

    def _local(self, scheme: str, options: str, cpus: tuple[int | None, int | None]) -> Ends:
        if scheme == "inproc":
            server = open_servers("inproc://kvferry-bench")
            self._stack.callback(server.close)
            return Ends(server.address)
        certificates = self._certificates() if scheme == "tls" else None
        query = "&".join(filter(None, (certificates.options if certificates else "", options)))
        place = str(self._path(f"channel-{len(self._found)}")) if scheme == "unix" else "127.0.0.1:0"
        url = f"{scheme}://{place}" + (f"?{query}" if query else "")
        here, there = cpus
        name, kind = _BARE[scheme]
        where = f"{place}-bare" if kind == "unix" else "127.0.0.1"
        bare: tuple[tuple[Kind, str], ...] = ((kind, where),)
        # one process for both, so that they find the same memory; but UCX looks for progress without sleeping
        ucx = scheme == "ucx"
        peer = self._process(
            listen=(url,), bare=((_UCXX, where),) if ucx else bare, certificates=certificates, cpu=there
        )
        beside = self._process(bare=bare, cpu=there) if ucx else peer
        make = partial(
            BareLink, kind, beside.bare[0], certificates=certificates, server_cpu_s=beside.cpu_s
        )  # fmt: skip
        ucxx = peer.bare[0] if ucx else None
        assert not isinstance(ucxx, str)
        return Ends(peer.addresses[0], peer.cpu_s, (name, make), here, ucxx)

    def _process(
        self,
        *,
        listen: tuple[str, ...] = (),
        bare: tuple[tuple[BareKind, str], ...] = (),
        certificates: Certificates | None = None,
        cpu: int | None = None,
    ) -> PeerProcess:
        found = PeerProcess(self._walk_nbytes, listen=listen, bare=bare, certificates=certificates, cpu=cpu)
        self._stack.callback(found.close)
        return found

    def redis(self) -> int:
        """The port of a Valkey server of our own."""
        if self._redis is None:
            self._redis = self._stack.enter_context(RedisServer())
        return self._redis.port

    def _path(self, name: str) -> Path:
        if self._folder is None:  # short: a socket's path has a limit
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-")))
        return self._folder / name

    def _certificates(self) -> Certificates:
        if self._files is None:
            self._files = make_certificates(self._path("tls"))
        return self._files


def make_certificates(folder: Path) -> Certificates:
    """A certificate for loopback that signs itself, good for two days.

    Raises:
        ConfigError: If the program ``openssl`` is not there or fails.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ConfigError("transport.tls makes its certificate with the program openssl: install it")
    folder.mkdir(exist_ok=True)
    files = Certificates(str(folder / "cert"), str(folder / "key"), str(folder / "cert"))
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    name = ("-subj", "/CN=kvferry-bench", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    command = [openssl, "req", "-x509", *curve, *name, "-keyout", files.key, "-out", files.cert]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    if done.returncode:
        raise ConfigError(f"openssl could not make a certificate: {done.stderr.strip().splitlines()[-1:]}")
    return files
