"""Names of stored values: ``prefix, tenant, namespace, key`` and, of a part, its write and its number.

The tenant stands there as HMAC-SHA-256(cluster secret, tenant), so that who may list a store does not read
who its tenants are, nor guesses a name without the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final, NamedTuple

from kvferry.core.keys import KEY_NBYTES, BlockKey
from kvferry.store.tier import TierNamespace

__all__ = ["Names", "StoredName"]

_TENANT_DIGITS: Final = 32
_NO_SECRET: Final = b"kvferry: no cluster secret"


class StoredName(NamedTuple):
    """What a name says.

    Attributes:
        base: The name of the block's manifest.
        tenant: The tenant's part of the name, in hex.
        namespace_id: Of the namespace.
        key: Of the block.
        part: Which write and number, as they are spelled; empty for the manifest.
    """

    base: str
    tenant: str
    namespace_id: bytes
    key: BlockKey
    part: str


class Names:
    """The names of one tier. Immutable, thread safe.

    Args:
        prefix: What all begin with.
        secret: The cluster's, if there is one.
        separator: Between the fields.
        tag: Put the key in braces, so that a Redis cluster keeps a block and its parts together.
    """

    def __init__(self, prefix: str, secret: bytes | None, *, separator: str, tag: bool) -> None:
        self.root = f"{prefix}{separator}"
        self._secret = _NO_SECRET if secret is None else secret
        self._separator = separator
        self._braces = ("{", "}") if tag else ("", "")
        opening, closing = map(re.escape, self._braces)
        self._pattern = re.compile(
            separator.join(
                (
                    f"(?P<base>{re.escape(prefix)}", f"(?P<tenant>[0-9a-f]{{{_TENANT_DIGITS}}})",
                    "(?P<namespace>[0-9a-f]{64})",
                    f"{opening}(?P<key>[0-9a-f]{{{2 * KEY_NBYTES}}}){closing})",
                )
            )
            + f"(?:{separator}(?P<part>[0-9a-f]{{16}}\\.[0-9]{{1,9}}))?"
        )  # fmt: skip

    def tenant(self, tenant: str) -> str:
        """The tenant's part of a name."""
        given = tenant.encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, given, hashlib.sha256).hexdigest()[:_TENANT_DIGITS]

    def home(self, namespace: TierNamespace) -> str:
        """What the names of all blocks of a namespace begin with."""
        fields = (self.tenant(namespace.tenant), namespace.namespace_id.hex(), "")
        return self.root + self._separator.join(fields)

    def block(self, home: str, key: BlockKey) -> str:
        """The name of a block's manifest; ``home`` is that of :meth:`home`."""
        opening, closing = self._braces
        return f"{home}{opening}{key.hex()}{closing}"

    def part(self, base: str, write_id: bytes, number: int) -> str:
        """The name of a part."""
        return f"{base}{self._separator}{write_id.hex()}.{number}"

    def parse(self, name: str) -> StoredName | None:
        """What a name says; ``None`` for one that is not ours."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        return StoredName(
            found["base"],
            found["tenant"],
            bytes.fromhex(found["namespace"]),
            BlockKey(bytes.fromhex(found["key"])),
            found["part"] or "",
        )
