"""What this machine can do by way of transports, and whether configured addresses can be had."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvferry.core.address import Address, parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.diagnosis import Finding, Probe
from kvferry.core.errors import ConfigError, ConnectError, KVFerryError, PluginUnavailableError
from kvferry.core.install_hint import install_hint
from kvferry.core.units import format_nbytes
from kvferry.transports import get_transport
from kvferry.transports.ip import LISTEN_S, addresses_of, reason_of

if TYPE_CHECKING:
    from kvferry.transports.ucx import UcxReport

__all__ = ["address_probe", "transport_probes"]

_BUFFER_NBYTES: Final = 4 << 20
_LOOK_S: Final = 20.0
_NET: Final = Path("/proc/sys/net")
_INFINIBAND: Final = Path("/sys/class/infiniband")
_NO_SCHEME: Final = frozenset({"http", "https"})  # the gateway's, no transport


def transport_probes() -> list[tuple[str, str, Probe]]:
    """A probe a transport, for RDMA devices, and for the limits of sockets."""
    return [
        ("transports", "tcp", _tcp),
        ("transports", "tls", _tls),
        ("transports", "unix", _unix),
        ("transports", "inproc", lambda: [Finding("transports", "inproc", "works, within one process")]),
        ("transports", "ucx", _ucx),
        ("transports", "auto", _auto),
        ("transports", "mooncake", _mooncake),
        ("rdma", "RDMA", _rdma),
        ("limits", "socket buffers", _buffers),
    ]


def _version(*distributions: str) -> str:
    """Name and version of the first of ``distributions`` that is installed; empty if none is."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return ""


def _tcp() -> Iterator[Finding]:
    families = {"IPv4": (socket.AF_INET, "127.0.0.1"), "IPv6": (socket.AF_INET6, "::1")}
    works = []
    for name, (family, host) in families.items():
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((host, 0))
            works.append(name)
    text = f"{' and '.join(works) or 'neither IPv4 nor IPv6'} on loopback"
    yield Finding(
        "transports", "tcp", text, "ok" if works else "fail", "what everything else falls back to",
        "" if works else "ip link set lo up",
    )  # fmt: skip


def _tls() -> Iterator[Finding]:
    why = "tls:// needs TLS 1.3"
    if ssl.HAS_TLSv1_3:
        yield Finding("transports", "tls", f"{ssl.OPENSSL_VERSION}, TLS 1.3", why=why)
    else:
        remedy = "use a Python that is built with OpenSSL 1.1.1 or newer"
        yield Finding("transports", "tls", f"{ssl.OPENSSL_VERSION} has no TLS 1.3", "warn", why, remedy)


def _unix() -> Iterator[Finding]:
    from kvferry.transports.auto.place import socket_path

    why = "processes of one machine pass memory over it; auto:// keeps its sockets in this folder"
    try:
        path = Path(socket_path())
    except ConnectError as error:
        remedy = "export XDG_RUNTIME_DIR to a folder of your own"
        yield Finding("transports", "unix", f"works, but not for auto://: {error}", "warn", why, remedy)
        return
    yield Finding("transports", "unix", f"works; sockets of auto:// in {path.parent}", why=why)


def _ucx() -> Iterator[Finding]:
    why = "RDMA between machines, through UCXX"
    package = _version("ucxx-cu12", "ucxx-cu13", "ucxx")
    try:
        report = _look_at_ucx()
    except PluginUnavailableError as error:
        yield Finding("transports", "ucx", str(error), "ok", f"{why}; optional", install_hint("ucx"))
        return
    except KVFerryError as error:
        remedy = "do what it says; see the UCX_… variables and the limits of this process (ulimit -a)"
        yield Finding("transports", "ucx", str(error), "warn", why, remedy)
        return
    ways = ", ".join("/".join(pair) for pair in report.transports)
    yield Finding("transports", "ucx", f"UCX {report.version}, {package}: {ways}", why=why)
    settings = ", ".join(f"{one.name}={one.value} ({one.source})" for one in report.settings)
    yield Finding(
        "transports", "ucx settings", settings,
        why="the environment decides first, then the address, then kvferry, then UCX itself",
    )  # fmt: skip
    rdma = "RDMA is used" if not report.rdma_remedy else f"no RDMA: {report.rdma_remedy}"
    known = bool(report.rdma_remedy) and bool(_devices())
    yield Finding(
        "transports", "ucx over RDMA", rdma, "warn" if known else "ok", why,
        report.rdma_remedy if known else "",
    )  # fmt: skip


def _look_at_ucx(address: str = "") -> UcxReport:
    """Never in this process, which UCX may end."""
    from kvferry.transports.ucx.report import look_from_outside

    return look_from_outside(_LOOK_S, address)


def _auto() -> Iterator[Finding]:
    from kvferry.transports.auto.choosing import ucx_problem
    from kvferry.transports.auto.place import host_identity

    problem = ucx_problem("", _look_at_ucx)
    near = "unix on this host" if host_identity() else "tcp on this host"
    far = f"tcp to others ({problem})" if problem else "ucx to others with RDMA, else tcp"
    yield Finding("transports", "auto", f"{near}, {far}", why="what auto://host:port takes")


def _mooncake() -> Iterator[Finding]:
    from kvferry.transports.mooncake import unavailable

    package = _version(
        "mooncake-transfer-engine-musa", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"
    )
    why = "one-sided reads and writes; its MUSA build registers device memory with the NIC"
    if not package:
        yield Finding(
            "transports", "mooncake", "not installed", "ok", f"{why}; optional", install_hint("mooncake")
        )
    elif problem := unavailable():
        yield Finding("transports", "mooncake", f"{package}: {problem}", "warn", why, problem)
    else:
        yield Finding("transports", "mooncake", package, why=why)


def _devices() -> list[str]:
    with suppress(OSError):
        return sorted(entry.name for entry in _INFINIBAND.iterdir())
    return []


def _rdma() -> Iterator[Finding]:
    why = "ucx and mooncake reach other machines without copies and with little CPU"
    devices = _devices()
    if not devices:
        yield Finding(
            "rdma", "devices", f"none ({_INFINIBAND} is {'empty' if _INFINIBAND.is_dir() else 'not there'})",
            why=why, remedy="an RDMA NIC needs its driver and rdma-core; without one tcp is used",
        )  # fmt: skip
        return
    for device in devices:
        for port in sorted((_INFINIBAND / device / "ports").glob("*")):
            state = _text(port / "state").partition(": ")[2] or "not known"
            text = f"{state}, {_text(port / 'rate') or 'rate not known'}, {_text(port / 'link_layer')}"
            active = state == "ACTIVE"
            yield Finding(
                "rdma", f"{device}:{port.name}", text, "ok" if active else "warn", why,
                "" if active else f"bring the link up, then look at: rdma link show {device}/{port.name}",
            )  # fmt: skip
    if not any(os.access(node, os.R_OK | os.W_OK) for node in Path("/dev/infiniband").glob("uverbs*")):
        yield Finding(
            "rdma", "access", "no /dev/infiniband/uverbs* can be opened", "warn", why,
            "container: --device=/dev/infiniband --ulimit memlock=-1; else join the group that owns them",
        )  # fmt: skip


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _buffers() -> Iterator[Finding]:
    why = "the kernel sizes the buffers of tcp by itself up to these; far links need more"
    found = {name: _text(_NET / name).split() for name in ("ipv4/tcp_rmem", "ipv4/tcp_wmem")}
    for name, values in found.items():
        key = f"net.{name.replace('/', '.')}"
        if len(values) != 3:
            yield Finding("limits", key, "not known", why=why)
            continue
        low = int(values[2]) < _BUFFER_NBYTES
        yield Finding(
            "limits", key, f"{values[0]} to {values[2]} bytes", "warn" if low else "ok", why,
            f"sudo sysctl -w {key}='{values[0]} {values[1]} {16 << 20}'" if low else "",
        )  # fmt: skip
    for name in ("core/rmem_max", "core/wmem_max"):
        text = _text(_NET / name)
        shown = format_nbytes(int(text)) if text.isdigit() else "not known"
        yield Finding(
            "limits", f"net.{name.replace('/', '.')}", shown, why="what programs may ask for themselves"
        )
    pages = _text(_NET / "ipv4/tcp_mem").split()
    if len(pages) == 3:
        size = format_nbytes(int(pages[2]) * os.sysconf("SC_PAGE_SIZE"))
        yield Finding("limits", "net.ipv4.tcp_mem", f"{size} for all connections", why="beyond it tcp stalls")


# -- addresses of the configuration ------------------------------------------------------------------------


def address_probe(option: str, url: str, *, listens: bool) -> tuple[str, str, Probe]:
    """A probe of an address that the configuration has.

    Args:
        option: Its key, such as ``decode.listen``.
        url: The address.
        listens: Whether this machine is to listen there; otherwise it dials, which is not tried.
    """
    return "addresses", option, lambda: [_address(option, url, listens=listens)]


def _address(option: str, url: str, *, listens: bool) -> Finding:
    why = "the configuration asks for it"
    try:
        parsed = parse_url(url)
        note = "" if parsed.scheme in _NO_SCHEME else _check_transport(parsed, listens=listens)
    except KVFerryError as error:
        remedy = f"do what it says, or change {option}"
        return Finding("addresses", option, f"{url}: {error}", "fail", why, remedy)
    if note:
        return Finding("addresses", option, f"{url}: {note}", "warn", why, f"change {option}, or leave it so")
    if not listens:
        return Finding("addresses", option, f"{url}: dialled when it is needed", why=why)
    try:
        _try_bind(parsed)
    except ConnectError as error:
        return Finding(
            "addresses", option, str(error), "fail", why, f"do what it says, or choose another with {option}"
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Finding(
                "addresses", option, f"{url}: taken, maybe by kvferry itself", "warn", why,
                f"if it is not: stop what listens there (ss -ltnp), or move {option}",
            )  # fmt: skip
        text = f"{url}: cannot be listened on: {reason_of(error)}"
        return Finding("addresses", option, text, "fail", why, f"choose another address with {option}")
    return Finding("addresses", option, f"{url}: free", why=why)


def _check_transport(parsed: Address, *, listens: bool) -> str:
    """Raise what keeps the address from being used; else what is worth a word."""
    get_transport(parsed.scheme)
    if parsed.scheme == "ucx":
        _look_at_ucx(parsed.url)
    if parsed.scheme == "tls":
        from kvferry.transports.tls_context import TlsAddress

        found = TlsAddress.parse(parsed.url)
        _ = found.server_context() if listens else found.client_context()
    if parsed.scheme == "unix":
        from kvferry.transports.unix_options import parse_unix

        parse_unix(parsed.url)
    return _check_auto(parsed) if parsed.scheme == "auto" else ""


def _check_auto(parsed: Address) -> str:
    from kvferry.transports.auto.choosing import remedy_for_wish, ucx_problem
    from kvferry.transports.auto.options import parse_auto

    options = parse_auto(parsed.url)[1]
    problem = ucx_problem(options.require, _look_at_ucx) if options.wish == "ucx" else ""
    if not problem:
        return ""
    if options.fallback:
        return f"asked for {options.require}, falls back to {', '.join(options.fallback)}: {problem}"
    raise ConfigError(remedy_for_wish(options, ["unix", "tcp"], problem))


def _try_bind(parsed: Address) -> None:
    """Bind as a listener would, without listening.

    Raises:
        OSError: What keeps it from that.
        ConnectError: If its host is not known.
    """
    if parsed.scheme == "unix":
        folder = Path(parsed.path).parent
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(folder))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "this user may not write in that folder", str(folder))
        return
    if parsed.port is None:
        return
    family, sockaddr = addresses_of(parsed, deadline_in(LISTEN_S), passive=True)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(sockaddr)
        if parsed.port:
            probe.listen(1)  # only this finds a listener that allows its address to be shared
