"""What an operator may change: typed requests, and what they do. Run in threads, not in the loop."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

from kvferry.core.clock import deadline_in
from kvferry.core.errors import AuthError, KVFerryError, RequestError
from kvferry.core.keys import split_keys
from kvferry.daemon.access import store_of

if TYPE_CHECKING:
    from kvferry.daemon.access import Caller
    from kvferry.daemon.node import Daemon
    from kvferry.store.tier import TierNamespace
    from kvferry.store.tiered import TieredStore

__all__ = ["VERBS", "AdminDone", "Clear", "Drain", "Evict", "Pin", "Reload", "decode", "perform"]

log = logging.getLogger(__name__)

_DAY_S: Final = 86400.0
Hex: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Prefix: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8,64}$")]
_MOST_NAMED: Final = 8
_MOST_KEYS: Final = 4096
_MOST_TTL_S: Final = 7 * _DAY_S
_MOST_DRAIN_S: Final = 10.0


class _Verb(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every verb may say."""

    tenant: Annotated[str, msgspec.Meta(max_length=120)] | None = None
    """The caller's own if not given, for the operator ``default``."""


class _OfNamespaces(_Verb, frozen=True, kw_only=True):
    """Which namespaces, as ``kvferry inspect`` names them: also those that only lie on disk, from before."""

    namespace: Prefix | None = None
    """Its id, or enough of the start."""
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)] | None = None
    """``MODEL``, or ``MODEL@`` and the start of a revision."""


class Clear(_OfNamespaces, frozen=True, kw_only=True):
    """Forget all blocks of a namespace, of those of a model, or of all."""


class Pin(_OfNamespaces, frozen=True, kw_only=True):
    """Keep blocks from eviction for a while; those on slower tiers are kept there, or brought up.

    Without keys those of the chosen namespaces that memory and disk hold now.
    """

    keys: Annotated[tuple[Hex, ...], msgspec.Meta(max_length=_MOST_KEYS)] = ()
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=_MOST_TTL_S)] = 3600.0


class Evict(_Verb, frozen=True, kw_only=True):
    """Evict from memory what would go first, as if there were no room; slower tiers keep what they have."""

    nbytes: Annotated[int, msgspec.Meta(ge=1)]


class Drain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take no new work, end what is under way, write what slower tiers lack; or take work again."""

    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=_MOST_DRAIN_S)] = 5.0
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

_WANTED: Final = {
    "tenant": "a tenant's name",
    "namespace": "an id of 64 digits of 0-9a-f as kvferry inspect shows it, or at least its first 8",
    "model": "MODEL, or MODEL@REVISION",
    "keys": f"at most {_MOST_KEYS} keys of 64 digits of 0-9a-f each",
    "ttl_s": f"seconds, above 0 and at most {_MOST_TTL_S:g}",
    "nbytes": "a number of bytes, at least 1",
    "timeout_s": f"seconds, from 0 to {_MOST_DRAIN_S:g}",
    "resume": "true or false",
}
"""What each field of a body must be, for people."""


def decode(verb: str, body: bytes) -> object:
    """What the body of an admin request asks for.

    Raises:
        RequestError: If it is no such body; with what it must be.
    """
    if not body.strip():
        raise RequestError(f"{verb} has no body: send a JSON object, {{}} if there is nothing to say")
    try:
        return msgspec.json.decode(body, type=VERBS[verb])
    except msgspec.DecodeError as error:
        found = re.search(r"at `\$\.(\w+)", str(error))
        wanted = _WANTED.get(found[1]) if found else None
        if found is None or wanted is None:
            raise RequestError(f"the body of {verb}: {error}") from error
        raise RequestError(f"{found[1]} of {verb} must be {wanted}") from error


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
        return _reload(daemon, reload)
    if not isinstance(request, _Verb):
        raise RequestError(f"{type(request).__name__} is no admin request")
    _, store = store_of(daemon.stores, request.tenant, caller)
    if isinstance(request, Clear):
        return _clear(store, request)
    if isinstance(request, Pin):
        return _pin(store, request)
    assert isinstance(request, Evict)
    count, nbytes = store.evict(request.nbytes)
    text = f"{nbytes} bytes go from memory"
    if nbytes < request.nbytes:
        text += f", of {request.nbytes} asked for: nothing else is there that is neither leased nor pinned"
    return AdminDone(done=nbytes >= request.nbytes, blocks=count, text=text)


def _reload(daemon: Daemon, reload: Callable[[], None]) -> AdminDone:
    try:
        reload()
        text = "the token was read again"
        if daemon.tenants.guarded:
            text = f"{text}; {daemon.tenants.reload()}"
    except KVFerryError as error:
        log.error("not all was read again: %s", error)  # noqa: TRY400 - its text says all
        raise
    return AdminDone(done=True, text=text)


def _drain(daemon: Daemon, request: Drain) -> AdminDone:
    if request.resume:
        daemon.draining = False
        return AdminDone(done=True, text="it takes new work again")
    drained = daemon.drain(deadline_in(request.timeout_s))
    state = "all is done and written"
    if not drained.done:
        state = f"not all is done and written: {drained.text}{'; ask again' if drained.waits else ''}"
    return AdminDone(done=drained.done, text=f"no new work is taken; {state}")


def _clear(store: TieredStore, request: Clear) -> AdminDone:
    spaces = _chosen(store, request)
    count = sum(store.own_namespace(space).clear() for space in spaces)
    number = "1 namespace" if len(spaces) == 1 else f"{len(spaces)} namespaces"
    return AdminDone(done=True, blocks=count, text=f"{count} blocks of {number} were removed")


def _pin(store: TieredStore, request: Pin) -> AdminDone:
    if request.namespace is None and request.model is None:
        raise RequestError(
            "pin needs a namespace or a model: to pin all would leave no room for anything else"
        )
    spaces = _chosen(store, request)
    if request.keys and len(spaces) > 1:
        raise RequestError(f"keys are of one namespace, and these are {len(spaces)}: {_named(spaces)}")
    count = wanted = 0
    for space in spaces:
        keys = split_keys(bytes.fromhex("".join(request.keys))) if request.keys else store.keys_of(space)
        count += store.own_namespace(space).pin(keys, ttl=request.ttl_s)
        wanted += len(keys)
    return AdminDone(done=count == wanted, blocks=count, text=f"{count} of {wanted} blocks are pinned")


def _chosen(store: TieredStore, request: _OfNamespaces) -> list[TierNamespace]:
    """The namespaces that a request names.

    Raises:
        RequestError: If there is none, or what is to be the start of an id is that of several.
    """
    spaces = store.spaces() + store.found_spaces()
    chosen = [space for space in spaces if _is_meant(space, request)]
    if request.namespace is not None and len(chosen) > 1:
        raise RequestError(f"{request.namespace} begins several namespaces: {_named(chosen)}")
    if not chosen and (request.namespace is not None or request.model is not None):
        what = f" {request.namespace}" if request.namespace is not None else ""
        what += f" of model {request.model}" if request.model is not None else ""
        raise RequestError(f"there is no namespace{what}; there are: {_named(spaces) or 'none'}")
    return chosen


def _is_meant(space: TierNamespace, request: _OfNamespaces) -> bool:
    if request.namespace is not None and not space.namespace_id.hex().startswith(request.namespace):
        return False
    if request.model is None or request.model == space.spec.model:
        return True
    model, at, revision = request.model.rpartition("@")
    return bool(at and revision) and model == space.spec.model and space.spec.revision.startswith(revision)


def _named(spaces: Sequence[TierNamespace]) -> str:
    named = ", ".join(f"{s.namespace_id.hex()[:12]} ({s.spec.model[:60]})" for s in spaces[:_MOST_NAMED])
    return named + (f" and {len(spaces) - _MOST_NAMED} more" if len(spaces) > _MOST_NAMED else "")
