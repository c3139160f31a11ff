"""What an operator may change: typed requests, and what they do. Run in threads, not in the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

from kvferry.core.clock import deadline_in
from kvferry.core.errors import AuthError, RequestError
from kvferry.core.keys import split_keys
from kvferry.daemon.tenants import DEFAULT_TENANT

if TYPE_CHECKING:
    from kvferry.daemon.access import Caller
    from kvferry.daemon.node import Daemon
    from kvferry.store.tier import TierNamespace
    from kvferry.store.tiered import TieredStore

__all__ = ["VERBS", "AdminDone", "Clear", "Drain", "Evict", "Pin", "Reload", "perform"]

_DAY_S: Final = 86400.0
Hex: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Verb(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every verb may say."""

    tenant: Annotated[str, msgspec.Meta(max_length=120)] | None = None
    """The caller's own if not given, for the operator ``default``."""


class Clear(_Verb, frozen=True, kw_only=True):
    """Forget all blocks of a namespace, or of all that were used since the start."""

    namespace: Hex | None = None


class Pin(_Verb, frozen=True, kw_only=True):
    """Keep blocks from eviction for a while; those on slower tiers are kept there, or brought up."""

    namespace: Hex
    keys: Annotated[tuple[Hex, ...], msgspec.Meta(min_length=1, max_length=4096)]
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=7 * _DAY_S)] = 3600.0


class Evict(_Verb, frozen=True, kw_only=True):
    """Evict from memory what would go first, as if there were no room; slower tiers keep what they have."""

    nbytes: Annotated[int, msgspec.Meta(ge=1)]


class Drain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take no new work, end what is under way, write what slower tiers lack; or take work again."""

    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=10)] = 5.0
    resume: bool = False


class Reload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read again what can be read again while it runs: the token, and the credentials."""


class AdminDone(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        done: Whether all of it was done in time.
        blocks: How many it was about.
        text: For people.
    """

    done: bool
    blocks: int = 0
    text: str = ""


VERBS: Final[dict[str, type[Any]]] = {
    "clear": Clear,
    "pin": Pin,
    "evict": Evict,
    "drain": Drain,
    "reload": Reload,
}
"""Path below ``/admin/`` to what its body is."""


def perform(daemon: Daemon, request: object, caller: Caller, reload: Callable[[], None]) -> AdminDone:
    """Do what an admin request asks for.

    Raises:
        AuthError: If it is about the whole daemon, and the caller is a tenant's.
        RequestError: If it names what is not there, or is not the caller's.
        ConfigError: If what is reloaded cannot be used; the old one goes on.
    """
    if isinstance(request, (Drain, Reload)) and caller.tenant is not None:
        raise AuthError("this is about the whole daemon: it takes the token of daemon.token_file")
    if isinstance(request, Drain):
        return _drain(daemon, request)
    if isinstance(request, Reload):
        reload()
        text = "the token was read again"
        return AdminDone(
            done=True, text=f"{text}; {daemon.tenants.reload()}" if daemon.tenants.guarded else text
        )
    if not isinstance(request, _Verb):
        raise RequestError(f"{type(request).__name__} is no admin request")
    tenant = request.tenant or caller.tenant or DEFAULT_TENANT
    store = daemon.stores.get(tenant)
    if store is None or not caller.may_touch(tenant):
        raise RequestError(f"there is no tenant {tenant!r}")
    if isinstance(request, Clear):
        return _clear(store, request)
    if isinstance(request, Pin):
        space = _space(store, request.namespace)
        keys = split_keys(bytes.fromhex("".join(request.keys)))
        count = store.namespace(space.spec, space.scope, takes_lossy=True).pin(keys, ttl=request.ttl_s)
        return AdminDone(
            done=count == len(keys), blocks=count, text=f"{count} of {len(keys)} blocks are pinned"
        )
    assert isinstance(request, Evict)
    count, nbytes = store.evict(request.nbytes)
    return AdminDone(done=nbytes >= request.nbytes, blocks=count, text=f"{nbytes} bytes go from memory")


def _drain(daemon: Daemon, request: Drain) -> AdminDone:
    if request.resume:
        daemon.draining = False
        return AdminDone(done=True, text="it takes new work again")
    done = daemon.drain(deadline_in(request.timeout_s))
    state = "all is done and written" if done else "not all is done and written yet: ask again"
    return AdminDone(done=done, text=f"no new work is taken; {state}")


def _clear(store: TieredStore, request: Clear) -> AdminDone:
    spaces = store.spaces() if request.namespace is None else [_space(store, request.namespace)]
    count = sum(store.namespace(space.spec, space.scope).clear() for space in spaces)
    return AdminDone(done=True, blocks=count, text=f"{count} blocks of {len(spaces)} namespaces were removed")


def _space(store: TieredStore, namespace: str) -> TierNamespace:
    wanted = bytes.fromhex(namespace)
    found = next((space for space in store.spaces() if space.namespace_id == wanted), None)
    if found is None:
        raise RequestError(
            f"namespace {namespace} was not used since the start; kvferry status --json lists those that were"
        )
    return found
