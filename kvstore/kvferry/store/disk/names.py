"""Names below a disk tier's directory: made from hex digits, never from what a caller wrote.

``<directory>/<tenant>/<namespace id, 64 hex>/<first 2 hex of the key>/<key, 64 hex>.safetensors``. A tenant
whose id is plain (lower-case letters, digits, ``-``, ``_``) is named by it, any other by ``=`` and the hex of
its UTF-8. Names that start with a dot belong to the tier: the lock, the quarantine, and temporaries.
"""

from __future__ import annotations

import re
from typing import Final

from kvferry.core.errors import ConfigError
from kvferry.core.keys import KEY_NBYTES, BlockKey

__all__ = [
    "FANOUT",
    "LOCK_NAME",
    "PROBE_NAME",
    "QUARANTINE_NAME",
    "SUFFIX",
    "block_name",
    "is_temporary",
    "key_of_name",
    "namespace_of_folder",
    "shard_name",
    "shard_of_folder",
    "temporary_name",
    "tenant_folder",
    "tenant_of_folder",
]

SUFFIX: Final = ".safetensors"
LOCK_NAME: Final = ".lock"
QUARANTINE_NAME: Final = ".quarantine"
PROBE_NAME: Final = ".probe"
FANOUT: Final = 256

_PLAIN: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_HEX: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_BLOCK: Final = re.compile(r"[0-9a-f]{64}\.safetensors", re.ASCII)
_TEMPORARY: Final = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]+\.tmp", re.ASCII)
_MAX_TENANT_NBYTES: Final = 120
_SHARDS: Final = tuple(f"{i:02x}" for i in range(FANOUT))
_NUMBERS: Final = {name: i for i, name in enumerate(_SHARDS)}


def tenant_folder(tenant: str) -> str:
    """The folder of a tenant.

    Raises:
        ConfigError: If the id is empty or longer than 120 bytes of UTF-8.
    """
    if _PLAIN.fullmatch(tenant):
        return tenant
    data = tenant.encode("utf-8", "surrogatepass")
    if not 0 < len(data) <= _MAX_TENANT_NBYTES:
        raise ConfigError(
            f"a tenant id has 1 to {_MAX_TENANT_NBYTES} bytes, {tenant[:40]!r} has {len(data)}; shorten it"
        )
    return "=" + data.hex()


def tenant_of_folder(name: str) -> str | None:
    """The tenant whose folder that is; ``None`` for a folder that is no tenant's."""
    if _PLAIN.fullmatch(name):
        return name
    try:
        tenant = bytes.fromhex(name[1:]).decode("utf-8", "surrogatepass") if name.startswith("=") else ""
    except ValueError:
        return None
    # one folder a tenant: no second spelling, as upper-case hex or the hex of a plain id, is his
    return tenant if tenant and not _PLAIN.fullmatch(tenant) and name == "=" + name[1:].lower() else None


def namespace_of_folder(name: str) -> bytes | None:
    """The namespace id that a folder is named by, if it is one."""
    return bytes.fromhex(name) if _HEX.fullmatch(name) else None


def shard_name(number: int) -> str:
    """The folder of the keys that start with the byte ``number``."""
    return _SHARDS[number]


def shard_of_folder(name: str) -> int | None:
    """The inverse of :func:`shard_name`."""
    return _NUMBERS.get(name)


def block_name(key: BlockKey) -> str:
    """The file of a block.

    Raises:
        ConfigError: If the key is not 32 bytes long.
    """
    if len(key) != KEY_NBYTES:
        raise ConfigError(f"key {bytes(key)[:8].hex()}… has {len(key)} bytes, a key has {KEY_NBYTES}")
    return key.hex() + SUFFIX


def key_of_name(name: str, shard: int) -> BlockKey | None:
    """The key that a file in the folder ``shard`` is named by; ``None`` if it is no block's name there."""
    if not _BLOCK.fullmatch(name):
        return None
    key = bytes.fromhex(name[: 2 * KEY_NBYTES])
    return BlockKey(key) if key[0] == shard else None


def temporary_name(key: BlockKey, serial: int) -> str:
    """The name that a block has while it is being written."""
    return f".{key.hex()}.{serial:x}.tmp"


def is_temporary(name: str) -> bool:
    """Whether a name was made by :func:`temporary_name`."""
    return _TEMPORARY.fullmatch(name) is not None
