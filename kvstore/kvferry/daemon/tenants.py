"""The tenants of a running daemon: whose store is whose, who was let in, and what they may do."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvferry.core.arena import require_memory
from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import AuthError, ConfigError, KVFerryError, OverloadedError, StoreError
from kvferry.core.units import format_nbytes
from kvferry.daemon.credentials import (
    RIGHTS,
    Credential,
    CredentialFile,
    Credentials,
    Limits,
    Right,
    read_credentials,
)
from kvferry.daemon.quotas import Quota, disk_shares, placement_of, quotas, require_usable, tenant_store
from kvferry.daemon.rates import Meter
from kvferry.store.tiered import TieredStore
from kvferry.wire.channel import Channel
from kvferry.wire.options import Peer

if TYPE_CHECKING:
    from kvferry.core.config import StoreConfig

__all__ = ["DEFAULT_TENANT", "Grant", "Tenant", "Tenants"]

log = logging.getLogger(__name__)

DEFAULT_TENANT: Final = "default"
_ALL: Final = frozenset(RIGHTS)
_GIVE_S: Final = 3.0
_GIVE_PAUSE_S: Final = 0.05


class Tenant:
    """One tenant: its store, its bounds, and what was refused to it. Thread safe."""

    def __init__(self, name: str, store: TieredStore, quota: Quota, limits: Limits) -> None:
        self.name = name
        self.store = store
        self.quota = quota
        self.meter = Meter(limits.rate, limits.requests)
        self.max_connections = limits.connections
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter({"connections": 0, "rate": 0, "right": 0})
        self._loads = (0, 0)

    def __repr__(self) -> str:
        return f"<Tenant {self.name}>"

    def count_refusal(self, reason: str) -> None:
        """A request was refused for its ``rate`` or ``right``, or a connection for there being too many."""
        with self._lock:
            self._refused[reason] += 1

    @property
    def loads(self) -> tuple[int, int]:
        """Blocks that loads of clients asked for, and those that they got."""
        return self._loads

    def count_load(self, asked: int, got: int) -> None:
        """A load asked for ``asked`` blocks and got ``got`` of them."""
        with self._lock:
            self._loads = (self._loads[0] + asked, self._loads[1] + got)

    def set(self, limits: Limits) -> None:
        """Other limits from now on; those of memory and disk are the store's."""
        self.meter.set(limits.rate, limits.requests)
        self.max_connections = limits.connections

    @property
    def refused(self) -> dict[str, int]:
        """Requests and connections refused so far, by reason."""
        with self._lock:
            return dict(self._refused)


@dataclass(frozen=True)
class Grant:
    """What a connection may do.

    Attributes:
        tenant: Whose blocks it sees.
        rights: What it may do with them.
        credential: What it was let in by; ``None`` where no credentials are configured.
    """

    tenant: Tenant
    rights: frozenset[Right]
    credential: Credential | None = None

    def allows(self, right: Right) -> bool:
        """Whether it has the right."""
        return right in self.rights

    def require(self, right: Right, what: str) -> None:
        """See that it has the right for ``what``.

        Raises:
            AuthError: If not.
        """
        if right not in self.rights:
            self.tenant.count_refusal("right")
            has = ", ".join(one for one in RIGHTS if one in self.rights)
            raise AuthError(f"{what} takes the right to {right}, this token has: {has}")


class Tenants:
    """All tenants. Thread safe.

    Args:
        config: The store that they share out; without credentials the one tenant ``default`` has it whole.
        path: The credentials file, if there is one.
        open_store: Opens the store of a tenant.

    Raises:
        ConfigError: If the file cannot be used, or promises more than there is; nothing stays open.
    """

    def __init__(
        self,
        config: StoreConfig,
        path: Path | None,
        open_store: Callable[[str, StoreConfig], TieredStore],
    ) -> None:
        self._config = config
        self._path = path
        self._open_store = open_store
        self._lock = threading.Lock()
        self._reloading = threading.Lock()
        self._ended = threading.Event()
        self._tenants: dict[str, Tenant] = {}
        self._credentials: Credentials | None = None
        self._channels: dict[Channel, Grant] = {}
        self._refused = 0
        if path is None:
            store = open_store(DEFAULT_TENANT, config)
            whole = Quota(config.dram_capacity, 0)
            self._tenants[DEFAULT_TENANT] = Tenant(DEFAULT_TENANT, store, whole, Limits())
            return
        file = read_credentials(path)
        self._credentials = Credentials(file)
        try:
            self._tenants = self._opened(file, {}, self._shares(file))
        except BaseException:
            self.close()
            raise

    # ---- who there is ------------------------------------------------------------------------------

    @property
    def guarded(self) -> bool:
        """Whether everybody needs a token."""
        return self._path is not None

    @property
    def all(self) -> dict[str, Tenant]:
        """Every tenant by its name."""
        with self._lock:
            return dict(self._tenants)

    @property
    def refused_connections(self) -> int:
        """Connections refused because they had no valid token."""
        with self._lock:
            return self._refused

    def connections(self) -> Counter[str]:
        """Connections that were let in, by tenant."""
        with self._lock:
            return Counter(grant.tenant.name for grant in self._channels.values())

    # ---- letting in --------------------------------------------------------------------------------

    def check(self, peer: Peer) -> None:
        """See in the handshake whether somebody may come in.

        Raises:
            AuthError: If not.
            OverloadedError: If his tenant has as many connections as it may.
        """
        try:
            grant = self.grant_of(peer.credential)
        except AuthError:
            with self._lock:
                self._refused += 1
            raise
        with self._lock:
            self._require_room(grant.tenant)

    def _require_room(self, tenant: Tenant) -> None:
        """Under the lock."""
        most = tenant.max_connections
        if most is not None and sum(one.tenant is tenant for one in self._channels.values()) >= most:
            tenant.count_refusal("connections")
            raise OverloadedError(f"the tenant has {most} connections, the most it may; close some")

    def grant_of(self, shown: bytes | None) -> Grant:
        """What a token allows.

        Raises:
            AuthError: If it is not valid.
        """
        with self._lock:
            credentials, tenants = self._credentials, self._tenants
        if credentials is None:
            return Grant(tenants[DEFAULT_TENANT], _ALL)
        found = credentials.find(shown)
        return Grant(tenants[found.tenant], frozenset(found.rights), found)

    def admit(self, channel: Channel) -> Grant:
        """What a connection may do; it is cut when that changes, so call :meth:`leave` in the end.

        Raises:
            AuthError: If its token is not valid (any more).
            OverloadedError: As :meth:`check`.
        """
        while True:
            grant = self.grant_of(channel.peer.credential)
            with self._lock:
                if self._tenants.get(grant.tenant.name) is grant.tenant and self._still(grant):
                    self._require_room(grant.tenant)
                    self._channels[channel] = grant
                    return grant

    def leave(self, channel: Channel) -> None:
        """A connection is gone."""
        with self._lock:
            self._channels.pop(channel, None)

    def _still(self, grant: Grant) -> bool:
        """Under the lock: whether what a connection was let in by holds."""
        credential = grant.credential
        if credential is None or self._credentials is None:
            return True
        found = self._credentials.get(credential.id)
        return found is not None and credential.same_power(found) and not found.is_over(time.time())

    def cut_those_over(self) -> int:
        """Cut connections whose token is not valid any more; returns how many."""
        with self._lock:
            over = [channel for channel, grant in self._channels.items() if not self._still(grant)]
        for channel in over:
            channel.abort()
        return len(over)

    # ---- the file changes --------------------------------------------------------------------------

    def reload(self) -> str:
        """Read the file again: tenants come and go, tokens that are gone are cut off, quotas change.

        Returns:
            What changed, for people.

        Raises:
            ConfigError: If it cannot be used; everything goes on as it was.
            StoreError: If :meth:`close` was called.
        """
        if self._path is None:
            return "no credentials are configured"
        with self._reloading:
            if self._ended.is_set():
                raise StoreError("the daemon ends: credentials are not read again")
            file = read_credentials(self._path)
            before = self.all
            shares = self._shares(file)
            now = self._opened_with_room(file, before, shares)
            gone = [tenant for name, tenant in before.items() if name not in now]
            with self._lock:
                self._tenants, self._credentials = now, Credentials(file)
            for name, limits in file.tenants.items():
                now[name].set(limits)
            cut = self.cut_those_over()
            self._end(gone)
            told = [f"{len(file.credentials)} credentials of {len(now)} tenants"]
            told += [f"{cut} connections were cut"] if cut else []
            told += [f"tenant {tenant.name} is gone" for tenant in gone]
            told += self._resize([tenant for name, tenant in now.items() if name in before], shares)
            text = "; ".join(told)
            log.info("credentials were read again: %s", text)
            return text

    def _resize(self, tenants: Iterable[Tenant], shares: Mapping[str, Quota]) -> list[str]:
        """Give tenants their new quotas, first those that give something; what changed, for people."""
        changed = [tenant for tenant in tenants if tenant.quota != shares[tenant.name]]
        told: list[str] = []
        for tenant in sorted(changed, key=lambda one: shares[one.name].dram - one.quota.dram):
            old, new = tenant.quota, shares[tenant.name]
            given = tenant.store.resize(new.dram, self._write_quota(new), disk_shares(self._config, new))
            tenant.quota = new
            told.append(f"{tenant.name} has now {new}")
            if not given and new.dram < old.dram:
                kept = format_nbytes(tenant.store.arena.kept_nbytes)
                told.append(
                    f"{kept} of its memory stay taken until it grows again, or more of it is free "
                    "(daemon.arena, store.hugepages)"
                )
        return told

    def _write_quota(self, quota: Quota) -> int | None:
        return tenant_store(self._config, DEFAULT_TENANT, quota).write_quota

    def _shares(self, file: CredentialFile) -> dict[str, Quota]:
        """The quota of every tenant of the file.

        Raises:
            ConfigError: If they cannot be had.
        """
        if not file.tenants:
            raise ConfigError(f"{self._path} has no tenant: nobody could come in (kvferry credentials add)")
        shares = quotas(self._config, file.tenants)
        for name, share in shares.items():
            require_usable(name, tenant_store(self._config, name, share))
        return shares

    def _opened_with_room(
        self, file: CredentialFile, before: Mapping[str, Tenant], shares: Mapping[str, Quota]
    ) -> dict[str, Tenant]:
        """As :meth:`_opened`; where memory is short, those who are to have less give theirs before.

        If that is of no use they have it again, and lose only what was evicted.
        """
        needed = sum(share.dram for name, share in shares.items() if name not in before)
        if not needed or self._has_room(needed):
            return self._opened(file, before, shares)
        least = placement_of(self._config).granule_nbytes
        after = {name: shares[name].dram if name in shares else least for name in before}
        giving = [one for one in before.values() if after[one.name] < one.quota.dram]
        try:
            for tenant in giving:
                share = Quota(after[tenant.name], tenant.quota.disk)
                tenant.store.resize(share.dram, self._write_quota(share), {})
            self._wait_for_room(giving, needed)
            return self._opened(file, before, shares)
        except BaseException:
            for tenant in giving:
                tenant.store.resize(tenant.quota.dram, self._write_quota(tenant.quota), {})
            raise

    def _has_room(self, nbytes: int) -> bool:
        try:
            require_memory(nbytes, placement_of(self._config))
        except ConfigError:
            return False
        return True

    def _wait_for_room(self, giving: Iterable[Tenant], nbytes: int) -> None:
        """Until what they have given is there: clients let go of it within a second, leases later."""
        deadline = deadline_in(_GIVE_S)
        while not self._has_room(nbytes) and not is_past(deadline):
            if self._ended.wait(_GIVE_PAUSE_S):
                return
            for tenant in giving:
                tenant.store.settle()

    def _opened(
        self, file: CredentialFile, before: Mapping[str, Tenant], shares: Mapping[str, Quota]
    ) -> dict[str, Tenant]:
        """Every tenant of the file, those that are new opened; none if one cannot be."""
        found: dict[str, Tenant] = {}
        try:
            for name, limits in file.tenants.items():
                if name in before:
                    found[name] = before[name]
                    continue
                store = self._open_store(name, tenant_store(self._config, name, shares[name]))
                found[name] = Tenant(name, store, shares[name], limits)
        except BaseException:
            for name, one in found.items():
                if name not in before:
                    one.store.close()
            raise
        return found

    def close(self) -> None:
        """Close all stores, those included that a reload under way opens: its end is waited for."""
        self._ended.set()
        with self._reloading:
            self._end(self.all.values())

    def _end(self, tenants: Iterable[Tenant]) -> None:
        for tenant in tenants:
            try:
                tenant.store.close()
            except KVFerryError as error:
                log.warning("the store of tenant %s did not close: %s", tenant.name, error)
