"""Ids of tenants: what a store, and every tier that names something by them, takes."""

from __future__ import annotations

from typing import Final

from kvferry.core.errors import ConfigError

__all__ = ["MAX_TENANT_NBYTES", "check_tenant"]

MAX_TENANT_NBYTES: Final = 120
"""Of UTF-8: in hex, and with a mark, it is still the name of a folder."""


def check_tenant(tenant: str) -> None:
    """See that an id can be used.

    Raises:
        ConfigError: If it is no text, empty, or longer than 120 bytes of UTF-8.
    """
    if not isinstance(tenant, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all typed
        raise ConfigError(f"a tenant id is text, not {type(tenant).__name__}")
    nbytes = len(tenant.encode("utf-8", "surrogatepass"))
    if not 0 < nbytes <= MAX_TENANT_NBYTES:
        remedy = "shorten it" if nbytes else "name one"
        raise ConfigError(
            f"a tenant id has 1 to {MAX_TENANT_NBYTES} bytes, {tenant[:40]!r} has {nbytes}; {remedy}"
        )
