"""``transport.<scheme>.put``, ``.get`` and ``.rpc``: messages over a channel, beside a bare socket."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from kvferry.bench.ceilings import MemcpyCold
from kvferry.bench.link.bare import BareLink, Certificates, Kind
from kvferry.bench.link.channel import Link
from kvferry.bench.link.memory import parts_at_once
from kvferry.bench.link.mooncake import MooncakeTe
from kvferry.bench.link.peer import PeerProcess, bare_ports, open_servers
from kvferry.bench.link.requests import Operation
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, percentile, summarise
from kvferry.bench.scenarios.transport import TransportOptions
from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.wire import Channel, ChannelOptions

__all__ = ["Ends", "ends", "link_params", "run_link"]

_RPC_NBYTES = 4096
_WAIT_S = 60.0
_BARE: Mapping[str, tuple[str, Kind]] = {
    "tcp": ("raw_socket", "tcp"),
    "tls": ("bare_ssl", "tls"),
    "unix": ("raw_unix", "unix"),
    "ucx": ("raw_socket", "tcp"),
}


class _Mover(Protocol):
    """Who moves parts: the subject, and most baselines."""

    def put(self, batch: int, count: int) -> Sample: ...
    def get(self, batch: int, count: int) -> Sample: ...


@dataclass(frozen=True)
class Ends:
    """Where the subject and the bare socket of one scheme are served.

    Attributes:
        address: Of the channel.
        cpu_s: Processor seconds of the process that serves it, if known.
        bare: Makes the baseline for parts of a size; its name.
    """

    address: str
    cpu_s: Callable[[], float] | None = None
    bare: tuple[str, Callable[[int], BareLink]] | None = None


@contextlib.contextmanager
def ends(scheme: str, options: TransportOptions, *, url_options: str = "") -> Iterator[Ends]:
    """The other ends for ``scheme``: child processes, or what ``options.address`` names."""
    with contextlib.ExitStack() as stack:
        if options.address:
            yield _remote(options)
        elif scheme == "inproc":
            server = open_servers("inproc://kvferry-bench", options.walk_nbytes)
            stack.callback(server.close)
            yield Ends(server.address)
        else:
            yield _children(scheme, options, url_options, stack)


def _remote(options: TransportOptions) -> Ends:
    """A peer on another machine, with the bare socket that it names."""
    hello = ChannelOptions(role="bench", session="bench")
    channel = Channel.connect(options.address, hello, deadline_in(_WAIT_S))
    port = bare_ports(channel).get("tcp")
    channel.close()
    host = parse_url(options.address, default_port=0).host
    if port is None or not host:
        return Ends(options.address)
    make = partial(_bare_link, "tcp", (host, port), options, None, lambda: 0.0)
    return Ends(options.address, None, ("raw_socket", make))


def _children(scheme: str, options: TransportOptions, url_options: str, stack: contextlib.ExitStack) -> Ends:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-"))
    certificates = _certificates(Path(folder)) if scheme == "tls" else None
    query = "&".join(filter(None, (certificates.options if certificates else "", url_options)))
    place = f"{folder}/channel" if scheme == "unix" else "127.0.0.1:0"
    url = f"{scheme}://{place}" + (f"?{query}" if query else "")
    peer = PeerProcess(options.walk_nbytes, listen=(url,))
    stack.callback(peer.close)
    name, kind = _BARE[scheme]
    where = f"{folder}/bare" if kind == "unix" else "127.0.0.1"
    other = PeerProcess(options.walk_nbytes, bare=((kind, where),), certificates=certificates)
    stack.callback(other.close)
    make = partial(_bare_link, kind, other.bare[0], options, certificates, other.cpu_s)
    return Ends(peer.addresses[0], peer.cpu_s, (name, make))


def _bare_link(
    kind: Kind,
    address: tuple[str, int] | str,
    options: TransportOptions,
    certificates: Certificates | None,
    cpu_s: Callable[[], float],
    nbytes: int,
) -> BareLink:
    return BareLink(kind, address, nbytes, options.walk_nbytes, certificates=certificates, server_cpu_s=cpu_s)


def _certificates(folder: Path) -> Certificates:
    """A certificate for loopback that signs itself, good for two days."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ConfigError("transport.tls makes its certificate with the program openssl: install it")
    files = Certificates(str(folder / "cert"), str(folder / "key"), str(folder / "cert"))
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    name = ("-subj", "/CN=kvferry-bench", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    command = [openssl, "req", "-x509", *curve, *name, "-keyout", files.key, "-out", files.cert]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    if done.returncode:
        raise ConfigError(f"openssl could not make a certificate: {done.stderr.strip().splitlines()[-1:]}")
    return files


def link_params(
    scheme: str, nbytes: int, batch: int, lanes: int, checksum: str, options: TransportOptions
) -> dict[str, Param]:
    """What changes the work."""
    return {
        "transport": scheme,
        "nbytes": nbytes,
        "batch": batch,
        "lanes": lanes,
        "checksum": checksum,
        "peer": "remote" if options.address else "thread" if scheme == "inproc" else "process",
        "walk_nbytes": options.walk_nbytes,
        "cpus": os.cpu_count() or 1,
    }


def run_link(scenario: str, options: TransportOptions, progress: Progress) -> Iterator[Result]:
    """One scenario over all sizes, batches, lanes and checksums."""
    _, scheme, kind = scenario.split(".")
    for lanes in options.lanes if scheme == "tcp" and not options.address else (1,):
        extra = f"lanes={lanes}" if lanes > 1 else ""
        with contextlib.ExitStack() as stack:
            other = stack.enter_context(ends(scheme, options, url_options=extra))
            one_lane = stack.enter_context(ends(scheme, options)) if lanes > 1 else None
            for checksum in options.checksums:
                if kind == "rpc":
                    yield _rpc(scenario, other, lanes, checksum, options, progress)
                    continue
                for nbytes in options.sizes:
                    yield from _moves(scenario, other, one_lane, nbytes, lanes, checksum, options, progress)


def _moves(
    scenario: str,
    other: Ends,
    one_lane: Ends | None,
    nbytes: int,
    lanes: int,
    checksum: str,
    options: TransportOptions,
    progress: Progress,
) -> Iterator[Result]:
    """Puts, or gets, of one size."""
    _, scheme, kind = scenario.split(".")
    walk = options.walk_nbytes
    with contextlib.ExitStack() as stack:
        link = Link(other.address, nbytes, walk, checksum=checksum == "xxh3", peer_cpu_s=other.cpu_s)
        stack.callback(link.close)
        movers: dict[str, _Mover] = {"subject": link}
        if other.bare is not None:
            name, make = other.bare
            bare = make(nbytes)
            stack.callback(bare.close)
            movers[name] = bare
        if one_lane is not None:
            single = Link(one_lane.address, nbytes, walk, checksum=checksum == "xxh3")
            stack.callback(single.close)
            movers["one_lane"] = single
        mooncake = None
        if scheme == "tcp" and "mooncake" in options.alternatives and not options.address:
            mooncake = movers["mooncake_te"] = MooncakeTe(nbytes, walk)
            stack.callback(mooncake.close)
        for batch in sorted({parts_at_once(nbytes, batch, walk) for batch in options.batches}):
            count = max(1, options.run_nbytes // (nbytes * batch))
            subjects: dict[str, Callable[[], Sample]] = {
                name: partial(mover.put if kind == "put" else mover.get, batch, count)
                for name, mover in movers.items()
            }
            subjects["memcpy_cold"] = MemcpyCold(nbytes, count * batch, walk_nbytes=walk)
            params = link_params(scheme, nbytes, batch, lanes, checksum, options)
            yield measure(
                scenario, params, subjects, link, mooncake, options, progress,
                operation=Operation.PUT if kind == "put" else Operation.GET, batch=batch, count=count,
            )  # fmt: skip


def measure(
    scenario: str,
    params: dict[str, Param],
    subjects: Mapping[str, Callable[[], Sample]],
    link: Link,
    mooncake: MooncakeTe | None,
    options: TransportOptions,
    progress: Progress,
    *,
    operation: Operation,
    batch: int,
    count: int,
) -> Result:
    """Paired rounds, then a round whose bytes are compared; failures are counted and left out."""
    failed, operations = link.failed, link.operations
    label = " ".join([scenario, *(f"{k}={params[k]}" for k in ("nbytes", "batch", "lanes", "checksum"))])
    samples = run_paired(subjects, runs=options.runs, warmup=options.warmup, progress=progress, label=label)
    verified = link.verify(operation, batch, count)
    params = {**params, "operations": link.operations - operations, "failed": link.failed - failed}
    if mooncake is not None:
        params["mooncake_te_failed"] = mooncake.failed
    values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
    return summarise(scenario, params, "GB/s", values, samples=samples["subject"], verified=verified)


def _rpc(
    scenario: str, other: Ends, lanes: int, checksum: str, options: TransportOptions, progress: Progress
) -> Result:
    """Requests and answers of 4 KiB; the value is a round's median."""
    _, scheme, _ = scenario.split(".")
    with contextlib.ExitStack() as stack:
        walk = min(options.walk_nbytes, 16 << 20)
        link = Link(other.address, _RPC_NBYTES, walk, checksum=checksum == "xxh3", peer_cpu_s=other.cpu_s)
        stack.callback(link.close)
        subjects: dict[str, Callable[[], Sample]] = {"subject": partial(link.echo, options.requests)}
        if other.bare is not None:
            name, make = other.bare
            bare = make(_RPC_NBYTES)
            stack.callback(bare.close)
            subjects[name] = partial(bare.echo, options.requests)
        samples = run_paired(
            subjects,
            runs=options.runs,
            warmup=options.warmup,
            progress=progress,
            label=f"{scenario} lanes={lanes} checksum={checksum}",
        )
        verified = link.verify(Operation.ECHO, 1, options.requests)
        params: dict[str, Param] = {
            **link_params(scheme, _RPC_NBYTES, 1, lanes, checksum, options),
            "operations": link.operations,
            "failed": link.failed,
        }
    values = {
        name: [percentile(s.latencies, 0.5) * 1e6 for s in found if s.latencies]
        for name, found in samples.items()
    }
    return summarise(scenario, params, "us", values, samples=samples["subject"], verified=verified)
