"""Whether what a header says of a block is what it has to say."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.errors import CorruptBlockError
from kvferry.core.keys import BlockKey
from kvferry.store.disk.header import BlockHeader, readable
from kvferry.store.tier import TierNamespace

__all__ = ["require_checksum", "require_identity"]


def require_checksum(found: int, stored: int) -> None:
    """Compare the checksum of data with that in its header.

    Raises:
        CorruptBlockError: If they differ.
    """
    if found != stored:
        raise CorruptBlockError(f"the data's checksum is {found:016x}, stored {stored:016x}")


def require_identity(header: BlockHeader, namespace: TierNamespace, key: BlockKey) -> None:
    """Compare who a header says it is with who it has to be.

    Raises:
        CorruptBlockError: If they differ.
    """
    pairs: Sequence[tuple[str, object, object]] = (
        ("key", header.key, key),
        ("namespace", header.namespace_id, namespace.namespace_id),
        ("fingerprint", header.fingerprint, namespace.spec.fingerprint()),
        ("tenant", header.tenant, readable(namespace.tenant)),
    )
    for what, found, wanted in pairs:
        if found != wanted:
            raise CorruptBlockError(f"the {what} in the header is {_show(found)}, not {_show(wanted)}")


def _show(value: object) -> str:
    return value.hex()[:16] + "…" if isinstance(value, bytes) else repr(value)
