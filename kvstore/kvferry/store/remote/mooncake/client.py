"""One client of Mooncake Store, made when it is first needed and again after it could not be made."""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import math
import os
import threading
from collections.abc import Collection
from typing import Final, cast

from kvferry.core.clock import deadline_in, time_left
from kvferry.core.errors import PluginUnavailableError, TierError
from kvferry.core.names import connect_by, resolve
from kvferry.store.remote.mooncake.library import Library
from kvferry.store.remote.mooncake.memory import Registered
from kvferry.store.remote.mooncake.options import MooncakeOptions
from kvferry.transports.mooncake.admission import admit_only, listening
from kvferry.transports.mooncake.library import environment, load_library

__all__ = ["StoreClient", "give_client_back", "take_client"]

_log = logging.getLogger(__name__)

_PROBE_S: Final = 1.0
_MASTER_S: Final = 2.0
_LOGGING: Final = {
    "GLOG_minloglevel": "3",
    "MC_LOG_LEVEL": "ERROR",
    "MC_YLT_LOG_LEVEL": "4",
    "MC_STORE_CLIENT_METRIC": "0",
}  # fmt: skip  what is wrong is told once, by the tier; the library would repeat it on standard error


class StoreClient:
    """A client that the tiers of this process with the same settings share. Thread safe.

    Starting one and ending one hold the interpreter's lock, for as long as the master takes to answer, and a
    second: so it is asked for a sign of life first, and its time is bounded.

    Args:
        options: Of the first tier that uses it.

    Attributes:
        registered: The memory that was registered with it.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._library: Library | None = None
        self._closed = False
        self.registered = Registered()

    @property
    def running(self) -> bool:
        """Whether it was started."""
        return self._library is not None

    def library(self, deadline: float) -> Library:
        """The library's client, started if it was not yet.

        Raises:
            TierError: If it cannot be had by the deadline.
        """
        found = self._library
        if found is not None:
            return found
        if not self._lock.acquire(timeout=max(0.0, time_left(deadline))):
            raise TierError(f"the client of {self._options.master} did not start by the deadline")
        try:
            if self._closed:
                raise TierError("the tier is closed")
            if self._library is None:
                self._library = self._start(min(deadline, deadline_in(self._options.timeout_s)))
            return self._library
        finally:
            self._lock.release()

    def _start(self, deadline: float) -> Library:
        options = self._options
        place = options.address().host_port
        _probe(options, deadline)
        patience = math.ceil(options.timeout_s)
        own = {
            "MC_TCP_BIND_ADDRESS": options.host,
            "MC_RPC_TIMEOUT_MS": str(max(1, int(1000 * min(options.timeout_s, _MASTER_S)))),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(patience),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(patience),
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        }
        if options.wire == "tcp":
            own["MC_FORCE_TCP"] = "1"
        addresses = _addresses_of(options.host, deadline)
        before = listening()
        with environment({k: v for k, v in (_LOGGING | own).items() if k not in os.environ}):
            library = _made()
            code = library.setup(
                f"{options.host}:0", options.metadata, options.contribute_nbytes, 0, options.wire,
                ",".join(options.devices or ()), place,
            )  # fmt: skip
        if code:
            raise TierError(
                f"Mooncake's client does not start for master {place} over {options.wire} ({code}); "
                "MC_LOG_LEVEL=INFO GLOG_minloglevel=0 says more on standard error"
            )
        self._admit(before, addresses)
        return library

    def _admit(self, before: Collection[int], addresses: Collection[str]) -> None:
        """Let nobody but trusted peers and this host reach the library's ports: they know no credentials."""
        ports = [port for inode, port in listening().items() if inode not in before]
        try:
            networks = [ipaddress.ip_network(address) for address in {"127.0.0.1", *addresses}]
            admit_only([*networks, *self._options.peers().networks], ports)
        except (OSError, ValueError) as error:
            _log.warning(
                "mooncake client: its ports %s are open to every host that reaches this machine, and know no "
                "credentials: the kernel takes no filter for them: %s", ", ".join(map(str, ports)), error,
            )  # fmt: skip

    def close(self, *, ended: bool) -> None:
        """End it. It is left as it is unless all that it did has ``ended`` and the master answers."""
        with self._lock:
            self._closed = True
            library, self._library = self._library, None
        self.registered.close()
        if library is None:
            return
        try:
            if not ended:
                raise TierError("requests are under way")
            _probe(self._options, deadline_in(_PROBE_S))
        except TierError as error:
            _log.info("mooncake client of master %s is not ended: %s", self._options.master, error)
            ctypes.pythonapi.Py_IncRef(
                ctypes.py_object(library)
            )  # else the interpreter's end would wait for it
        else:
            library.close()


_clients: dict[tuple[object, ...], tuple[StoreClient, int]] = {}  # with the number of their users
_clients_lock = threading.Lock()


def take_client(options: MooncakeOptions) -> StoreClient:
    """The client of these settings; every user ends with :func:`give_client_back`."""
    with _clients_lock:
        client, users = _clients.get(_settings(options)) or (StoreClient(options), 0)
        _clients[_settings(options)] = client, users + 1
        return client


def give_client_back(options: MooncakeOptions, *, ended: bool) -> None:
    """One user less: the last one ends it. ``ended`` as of :meth:`StoreClient.close`."""
    with _clients_lock:
        client, users = _clients.pop(_settings(options))
        if users > 1:
            _clients[_settings(options)] = client, users - 1
            return
    client.close(ended=ended)


def _settings(options: MooncakeOptions) -> tuple[object, ...]:
    return (
        options.master, options.metadata, options.host, options.wire, options.devices,
        options.contribute_nbytes, options.timeout_s, options.trusted_peers,
    )  # fmt: skip


def _made() -> Library:
    try:
        module = load_library("mooncake.store")
    except PluginUnavailableError as error:
        raise TierError(str(error)) from error
    return cast("Library", module.MooncakeDistributedStore())


def _addresses_of(host: str, deadline: float) -> set[str]:
    """Those of this machine's own name.

    Raises:
        TierError: If it is not known, or could not be looked up by the deadline.
    """
    try:
        return {str(where[0]) for _, where in resolve(host, 0, deadline)}
    except (OSError, UnicodeError) as error:
        raise TierError(
            f"host {host!r} of the tier could not be looked up: {error}; write its numeric address"
        ) from error


def _probe(options: MooncakeOptions, deadline: float) -> None:
    """See that the master answers: it ends a connection on which something senseless was said.

    Raises:
        TierError: If it does not.
    """
    address = options.address()
    patience = max(0.01, min(_PROBE_S, time_left(deadline)))
    try:
        with connect_by(address.host, address.port or 0, deadline_in(patience)) as sock:
            sock.settimeout(patience)
            sock.sendall(bytes(64))
            sock.recv(1)
    except ConnectionError as error:
        if isinstance(error, ConnectionRefusedError):
            raise TierError(f"master {address.host_port} cannot be reached: {error.strerror}") from error
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise TierError(f"master {address.host_port} cannot be reached: {why}") from error
