"""The manifest: what a stored block says of itself, format version 1.

All numbers are little-endian. A manifest is::

    magic "kvferryM", u16 version, u16 flags, u32 nbytes of what follows up to the checksum, u64 data nbytes
    key 32, parent 32 (zeros: none), fingerprint 32, namespace id 32, tenant 16, write id 8, i64 position
    u32 nbytes of spec, u32 nbytes of encoding, u32 parts, u32 zero
    spec (JSON, ASCII), encoding, parts x (u64 nbytes, u64 xxh3_64)
    u64 xxh3_64 of all before

Flag 1: the data follows in the same value, and after it the u64 xxh3_64 of the data. Flag 2: there is a
parent. Without flag 1 the data lies in the parts. ``encoding`` says what the data went through before it was
stored and is empty for a block as it lies in memory.

In every version the head is laid out like this, and the last 8 bytes are the checksum: so a release can tell
a manifest of a later one, which it leaves alone, from a damaged one, which it removes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from kvferry.core.errors import CorruptBlockError
from kvferry.core.keys import KEY_NBYTES, BlockKey
from kvferry.store.disk.header import spec_from_json, spec_to_json
from kvferry.store.tier import UNKNOWN_PARENT, TierNamespace

__all__ = [
    "CHECKSUM_NBYTES",
    "HEAD_NBYTES",
    "MAX_MANIFEST_NBYTES",
    "MAX_PARTS",
    "Head",
    "Manifest",
    "ManifestTemplate",
    "NewerManifestError",
    "Part",
    "parse_head",
    "parts_of",
]

FORMAT_VERSION: Final = 1
MAX_MANIFEST_NBYTES: Final = 256 << 10
MAX_PARTS: Final = 4096
MAX_ENCODING_NBYTES: Final = 4096
MAX_DATA_NBYTES: Final = 1 << 40
WRITE_ID_NBYTES: Final = 8
CHECKSUM_NBYTES: Final = 8

_MAGIC: Final = b"kvferryM"
_HEAD: Final = struct.Struct("<8sHHIQ")
HEAD_NBYTES: Final = _HEAD.size
_IDENTITY: Final = struct.Struct("<32s32s32s32s16s8sq")
_POSITION: Final = struct.Struct("<q")
_COUNTS: Final = struct.Struct("<IIII")
_PART: Final = struct.Struct("<QQ")
_U64: Final = struct.Struct("<Q")
_INLINE: Final = 1
_HAS_PARENT: Final = 2
_NO_KEY: Final = bytes(KEY_NBYTES)
_NO_WRITE: Final = bytes(WRITE_ID_NBYTES)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a block's data."""

    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Head:
    """The first bytes of a manifest; every length was compared with its limit.

    Attributes:
        inline: Whether the data follows.
        has_parent: Whether the parent's field means anything.
        rest_nbytes: Of what follows the head, the checksum included.
        data_nbytes: Of the data as it is stored.
    """

    inline: bool
    has_parent: bool
    rest_nbytes: int
    data_nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a block says of itself, compared with what it should be.

    Attributes:
        parent: Key of the block before, ``None`` for the first of a chain.
        position: Number of the block in its chain, -1 if that was not known.
        data_nbytes: Of the data as it is stored.
        write_id: In the names of its parts.
        parts: In order; none if the data follows the manifest.
        encoding: What the data went through.
    """

    parent: BlockKey | None
    position: int
    data_nbytes: int
    write_id: bytes
    parts: tuple[Part, ...] = ()
    encoding: bytes = b""


class NewerManifestError(CorruptBlockError):
    """It says that it is of a later version, and may be.

    Attributes:
        nbytes: How long it is.
    """

    def __init__(self, version: int, nbytes: int) -> None:
        super().__init__(f"a manifest of version {version}; this release knows {FORMAT_VERSION}")
        self.nbytes = nbytes

    def require_sound(self, whole: memoryview) -> None:
        """See whether it is just damaged.

        Raises:
            CorruptBlockError: If so.
        """
        end = self.nbytes - CHECKSUM_NBYTES
        if len(whole) < self.nbytes or _U64.unpack_from(whole, end)[0] != xxhash.xxh3_64_intdigest(
            whole[:end]
        ):
            raise CorruptBlockError(f"{self}, and its checksum is wrong")


def parse_head(head: bytes | bytearray | memoryview) -> Head:
    """Read the first :data:`HEAD_NBYTES` bytes.

    Raises:
        NewerManifestError: If a later release may have written it.
        CorruptBlockError: If they begin no manifest that this release knows, or one that is absurdly large.
    """
    magic, version, flags, rest, data = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise CorruptBlockError(f"no manifest begins with {bytes(head[:8])!r}")
    if version > FORMAT_VERSION and CHECKSUM_NBYTES <= rest <= MAX_MANIFEST_NBYTES:
        raise NewerManifestError(version, HEAD_NBYTES + rest)
    if version != FORMAT_VERSION or flags & ~(_INLINE | _HAS_PARENT):
        raise CorruptBlockError(
            f"a manifest of version {version}, flags {flags}; this release knows 1, 0 to 3"
        )
    least = _IDENTITY.size + _COUNTS.size + CHECKSUM_NBYTES
    if not least <= rest <= MAX_MANIFEST_NBYTES or data > MAX_DATA_NBYTES:
        raise CorruptBlockError(f"a manifest of {rest} bytes for {data} bytes of data")
    return Head(bool(flags & _INLINE), bool(flags & _HAS_PARENT), rest, data)


class ManifestTemplate:
    """Makes and checks the manifests of one namespace. Immutable, thread safe.

    Args:
        namespace: Whose blocks.
        tenant: The 16 bytes that stand for its tenant in names.

    Attributes:
        data_nbytes: Size of a block.
        inline_nbytes: Size of a manifest that is followed by its data, without an encoding.
        value_nbytes: Size of a whole value with data and checksum, without an encoding.
    """

    def __init__(self, namespace: TierNamespace, tenant: bytes) -> None:
        self._tenant = tenant
        self.data_nbytes = namespace.spec.block_nbytes
        self._namespace_id = namespace.namespace_id
        self._fingerprint = namespace.spec.fingerprint()
        self._spec = json.dumps(spec_to_json(namespace.spec), separators=(",", ":")).encode("ascii")
        self.inline_nbytes = HEAD_NBYTES + _IDENTITY.size + _COUNTS.size + len(self._spec) + CHECKSUM_NBYTES
        self.value_nbytes = self.inline_nbytes + self.data_nbytes + CHECKSUM_NBYTES
        # what is the same in all manifests of blocks as they lie in memory
        rest = self.inline_nbytes - HEAD_NBYTES
        self._inline_heads = [
            _HEAD.pack(_MAGIC, FORMAT_VERSION, flags, rest, self.data_nbytes)
            for flags in (_INLINE, _INLINE | _HAS_PARENT)
        ]
        self._inline_who = b"".join((self._fingerprint, self._namespace_id, tenant, _NO_WRITE))
        self._inline_end = _COUNTS.pack(len(self._spec), 0, 0, 0) + self._spec

    def build_inline(self, key: BlockKey, parent: BlockKey | None, position: int) -> bytes:
        """As :meth:`build` of a block whose data follows as it lies in memory; in less time."""
        found = b"".join(
            (
                self._inline_heads[parent is not None], key, parent or _NO_KEY, self._inline_who,
                _POSITION.pack(position), self._inline_end,
            )
        )  # fmt: skip
        return found + _U64.pack(xxhash.xxh3_64_intdigest(found))

    def build(self, key: BlockKey, manifest: Manifest) -> bytes:
        """The manifest of a block; with the data behind it if it has no parts."""
        parts, encoding, parent = manifest.parts, manifest.encoding, manifest.parent
        table = b"".join(_PART.pack(part.nbytes, part.checksum) for part in parts)
        rest = _IDENTITY.size + _COUNTS.size + len(self._spec) + len(encoding) + len(table) + CHECKSUM_NBYTES
        flags = (0 if parts else _INLINE) | (0 if parent is None else _HAS_PARENT)
        found = b"".join(
            (
                _HEAD.pack(_MAGIC, FORMAT_VERSION, flags, rest, manifest.data_nbytes),
                _IDENTITY.pack(
                    key, parent or _NO_KEY, self._fingerprint, self._namespace_id, self._tenant,
                    manifest.write_id, manifest.position,
                ),
                _COUNTS.pack(len(self._spec), len(encoding), len(parts), 0),
                self._spec, encoding, table,
            )
        )  # fmt: skip
        return found + _U64.pack(xxhash.xxh3_64_intdigest(found))

    def check(
        self, whole: bytes | bytearray | memoryview, head: Head, key: BlockKey, parent: BlockKey | None
    ) -> Manifest:
        """Read a whole manifest and compare it with what it should be.

        Args:
            whole: Head, rest and checksum.
            head: As :func:`parse_head` found it.
            key: Of the block.
            parent: What its parent must be; :data:`~kvferry.store.tier.UNKNOWN_PARENT`: not compared.

        Raises:
            CorruptBlockError: If it is not the manifest of this block.
        """
        whole = memoryview(whole)
        end = len(whole) - CHECKSUM_NBYTES
        if _U64.unpack(whole[end:])[0] != xxhash.xxh3_64_intdigest(whole[:end]):
            raise CorruptBlockError("the manifest's checksum is wrong")
        stored_key, stored_parent, fingerprint, namespace_id, tenant, write_id, position = (
            _IDENTITY.unpack_from(whole, HEAD_NBYTES)
        )
        if (stored_key, namespace_id, tenant) != (key, self._namespace_id, self._tenant):
            raise CorruptBlockError(
                f"it is block {stored_key.hex()[:16]}… of namespace {namespace_id.hex()[:16]}…, "
                f"tenant {tenant.hex()[:8]}…"
            )
        at = HEAD_NBYTES + _IDENTITY.size
        spec_nbytes, encoding_nbytes, parts, _ = _COUNTS.unpack_from(whole, at)
        at += _COUNTS.size
        if at + spec_nbytes + encoding_nbytes + parts * _PART.size != end or parts > MAX_PARTS:
            raise CorruptBlockError("the lengths in the manifest contradict each other")
        self._check_spec(bytes(whole[at : at + spec_nbytes]), fingerprint)
        at += spec_nbytes
        encoding = bytes(whole[at : at + encoding_nbytes])
        table = whole[at + encoding_nbytes : end]
        found = Manifest(
            BlockKey(stored_parent) if head.has_parent else None,
            position,
            head.data_nbytes,
            write_id,
            tuple(Part(*pair) for pair in _PART.iter_unpack(table)),
            encoding,
        )
        if parent not in (UNKNOWN_PARENT, found.parent):
            raise CorruptBlockError(f"its parent is {_name(found.parent)}, not {_name(parent)}")
        self._check_data(head, found)
        return found

    def inline(self, whole: memoryview, key: BlockKey, parent: BlockKey | None) -> Manifest | None:
        """As :meth:`check` of one that :meth:`build_inline` made, in less time; ``None``: it is none."""
        found = bytes(whole)
        at = HEAD_NBYTES + KEY_NBYTES
        has_parent = found.startswith(self._inline_heads[True])
        own = BlockKey(found[at : at + KEY_NBYTES]) if has_parent else None
        (position,) = _POSITION.unpack_from(found, HEAD_NBYTES + _IDENTITY.size - _POSITION.size)
        if parent not in (UNKNOWN_PARENT, own) or found != self.build_inline(key, own, position):
            return None
        return Manifest(own, position, self.data_nbytes, _NO_WRITE)

    def _check_spec(self, spec: bytes, fingerprint: bytes) -> None:
        if fingerprint != self._fingerprint:
            raise CorruptBlockError(f"it is of a spec with fingerprint {fingerprint.hex()[:16]}…")
        if spec == self._spec:
            return
        try:
            same = spec_from_json(json.loads(spec)).fingerprint() == self._fingerprint
        except (ValueError, RecursionError) as error:
            raise CorruptBlockError(f"its spec is no JSON: {error}") from error
        if not same:
            raise CorruptBlockError("its spec is not that of the namespace")

    def _check_data(self, head: Head, found: Manifest) -> None:
        if head.inline == bool(found.parts):
            raise CorruptBlockError(f"inline is {head.inline}, and there are {len(found.parts)} parts")
        if found.parts and sum(part.nbytes for part in found.parts) != found.data_nbytes:
            raise CorruptBlockError("its parts are not as many bytes as the block")
        if not found.encoding and found.data_nbytes != self.data_nbytes:
            raise CorruptBlockError(f"{found.data_nbytes} bytes of data, a block has {self.data_nbytes}")


def parts_of(whole: memoryview) -> tuple[bytes, int]:
    """Write id and number of parts of a manifest, so that they can be removed; nothing else is compared.

    Raises:
        CorruptBlockError: If it is none.
    """
    head = parse_head(whole[:HEAD_NBYTES])
    end = len(whole) - CHECKSUM_NBYTES
    if HEAD_NBYTES + head.rest_nbytes != len(whole):
        raise CorruptBlockError("the manifest is cut")
    if _U64.unpack(whole[end:])[0] != xxhash.xxh3_64_intdigest(whole[:end]):
        raise CorruptBlockError("the manifest's checksum is wrong")
    write_id = _IDENTITY.unpack_from(whole, HEAD_NBYTES)[5]
    count = _COUNTS.unpack_from(whole, HEAD_NBYTES + _IDENTITY.size)[2]
    if count > MAX_PARTS:
        raise CorruptBlockError(f"a manifest of {count} parts")
    return write_id, count


def _name(key: BlockKey | None) -> str:
    return "none" if key is None else f"{key.hex()[:16]}…"
