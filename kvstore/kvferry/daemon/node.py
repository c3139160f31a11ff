"""The daemon of a node: its store, its ports, its sessions."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

import msgspec

from kvferry.core.clock import is_past, time_left
from kvferry.core.errors import ConfigError, ConnectError, KVFerryError, TierError, UnknownPluginError
from kvferry.core.open_files import lack_of_files
from kvferry.core.process import listening, trim_heap
from kvferry.daemon.checks import (
    listen_urls,
    peer_token,
    require_other_peers,
    require_peer_tokens,
    store_config,
)
from kvferry.daemon.credentials import credentials_path
from kvferry.daemon.disks import folders_of, require_disks, room_notes
from kvferry.daemon.drained import Drained, unwritten
from kvferry.daemon.files import fitting_connections
from kvferry.daemon.operations import Operations
from kvferry.daemon.service import Service
from kvferry.daemon.sessions import Sessions
from kvferry.daemon.tenants import DEFAULT_TENANT, Grant, Tenants
from kvferry.daemon.work import Work
from kvferry.store.open import open_store
from kvferry.store.tiered import TieredStore
from kvferry.wire.channel import Channel
from kvferry.wire.daemon_messages import TENANTS
from kvferry.wire.options import ChannelOptions
from kvferry.wire.server import ChannelServer
from kvferry.wire.shared_arena import SHARED_ARENA

if TYPE_CHECKING:
    from kvferry.client.peer import PeerClient
    from kvferry.core.config import Config, StoreConfig

__all__ = ["DEFAULT_TENANT", "Daemon"]

log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
_TRIM_TICKS: Final = 10
_DRAIN_PAUSE_S: Final = 0.02


class Daemon:
    """A cache daemon in this process: it serves from the moment that it is made. Thread safe.

    Args:
        config: Sections ``daemon``, ``store`` and ``wire``.

    Attributes:
        sessions: Who is connected, and what they hold.
        tenants: Whose store is whose, and who was let in.
        epoch: Name of this run.
        work: Requests under way.
        operations: What requests have cost.
        draining: No new work is taken.
        lease_s: How long leases last.
        max_payload_nbytes: Most bytes in one answer.
        max_connections: Of each address; ``wire.max_connections``, or what there are descriptors for.
        notes: What was not as it should be at the start, though it could be begun with.

    Raises:
        ConfigError: If options cannot work together, an address is taken or memory is not there; nothing
            stays open.
    """

    def __init__(self, config: Config) -> None:
        urls = listen_urls(config)
        store = store_config(config)
        require_other_peers(store, urls)
        require_peer_tokens(config, store)
        require_disks(config, store)
        self.config = config
        self.sessions = Sessions()
        self.work = Work()
        self.operations = Operations()
        self.draining = False
        self.lease_s = store.lease
        self.max_payload_nbytes = config.wire.max_payload
        self.started_at = time.monotonic()
        self.epoch = uuid.uuid4().hex
        self._servers: list[ChannelServer] = []
        self._closed = threading.Event()
        self._close_lock = threading.Lock()
        self.tenants = Tenants(store, credentials_path(config.daemon.credentials), self._open)
        try:
            self.max_connections, note = fitting_connections(config, len(urls), self._disk_folders(store))
            for number, (url, option) in enumerate(urls):
                self._servers.append(self._listen(url, option, number))
        except BaseException:
            self._close_servers()
            self.tenants.close()
            raise
        self.notes = (*self._room_notes(store), *note)
        self._ticker = threading.Thread(target=self._tick, name="kvferry-daemon-tick", daemon=True)
        self._ticker.start()

    def _disk_folders(self, store: StoreConfig) -> int:
        return len(self.stores) * sum(len(folders_of(tier)) for tier in store.tiers if tier.kind == "disk")

    def _room_notes(self, store: StoreConfig) -> tuple[str, ...]:
        used: Counter[str] = Counter()
        for tenant in self.stores.values():
            for tier, figures in tenant.stats().per_tier.items():
                used[tier] += int(figures.get("used_nbytes", 0))
        notes = tuple(room_notes(self.config, store, used))
        for note in notes:
            log.warning("%s", note)
        return notes

    def _open(self, tenant: str, store: StoreConfig) -> TieredStore:
        try:
            shared = self.config.daemon.arena == "shared"
            return open_store(store, tenant=tenant, shared=shared, peers=partial(self._peer, tenant))
        except TierError as error:
            raise ConfigError(f"{error} (daemon.disk, --disk, or store.tiers)") from error

    def _peer(self, tenant: str, url: str, *, connections: int, timeout_s: float) -> PeerClient:
        """What a tenant's peer tier asks another daemon with."""
        from kvferry.client.peer import PeerClient

        return PeerClient(
            url,
            connections=connections,
            timeout_s=timeout_s,
            own_epoch=lambda: self.epoch,
            token_file=peer_token(self.config, tenant),
            trusted_network=self.config.wire.trusted_network,
        )

    def __repr__(self) -> str:
        return f"<Daemon at {' '.join(self.addresses)}>"

    @property
    def addresses(self) -> list[str]:
        """Where clients reach it, the socket first."""
        return [server.address for server in self._servers]

    @property
    def connections(self) -> int:
        """Clients' connections on all ports."""
        return sum(server.connections for server in self._servers)

    @property
    def stores(self) -> dict[str, TieredStore]:
        """The store of each tenant."""
        return {name: tenant.store for name, tenant in self.tenants.all.items()}

    def status(self) -> dict[str, object]:
        """How it stands, as plain JSON values: nothing secret, no names of keys."""
        active = self.sessions.active
        return {
            "addresses": self.addresses,
            "epoch": self.epoch,
            "uptime_s": time.monotonic() - self.started_at,
            "draining": self.draining,
            "connections": self.connections,
            "requests": self.work.total,
            "sessions": [
                {"session": s.name, "tenant": s.tenant, "connections": s.connections, "leases": s.lease_count}
                for s in active
            ],
            "sessions_left_behind": self.sessions.left_behind,
            "tenants": {name: msgspec.to_builtins(store.stats()) for name, store in self.stores.items()},
        }

    def admit(self, channel: Channel) -> Grant:
        """What a connection may see and do: follows from its credential, never from the client's word.

        Raises:
            AuthError: If it has no right to be here.
        """
        return self.tenants.admit(channel)

    def store_of(self, tenant: str) -> TieredStore:
        """The store of a tenant."""
        return self.stores[tenant]

    def drain(self, deadline: float) -> Drained:
        """Take no new work, let what is under way end, and write what is not on slower tiers yet.

        Write leases that were given out may still be committed.
        """
        self.draining = True
        self.work.wait_idle(deadline)
        while self._writes() and not is_past(deadline):
            self._closed.wait(min(_DRAIN_PAUSE_S, time_left(deadline)))
        waits: list[str] = []
        lost: list[str] = []
        if self._writes():
            waits.append("clients hold slots that they fill")
        if not self.work.wait_idle(deadline):
            waits.append(f"{self.work.count} requests are under way")
        for tenant, store in self.stores.items():
            if not store.flush(deadline=deadline):
                left = unwritten(tenant, store)
                waits += left.waits
                lost += left.lost
        return Drained(tuple(waits), tuple(lost))

    def _writes(self) -> bool:
        return any(session.holds_slots for session in self.sessions.active)

    def close(self) -> None:
        """End all connections, sessions, threads and tiers; a second call does nothing."""
        with self._close_lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self.draining = True
        self._close_servers()
        self._ticker.join(_TICK_S + 5)
        self.sessions.end_all()
        self.tenants.close()

    def _close_servers(self) -> None:
        for server in self._servers:
            server.close()

    def _listen(self, url: str, option: str, number: int) -> ChannelServer:
        wire = self.config.wire
        options = ChannelOptions(
            role="daemon",
            session="daemon",
            checksum=wire.checksum,
            hello_timeout_s=wire.hello_timeout,
            max_meta_nbytes=wire.max_meta,
            max_payload_nbytes=wire.max_payload,
            capabilities=(SHARED_ARENA, TENANTS) if self.tenants.guarded else (SHARED_ARENA,),
            epoch=self.epoch,
            admit=self.tenants.check,
        )
        try:
            return ChannelServer(
                url,
                options,
                self._serve,
                name="daemon" if number == 0 else f"daemon-{number}",
                max_connections=self.max_connections,
                idle_timeout_s=wire.idle_timeout,
            )
        except ConnectError as error:
            raise listening(error, url, option) from error
        except UnknownPluginError as error:
            raise ConfigError(f"{url} ({option}): {error}") from error

    def _serve(self, channel: Channel) -> None:
        Service(self, channel).run()

    def _tick(self) -> None:
        """Once a second: end what is past its deadline or whose process is gone."""
        for tick in count():
            if self._closed.wait(_TICK_S):
                return
            try:
                for store in self.stores.values():
                    store.poll()
                    store.settle()
                self.sessions.sweep()
                self.tenants.cut_those_over()
                if tick % _TRIM_TICKS == 0:
                    trim_heap()
            except KVFerryError as error:
                log.warning("the daemon's tick failed: %s", error)
            except OSError as error:
                log.warning("the daemon's tick failed: %s", lack_of_files(error) or error)
            except Exception:
                log.exception("the daemon's tick failed")
