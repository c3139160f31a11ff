"""The endpoint: windows of this process, and transfers into those of others."""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import threading
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from kvferry.core.clock import deadline_in
from kvferry.core.errors import AuthError, ConfigError, KVFerryError, TransferTimeoutError, TransportError
from kvferry.core.trusted_peers import TrustedPeers
from kvferry.transports.choices import announce_region, withdraw_region
from kvferry.transports.mooncake.engine import Engine, EngineSettings, Wire, engine_of
from kvferry.transports.mooncake.grants import WindowGrant
from kvferry.transports.mooncake.transfers import MooncakeTransfer
from kvferry.transports.region import (
    Access,
    RegionPart,
    RegionTransfer,
    RegionTransport,
    Window,
    check_access,
    check_memory,
)

__all__ = ["MooncakeRegions", "device_memory"]

_log = logging.getLogger(__name__)
_CLOSE_S: Final = 5.0
_left_behind: list[MooncakeTransfer] = []  # the engine still uses their memory
_left_lock = threading.Lock()


class _MooncakeWindow(Window):
    def __init__(self, owner: MooncakeRegions, engine: Engine, view: memoryview, access: Access) -> None:
        self._owner = owner
        self._engine = engine
        self._view: memoryview | None = view  # held until the window is closed
        self._lock = threading.Lock()
        self._address = _address(view)
        self._alias = engine.open(self._address, view.nbytes, access)
        self._grant = WindowGrant.new(engine.session, self._alias, view.nbytes, access)

    @property
    def grant(self) -> bytes:
        return self._grant.pack()

    def close(self) -> None:
        with self._lock:
            if self._view is None:
                return
            self._engine.close(self._alias, self._address)
            self._view = None
        self._owner.forget(self)


class MooncakeRegions(RegionTransport):
    """One-sided transfers through Mooncake's TransferEngine, without a metadata server.

    All endpoints of a process with the same host, wire and devices share one engine, which runs until the
    process ends. Windows are opened on shared memory only (an arena's, or ``shared_memory``), unless the
    wire is rdma. While it is open, ``auto`` tells the peers of this process that it is there.

    Args:
        trusted_peers: Hosts, addresses or networks whose grants are accepted; there is no default. Only from
            these addresses and networks, and from this host, the library's ports are reached, while no host
            name is among them: names are not looked up.
        host: Where peers reach this process: an IPv4 address or a name.
        wire: ``tcp`` or ``rdma``; with the build for it, rdma moves :func:`device_memory` too.
        devices: RDMA devices to use; all if empty.

    Raises:
        ConfigError: Without trusted peers, or for a host that cannot be used.
        PluginUnavailableError: If the library is not installed.
        TransportError: If its engine does not start.
    """

    name: ClassVar[str] = "mooncake"

    def __init__(
        self,
        *,
        trusted_peers: Sequence[str] = (),
        host: str = "127.0.0.1",
        wire: Wire = "tcp",
        devices: Sequence[str] = (),
    ) -> None:
        self._trusted = TrustedPeers(trusted_peers)
        if not self._trusted:
            raise ConfigError(
                "mooncake moves nothing without trusted_peers: name the hosts or networks that may read and "
                "write windows of this process"
            )
        _check_host(host)
        if wire not in ("tcp", "rdma"):
            raise ConfigError(f"mooncake: wire {wire!r}, there are tcp and rdma")
        self._engine = engine_of(EngineSettings(host, wire, tuple(devices)))
        self._engine.admit(self._trusted)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._windows: set[_MooncakeWindow] = set()
        self._active: set[MooncakeTransfer] = set()
        announce_region(self.name)

    def __repr__(self) -> str:
        return f"<MooncakeRegions {self._engine.session} over {self._engine.settings.wire}>"

    def trusts(self, host: str) -> bool:
        """See :meth:`RegionTransport.trusts`."""
        return host in self._trusted

    # ---- windows --------------------------------------------------------------------------------

    def open_window(self, view: memoryview, access: Access) -> Window:
        """See :meth:`RegionTransport.open_window`."""
        self._require_open()
        check_access(access)
        check_memory(view)
        if not view.c_contiguous or not view.nbytes or (access == "write" and view.readonly):
            raise TransportError(
                f"a window of {view.nbytes} bytes to {access} needs memory that is contiguous"
                + (" and writable" if access == "write" else "")
            )
        window = _MooncakeWindow(self, self._engine, view.cast("B"), access)
        with self._lock:
            if not self._closed:
                self._windows.add(window)
                return window
        window.close()
        raise TransportError(f"{self!r} is closed")

    def forget(self, window: _MooncakeWindow) -> None:
        """A window was closed."""
        with self._lock:
            self._windows.discard(window)

    # ---- transfers ------------------------------------------------------------------------------

    def write(self, grant: bytes, parts: Sequence[RegionPart]) -> RegionTransfer:
        """See :meth:`RegionTransport.write`."""
        return self._start(grant, parts, "write")

    def read(self, grant: bytes, parts: Sequence[RegionPart]) -> RegionTransfer:
        """See :meth:`RegionTransport.read`."""
        if any(part.local.readonly for part in parts):
            raise TransportError("read-only memory cannot be read into")
        return self._start(grant, parts, "read")

    def _start(self, packed: bytes, parts: Sequence[RegionPart], access: Access) -> RegionTransfer:
        grant = WindowGrant.parse(packed)
        grant.require(access)
        if grant.host not in self._trusted:
            raise AuthError(
                f"{grant}: {grant.host} is not among the trusted_peers of this process ({self._trusted})"
            )
        if not all(part.local.c_contiguous for part in parts):
            raise TransportError("local memory must be contiguous")
        moves = grant.moves(parts, [_address(part.local) for part in parts])
        transfer = MooncakeTransfer(self._engine, grant, moves, parts)
        self._require_open(transfer)
        if self._engine.knows(grant.session):
            transfer.start()
        elif moves:
            name = f"kvferry-mooncake-meet-{grant.session}"
            threading.Thread(target=transfer.meet_and_start, name=name, daemon=True).start()
        return transfer

    def _require_open(self, transfer: MooncakeTransfer | None = None) -> None:
        """Refuse after the end; else look after transfers that nobody waits for, and add one."""
        if os.getpid() != self._pid:
            raise TransportError(f"{self!r} was made by process {self._pid}, which forked this one")
        with self._lock:
            if self._closed:
                raise TransportError(f"{self!r} is closed")
            active = list(self._active)
            if transfer is not None and not transfer.over:
                self._active.add(transfer)
        ended = {one for one in active if _is_over(one)}
        if ended:
            with self._lock:
                self._active -= ended

    def close(self) -> None:
        """See :meth:`RegionTransport.close`; waits 5 s at most for what is under way."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            windows, active = list(self._windows), list(self._active)
        withdraw_region(self.name)
        error = TransportError(f"{self!r} was closed")
        for transfer in active:
            transfer.cancel(error)
        try:
            for window in windows:
                window.close()
        finally:
            self._settle(active)

    def _settle(self, active: Sequence[MooncakeTransfer]) -> None:
        limit = deadline_in(_CLOSE_S)
        for transfer in active:
            try:
                transfer.wait(limit)
            except TransferTimeoutError:
                _log.error("%r: still under way; its memory stays in use until it ends", transfer)
                with _left_lock:
                    _left_behind.append(transfer)
            except KVFerryError as error:
                _log.debug("%r: %s", transfer, error)
        with _left_lock:
            _left_behind[:] = [one for one in _left_behind if not _is_over(one)]


def _is_over(transfer: MooncakeTransfer) -> bool:
    """Whether it has ended, one way or the other."""
    if not transfer.over:
        try:
            return transfer.poll()
        except KVFerryError:
            return True
    return True


def device_memory(pointer: int, nbytes: int, owner: object = None) -> memoryview:
    """Device memory in the form that ``open_window`` and ``RegionPart`` take; for ``wire="rdma"`` only.

    Only addresses of it are used, by the library. **Nobody may look into it:** that reads host memory at an
    address of the device, which ends the process.

    Args:
        pointer: Where it begins, as of ``Tensor.data_ptr()``; of memory that Mooncake's build knows.
        nbytes: Its size.
        owner: What keeps it, a tensor: held for as long as a view of it is.

    Raises:
        ConfigError: If there is nothing at such a place.
    """
    if pointer <= 0 or nbytes <= 0:
        raise ConfigError(f"device memory of {nbytes} bytes at {pointer:#x}: give a pointer and its size")
    place = (ctypes.c_ubyte * nbytes).from_address(pointer)
    place.owner = owner  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(place).data  # of the format "B", which ctypes has not


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


def _check_host(host: str) -> None:
    try:
        address: object = ipaddress.ip_address(host)
    except ValueError:
        return  # a name
    if not isinstance(address, ipaddress.IPv4Address) or address.is_unspecified:
        raise ConfigError(f"mooncake: host {host!r} must be the IPv4 address, or name, that peers dial")
