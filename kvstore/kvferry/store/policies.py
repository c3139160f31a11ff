"""Policies of the store: what is evicted, what is written to a slower tier and when, what comes up again.

All four kinds are plug-ins of the entry-point group ``kvferry.policies``; the kind comes before the name
(``eviction.lru``, ``admission.always``), the configuration names only the rest. Write one as a class with
the verbs below:

* **eviction**: :class:`EvictionPolicy`, made with the capacity in bytes. It may rely on the chain rule being
  its to keep: tails before heads. See :mod:`kvferry.core.eviction`.
* **admission** to a slower tier, **promotion** from it into memory: made without arguments, one a tier.
* **write**: a :class:`WritePolicy`, made without arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

from kvferry.core.errors import ConfigError
from kvferry.core.eviction import Entry, EntryList, EvictionPolicy, LRUPolicy, inner_victims
from kvferry.core.keys import BlockKey
from kvferry.core.tier_plugins import POLICIES, require_policy
from kvferry.store.s3fifo import S3FIFOPolicy

__all__ = [
    "AdmissionPolicy",
    "AlwaysAdmit",
    "AlwaysPromote",
    "Entry",
    "EntryList",
    "EvictionPolicy",
    "LRUPolicy",
    "NeverPromote",
    "OnEvict",
    "PromotionPolicy",
    "S3FIFOPolicy",
    "SecondHitAdmit",
    "SecondHitPromote",
    "WriteBack",
    "WritePolicy",
    "WriteThrough",
    "admission_policy",
    "eviction_policy",
    "inner_victims",
    "promotion_policy",
    "require_policies",
    "write_policy",
]

_SEEN_KEYS = 1 << 16
_WHEN = ("commit", "evict")
_FULL = ("wait", "drop")
_Kind = Literal["eviction", "admission", "write", "promotion"]


class AdmissionPolicy(Protocol):
    """Which blocks are written to a slower tier. Called under the store's lock: no I/O, never waits.

    Attributes:
        asks_on_use: Also ask when a stored block is used, not only when it is saved or evicted.
    """

    asks_on_use: bool

    def admit(self, namespace_id: bytes, key: BlockKey) -> bool:
        """Whether the block goes to the tier now; asked at each save and, if so wished, each use."""
        ...


class PromotionPolicy(Protocol):
    """Which blocks read from a slower tier stay in memory. Called under the store's lock: no I/O."""

    def promote(self, namespace_id: bytes, key: BlockKey) -> bool:
        """Whether the block stays; one that does not is in memory only as long as its lease."""
        ...


class WritePolicy(Protocol):
    """When blocks are written to a slower tier.

    Attributes:
        when: ``commit``: queued when they are saved. ``evict``: when memory needs their room, which is given
            only after the copy was made.
        full: What happens when the queue is full. ``wait``: the save waits until its deadline; what still
            finds no place then is dropped and counted (``commit``), or ends the save with a
            ``CapacityError`` (``evict``). ``drop``: not written, and counted.
    """

    when: Literal["commit", "evict"]
    full: Literal["wait", "drop"]


class _Seen:
    """Keys seen before, the last :data:`_SEEN_KEYS` of them; about 150 bytes each."""

    __slots__ = ("_new", "_old")

    def __init__(self) -> None:
        self._new: set[tuple[bytes, BlockKey]] = set()
        self._old: set[tuple[bytes, BlockKey]] = set()

    def again(self, namespace_id: bytes, key: BlockKey) -> bool:
        """Whether the key was seen before; it is from now on."""
        name = (namespace_id, key)
        if name in self._new or name in self._old:
            return True
        if len(self._new) >= _SEEN_KEYS // 2:
            self._old, self._new = self._new, set()
        self._new.add(name)
        return False


class AlwaysAdmit:
    """Every block goes to the tier."""

    asks_on_use = False

    def admit(self, namespace_id: bytes, key: BlockKey) -> bool:  # noqa: ARG002
        """See :class:`AdmissionPolicy`."""
        return True


class SecondHitAdmit:
    """A block goes to the tier when it is saved or used for the second time: spares it what nobody reuses."""

    asks_on_use = True

    def __init__(self) -> None:
        self._seen = _Seen()

    def admit(self, namespace_id: bytes, key: BlockKey) -> bool:
        """See :class:`AdmissionPolicy`."""
        return self._seen.again(namespace_id, key)


class AlwaysPromote:
    """Every block that is read stays in memory."""

    def promote(self, namespace_id: bytes, key: BlockKey) -> bool:  # noqa: ARG002
        """See :class:`PromotionPolicy`."""
        return True


class SecondHitPromote:
    """A block stays in memory when it is read from the tier for the second time."""

    def __init__(self) -> None:
        self._seen = _Seen()

    def promote(self, namespace_id: bytes, key: BlockKey) -> bool:
        """See :class:`PromotionPolicy`."""
        return self._seen.again(namespace_id, key)


class NeverPromote:
    """What is read stays only as long as its lease."""

    def promote(self, namespace_id: bytes, key: BlockKey) -> bool:  # noqa: ARG002
        """See :class:`PromotionPolicy`."""
        return False


class WriteThrough:
    """Written when saved; a save waits for a place in the queue."""

    when: Literal["commit", "evict"] = "commit"
    full: Literal["wait", "drop"] = "wait"


class WriteBack:
    """Written when saved, as far as the queue has a place: a save never waits."""

    when: Literal["commit", "evict"] = "commit"
    full: Literal["wait", "drop"] = "drop"


class OnEvict:
    """Written when memory needs the room; a save that needs it waits for the copy."""

    when: Literal["commit", "evict"] = "evict"
    full: Literal["wait", "drop"] = "wait"


def require_policies(write: object, admission: object, promotion: object) -> None:
    """Refuse what cannot be one, as the name of a policy, or its class.

    Raises:
        ConfigError: With the name of the field.
    """
    for name, value, verbs in (
        ("write", write, ("when", "full")),
        ("admission", admission, ("admit", "asks_on_use")),
        ("promotion", promotion, ("promote",)),
    ):
        if isinstance(value, type) or not all(hasattr(value, verb) for verb in verbs):
            raise ConfigError(
                f"{name} is {value!r}, must be an object with {' and '.join(verbs)}; "
                f"a name is made one by {name}_policy"
            )
    if getattr(write, "when", None) not in _WHEN or getattr(write, "full", None) not in _FULL:
        raise ConfigError(
            f"write is {write!r}: its when must be one of {', '.join(_WHEN)}, "
            f"its full one of {', '.join(_FULL)}"
        )


def _make(kind: _Kind, name: str) -> Callable[..., Any]:
    require_policy(kind, name)
    return cast("Callable[..., Any]", POLICIES.load(f"{kind}.{name}"))


def eviction_policy(name: str) -> Callable[[int], EvictionPolicy]:
    """What makes the eviction policy called ``name`` from a capacity in bytes.

    Raises:
        UnknownPluginError: If there is none of that name.
        PluginUnavailableError: If it cannot be loaded.
    """
    return cast("Callable[[int], EvictionPolicy]", _make("eviction", name))


def admission_policy(name: str) -> AdmissionPolicy:
    """A new admission policy; raises as :func:`eviction_policy`."""
    return cast("AdmissionPolicy", _make("admission", name)())


def promotion_policy(name: str) -> PromotionPolicy:
    """A new promotion policy; raises as :func:`eviction_policy`."""
    return cast("PromotionPolicy", _make("promotion", name)())


def write_policy(name: str) -> WritePolicy:
    """A new write policy; raises as :func:`eviction_policy`."""
    return cast("WritePolicy", _make("write", name)())
