"""Who may ask what of the HTTP port: the operator everything, a tenant's admin what is his."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvferry.core.errors import AuthError, RequestError
from kvferry.daemon.tenants import DEFAULT_TENANT

if TYPE_CHECKING:
    from kvferry.daemon.status import DaemonStatus, TenantStatus
    from kvferry.daemon.tenants import Tenants
    from kvferry.daemon.token import AdminToken
    from kvferry.store.tiered import TieredStore

__all__ = ["OPERATOR", "Caller", "caller_of", "seen_by", "store_of"]

_MOST_NAMED: Final = 8


class Caller(NamedTuple):
    """Who asks.

    Attributes:
        tenant: The tenant whose admin it is; ``None`` for the operator.
    """

    tenant: str | None

    def may_touch(self, tenant: str) -> bool:
        """Whether that tenant is its own."""
        return self.tenant in (None, tenant)


OPERATOR = Caller(None)


def caller_of(authorization: str, token: AdminToken, tenants: Tenants) -> Caller | None:
    """Who shows this ``Authorization`` header; ``None`` if nobody who may ask."""
    kind, _, shown = authorization.partition(" ")
    shown = shown.strip()
    if kind.lower() != "bearer" or not shown:
        return None
    if token.matches(shown):
        return OPERATOR
    if not tenants.guarded:
        return None
    try:
        grant = tenants.grant_of(shown.encode("ascii", "replace"))
    except AuthError:
        return None
    return Caller(grant.tenant.name) if grant.allows("admin") else None


def store_of(
    stores: Mapping[str, TieredStore], tenant: str | None, caller: Caller
) -> tuple[str, TieredStore]:
    """The tenant that a request names, else the caller's own (``default`` of the operator), and its store.

    Raises:
        RequestError: If it is not there, or not the caller's, who is told of no tenant but his own.
    """
    name = (caller.tenant or DEFAULT_TENANT) if tenant is None else tenant
    store = stores.get(name)
    if store is not None and caller.may_touch(name):
        return name, store
    if caller.tenant is not None:
        raise RequestError(f"there is no tenant {name[:120]!r}; this token is of {caller.tenant}")
    names = sorted(stores)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    raise RequestError(
        f"there is no tenant {name[:120]!r}; name one with --tenant (tenant), there are: "
        f"{', '.join(names[:_MOST_NAMED]) or 'none'}{more}"
    )


def seen_by(caller: Caller, status: DaemonStatus) -> DaemonStatus:
    """As much of the status as a caller may see: of a tenant's admin, nothing that tells of other tenants."""
    name = caller.tenant
    if name is None:
        return status
    clients = tuple(one for one in status.clients if one.tenant == name)
    tenants = tuple(_without_reasons(one) for one in status.tenants if one.name == name)
    connections = sum(one.connections for one in clients)
    return msgspec.structs.replace(
        status,
        tenant=name,
        connections=connections,
        sessions_left_behind=0,
        requests_under_way=0,
        refused_connections=0,
        tenants=tenants,
        clients=clients,
        slowest=tuple(one for one in status.slowest if one.tenant == name),
        operations=(),
        faults=(),
        fault_counts={},
        notes=(),
        process=msgspec.structs.replace(status.process, cpu_s=0.0, resident_nbytes=0),
    )


def _without_reasons(tenant: TenantStatus) -> TenantStatus:
    """Why a tier fails is the operator's: it names servers and directories. That it does, the tenant sees."""
    tiers = tuple(msgspec.structs.replace(tier, problems={}) for tier in tenant.tiers)
    return msgspec.structs.replace(tenant, tiers=tiers)
