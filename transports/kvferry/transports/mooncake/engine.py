"""Mooncake's TransferEngine: one a process and setting, since ending one halts all threads for a second."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias, cast

from kvferry.core.clock import deadline_in
from kvferry.core.errors import PluginUnavailableError, TransportError
from kvferry.core.names import resolve
from kvferry.core.trusted_peers import TrustedPeers
from kvferry.transports.mooncake.admission import Network, admit_only, listening
from kvferry.transports.mooncake.aliases import AliasArea
from kvferry.transports.mooncake.library import environment, load_library
from kvferry.transports.region import Access

__all__ = ["DONE", "FAILED", "Engine", "EngineSettings", "Wire", "engine_of", "unavailable"]

_log = logging.getLogger(__name__)
Wire: TypeAlias = Literal["tcp", "rdma"]
DONE: Final = 1
FAILED: Final = -1
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_EVERYBODY: Final = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
_LOOKUP_S: Final = 10.0
_LOGGING: Final = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}


class _Library(Protocol):
    """What is used of ``mooncake.engine.TransferEngine``; 0 is success unless said otherwise."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_register_memory(self, addresses: list[int], sizes: list[int], /) -> int: ...
    def batch_unregister_memory(self, addresses: list[int], /) -> int: ...
    def batch_transfer_async_write(
        self, session: str, local: list[int], remote: list[int], sizes: list[int], /
    ) -> int: ...  # a handle, 0 if refused
    def batch_transfer_async_read(
        self, session: str, local: list[int], remote: list[int], sizes: list[int], /
    ) -> int: ...
    def transfer_check_status(
        self, handle: int, /
    ) -> int: ...  # of the first piece; frees the handle at its end
    def send_probe(self, session: str, /) -> int: ...


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What tells engines of one process from each other.

    Attributes:
        host: Where peers reach this process.
        wire: What bytes go over.
        devices: RDMA devices to use; all if empty.
    """

    host: str
    wire: Wire
    devices: tuple[str, ...] = ()


class Engine:
    """A running engine. Thread safe; lives until the process ends.

    Raises:
        PluginUnavailableError: If the library cannot be loaded.
        TransportError: If it does not start.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._locals: dict[tuple[int, int], int] = {}  # address and size: transfers that use it
        self._known: set[str] = set()
        self._area = AliasArea()
        self._admitted: dict[Network, None] = {}  # in order
        self._admits_all = False
        self._own = _networks_of(settings.host)
        before = listening()
        wire, devices = settings.wire, ",".join(settings.devices)
        if wire == "rdma" and not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
            raise TransportError("mooncake over rdma: this machine has no RDMA device; take wire=tcp")
        own = {"MC_TCP_BIND_ADDRESS": settings.host} | ({"MC_FORCE_TCP": "1"} if wire == "tcp" else {})
        with environment(own | {k: v for k, v in _LOGGING.items() if k not in os.environ}):
            self._library = _load()()
            if self._library.initialize(f"{settings.host}:0", "P2PHANDSHAKE", wire, devices):
                raise TransportError(
                    f"Mooncake's engine does not start for {settings.host} over {wire}; its reason is on "
                    "standard error (MC_LOG_LEVEL=INFO says more)"
                )
        self.session = f"{settings.host}:{self._library.get_rpc_port()}"
        self._ports = [port for inode, port in listening().items() if inode not in before]

    @property
    def registers_locals(self) -> bool:
        """Whether the memory of the side that writes or reads has to be registered as well."""
        return self.settings.wire == "rdma"

    def admit(self, peers: TrustedPeers) -> None:
        """Let ``peers`` reach the engine's ports, and this host; nobody else who was not let in before.

        The library listens on all interfaces and knows no credentials. Where host names are among the peers,
        which are not looked up, or the kernel takes no filter, all are let in, and a line in the log says so.
        """
        why = ""
        with self._lock:
            if names := peers.host_names:
                self._admits_all = True
                why = (
                    f"trusted_peers has host names ({', '.join(sorted(names))}), write addresses or networks"
                )
            self._admitted.update(dict.fromkeys((*self._own, *peers.networks)))
            networks = _EVERYBODY if self._admits_all else tuple(self._admitted)
            try:
                admit_only(networks, self._ports)
            except (OSError, ValueError) as error:
                why = f"the kernel takes no filter for them: {error}"
        if why:
            _log.warning(
                "mooncake engine %s: its ports %s are open to every host that reaches this machine, and know "
                "no credentials: %s", self.session, ", ".join(map(str, self._ports)), why,
            )  # fmt: skip

    # ---- memory ---------------------------------------------------------------------------------

    def open(self, address: int, nbytes: int, access: Access) -> int:
        """Register an alias of memory, and say where it is. Over rdma what has no alias is taken itself.

        Raises:
            TransportError: If it cannot be had.
        """
        try:
            alias = self._area.map(address, nbytes, writable=access == "write")
        except TransportError:
            if self.settings.wire == "tcp":
                raise
            alias = address  # the device's registration ends transfers by itself
        try:
            self._register(alias, nbytes)
        except TransportError:
            if alias != address:
                self._area.unmap(alias)
            raise
        return alias

    def close(self, alias: int, address: int) -> None:
        """Withdraw what :meth:`open` registered: nothing is moved through it when this returns.

        Raises:
            TransportError: If it could not be withdrawn.
        """
        refused = self._library.batch_unregister_memory([alias])
        if alias != address:
            self._area.unmap(alias)
        if refused and (alias == address or self.registers_locals):
            raise TransportError(
                f"Mooncake does not unregister a window ({refused}); its memory stays in use"
            )

    def hold(self, address: int, nbytes: int) -> None:
        """Register memory of this side for a transfer, which may share it with others.

        Raises:
            TransportError: If it cannot be registered.
        """
        with self._lock:
            users = self._locals.get((address, nbytes), 0)
            if not users:
                self._register(address, nbytes)
            self._locals[address, nbytes] = users + 1

    def release(self, address: int, nbytes: int) -> None:
        """The transfer is over."""
        with self._lock:
            self._locals[address, nbytes] -= 1
            if not self._locals[address, nbytes]:
                del self._locals[address, nbytes]
                if refused := self._library.batch_unregister_memory([address]):
                    _log.error("Mooncake does not unregister %d bytes (%d)", nbytes, refused)

    def _register(self, address: int, nbytes: int) -> None:
        if refused := self._library.batch_register_memory([address], [nbytes]):
            raise TransportError(
                f"Mooncake does not register {nbytes} bytes ({refused}); with rdma the limit is ulimit -l, "
                "and memory that is registered already is refused"
            )

    # ---- transfers ------------------------------------------------------------------------------

    def knows(self, session: str) -> bool:
        """Whether the peer answered before and has not failed since: if not, :meth:`meet` it first."""
        with self._lock:
            return session in self._known

    def meet(self, session: str) -> bool:
        """Whether the peer answers; may take a minute if it hangs."""
        if self._library.send_probe(session):
            return False
        with self._lock:
            self._known.add(session)
        return True

    def forget(self, session: str) -> None:
        """Something failed with the peer: look whether it answers before it is used again."""
        with self._lock:
            self._known.discard(session)

    def submit(self, session: str, access: Access, local: int, remote: int, nbytes: int) -> int:
        """Start one piece; its handle for :meth:`status`, 0 if it was refused."""
        library = self._library
        start = library.batch_transfer_async_write if access == "write" else library.batch_transfer_async_read
        return start(session, [local], [remote], [nbytes])

    def status(self, handle: int) -> int:
        """:data:`DONE` or :data:`FAILED`, after which the handle is gone, or something else: under way."""
        return self._library.transfer_check_status(handle)


def _networks_of(host: str) -> list[Network]:
    """The addresses of a host, IPv4 as the library has it.

    Raises:
        TransportError: If it is not known, or could not be looked up in time.
    """
    try:
        found = resolve(host, 0, deadline_in(_LOOKUP_S))
    except (OSError, UnicodeError) as error:
        raise TransportError(
            f"mooncake: host {host!r} could not be looked up: {error}; write its numeric address"
        ) from error
    return [ipaddress.ip_network(where[0]) for family, where in found if family == socket.AF_INET]


_engines: dict[EngineSettings, Engine] = {}
_engines_lock = threading.Lock()


def engine_of(settings: EngineSettings) -> Engine:
    """The engine of this process with these settings; started by the first call.

    Raises:
        PluginUnavailableError: If the library is not installed.
        TransportError: If it does not start.
    """
    with _engines_lock:
        if settings not in _engines:
            _engines[settings] = Engine(settings)
        return _engines[settings]


def _forked() -> None:
    """A child has none of the threads of its parent's engines."""
    global _engines_lock  # noqa: PLW0603 - it belongs to the process
    _engines_lock = threading.Lock()
    _leaked.append(dict(_engines))
    _engines.clear()


_leaked: list[object] = []  # the parent's: ending them here would wait for threads that do not exist
os.register_at_fork(after_in_child=_forked)


def unavailable() -> str:
    """Why the library cannot be loaded, with the remedy; empty if it can."""
    try:
        _load()
    except PluginUnavailableError as error:
        return str(error)
    return ""


def _load() -> Callable[[], _Library]:
    """The library's class."""
    return cast("Callable[[], _Library]", load_library("mooncake.engine").TransferEngine)
