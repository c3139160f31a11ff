"""What the configuration has to know of tiers and policies, which are plug-ins of the store above it.

Names and options are checked when the configuration is read; what they mean is loaded by the store.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvferry.core.errors import UnknownPluginError
from kvferry.core.nearest import did_you_mean
from kvferry.core.registry import Registry

__all__ = ["POLICIES", "TIERS", "TierOption", "policy_names", "require_policy"]

TIERS: Registry[Any] = Registry("kvferry.tiers")
"""Classes that inherit :class:`kvferry.store.tier.Tier`, by kind."""

POLICIES: Registry[Any] = Registry("kvferry.policies")
"""See :mod:`kvferry.store.policies`; names are ``kind.name``."""


class TierOption(NamedTuple):
    """One option of a tier's kind with the value that holds.

    Attributes:
        name: As it is written in the configuration.
        value: What holds, a plain JSON value that is read back as the same.
        given: Whether it was given; else ``value`` is the default.
        text: As a person would write it.
        allowed: What values it takes, for people.
        description: What it does.
        secret: Whether its value is never shown.
    """

    name: str
    value: object
    given: bool
    text: str
    allowed: str = ""
    description: str = ""
    secret: bool = False


def policy_names(kind: str) -> list[str]:
    """The names of all policies of a kind: eviction, admission, write or promotion."""
    return [name.partition(".")[2] for name in POLICIES.names() if name.startswith(f"{kind}.")]


def require_policy(kind: str, name: str) -> None:
    """Check that a policy exists; it is not loaded.

    Raises:
        UnknownPluginError: If there is none of that name.
    """
    known = policy_names(kind)
    if name not in known:
        raise UnknownPluginError(
            f"no {kind} policy {name!r}{did_you_mean(name, known)} (existing: {', '.join(known) or 'none'})"
        )
