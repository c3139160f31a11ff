"""The key chain: 32 bytes that name a block by all tokens up to its end.

``key_0 = blake2b-256(namespace_id, tokens of the first block, media)`` and
``key_i = blake2b-256(key_{i-1}, tokens of block i, media)``, every field length-prefixed, tokens as
little-endian u32. No ``hash()`` and no random seed: the same tokens give the same key in every
process, on every machine, for as long as the format version stands.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, NewType, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ConfigError

__all__ = [
    "KEY_NBYTES",
    "BlockKey",
    "Media",
    "Tokens",
    "block_keys",
    "foreign_keys",
    "require_key",
    "require_keys",
    "split_keys",
    "token_array",
    "usable_prefix",
]

KEY_NBYTES = 32
_KEY_TYPE: Final = {bytes}
_KEY_LENGTH: Final = {KEY_NBYTES}
BlockKey = NewType("BlockKey", bytes)
Tokens: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"

_PERSON = b"kvferry.key.1"
_KEY_DTYPE: Final = np.dtype((np.void, KEY_NBYTES))
_U32 = struct.Struct("<I")
_NO_MEDIA = _U32.pack(0)


class Media(NamedTuple):
    """A span of placeholder tokens that stands for an image, a sound, …

    ``media_id`` is its identity in full (a content hash); it enters the key of every block that the
    span touches.
    """

    first_token: int
    token_count: int
    media_id: bytes


def token_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Tokens as a contiguous little-endian u32 array; no copy where they already are one.

    Raises:
        ConfigError: If they are not a flat sequence of integers in ``[0, 2**32)``.
    """
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ConfigError(f"tokens must be a flat sequence, got {array.ndim} dimensions")
    if array.dtype == np.dtype("<u4"):
        return np.ascontiguousarray(array)
    if array.size == 0:
        return np.empty(0, dtype="<u4")
    if array.dtype.kind not in "iu":
        raise ConfigError(f"tokens must be integers, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 0xFFFFFFFF:
        raise ConfigError(f"token ids must lie in [0, 2**32), got {low}..{high}")
    return np.ascontiguousarray(array, dtype="<u4")


def _media_field(media: Sequence[Media], first: int, stop: int) -> bytes:
    touching = [m for m in media if m.first_token < stop and m.first_token + m.token_count > first]
    parts = [_U32.pack(len(touching))]
    for m in touching:
        parts.append(struct.pack("<QQI", m.first_token, m.token_count, len(m.media_id)))
        parts.append(m.media_id)
    return b"".join(parts)


def block_keys(
    namespace: bytes,
    tokens: Tokens,
    block_tokens: int,
    *,
    media: Sequence[Media] = (),
    parent: BlockKey | None = None,
    first_token: int = 0,
) -> list[BlockKey]:
    """Keys of the full blocks of ``tokens``; a partial last block has none.

    Args:
        namespace: The 32 bytes of :func:`kvferry.core.spec.namespace_id`.
        tokens: Token ids; an array of u32 is hashed without a copy.
        block_tokens: Tokens in a block.
        media: Spans of placeholders, in absolute token positions.
        parent: Key of the block before ``tokens``, to hash only what is new; ``None`` at the start.
        first_token: Absolute position of ``tokens[0]``; a multiple of ``block_tokens``.

    Raises:
        ConfigError: For tokens that are no u32, a malformed media span, or a ``first_token`` that
            does not go with ``parent``.
    """
    array = token_array(tokens)
    if (parent is None) != (first_token == 0) or first_token % block_tokens:
        raise ConfigError(
            f"first_token {first_token} does not go with "
            f"{'no parent' if parent is None else 'a parent'} in blocks of {block_tokens}"
        )
    spans = sorted(media)
    for m in spans:
        if m.first_token < 0 or m.token_count < 1:
            raise ConfigError(f"media span {m.first_token}+{m.token_count} is empty or negative")
    data = array.view(np.uint8).data
    step = block_tokens * 4
    token_prefix = _U32.pack(step)
    head = _U32.pack(KEY_NBYTES)
    link = bytes(namespace) if parent is None else bytes(parent)
    if len(link) != KEY_NBYTES:
        raise ConfigError(f"a key chain starts from {KEY_NBYTES} bytes, got {len(link)}")
    keys: list[BlockKey] = []
    for index in range(len(array) // block_tokens):
        h = hashlib.blake2b(head + link + token_prefix, digest_size=KEY_NBYTES, person=_PERSON)
        h.update(data[index * step : (index + 1) * step])
        if spans:
            start = first_token + index * block_tokens
            h.update(_media_field(spans, start, start + block_tokens))
        else:
            h.update(_NO_MEDIA)
        link = h.digest()
        keys.append(BlockKey(link))
    return keys


def require_key(key: object, what: str = "a key") -> None:
    """Refuse what is no key.

    Raises:
        ConfigError: With what it is; ``what`` begins the message.
    """
    if not isinstance(key, bytes):
        raise ConfigError(f"{what} is {_short(key)}, must be {KEY_NBYTES} bytes")
    if len(key) != KEY_NBYTES:
        raise ConfigError(f"{what}, {key[:8].hex()}…, has {len(key)} bytes, a key has {KEY_NBYTES} bytes")


def require_keys(keys: Iterable[BlockKey]) -> Sequence[BlockKey]:
    """Refuse a batch in which something is no key: a key of another type or length is never stored.

    Costs some microseconds for 512 keys.

    Returns:
        The keys; as a list if they were no sequence.

    Raises:
        ConfigError: With the number of the first that is none, and what it is.
    """
    found: Sequence[BlockKey]
    if isinstance(keys, (list, tuple)):
        found = cast("Sequence[BlockKey]", keys)
    elif isinstance(keys, (bytes, bytearray, memoryview, str)) or not isinstance(keys, Iterable):
        raise ConfigError(f"keys are {_short(keys)}, must be a list of keys of {KEY_NBYTES} bytes each")
    else:
        found = list(keys)
    if not found or (set(map(type, found)) == _KEY_TYPE and set(map(len, found)) == _KEY_LENGTH):
        return found
    for number, key in enumerate(found):  # also bytes of a class of one's own
        require_key(key, f"key {number} of {len(found)}")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:40]}{'…' if len(text) > 40 else ''}"


def split_keys(blob: bytes) -> list[BlockKey]:
    """Keys that lie one behind the other, as a message carries them.

    Raises:
        ConfigError: If ``blob`` is no whole number of keys.
    """
    if len(blob) % KEY_NBYTES:
        raise ConfigError(f"keys of {len(blob)} bytes, each has {KEY_NBYTES}")
    if len(blob) == KEY_NBYTES:
        return [BlockKey(blob)]
    return cast("list[BlockKey]", np.frombuffer(blob, _KEY_DTYPE).tolist())


def foreign_keys(engine_hashes: Iterable[bytes]) -> list[BlockKey]:
    """An engine's own 32-byte hash chain, taken as it is.

    Raises:
        ConfigError: If one is not 32 bytes long.
    """
    keys = [BlockKey(bytes(h)) for h in engine_hashes]
    for index, key in enumerate(keys):
        if len(key) != KEY_NBYTES:
            raise ConfigError(f"engine hash {index} has {len(key)} bytes, a key has {KEY_NBYTES} bytes")
    return keys


def usable_prefix(hit_blocks: int, prompt_tokens: int, block_tokens: int) -> int:
    """Tokens of a prompt that need not be computed when ``hit_blocks`` of its blocks are stored.

    The last token of a prompt is always computed, since its logits are wanted: at most
    ``prompt_tokens - 1``, and never below 0.
    """
    return max(0, min(hit_blocks * block_tokens, prompt_tokens - 1))
