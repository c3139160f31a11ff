"""The file of a block: a safetensors file whose data starts on a page.

The file is ``8 bytes of header length, header, data``. The header is JSON padded with spaces so that data
starts on a page; the data is the block as it lies in memory, padded with zeros to a whole number of pages,
so that a file is written and read straight from and into page-aligned memory. Safetensors allows no gaps:
what lies between tensors is a ``uint8`` tensor ``_pad.N``.

All blocks of a namespace have the same header but for four fields of fixed width at its start: key, parent,
position and checksum. :class:`HeaderTemplate` therefore makes a header by filling these in and checks one by
comparing bytes; :func:`parse_header` reads any header, also of a version that spelled the rest differently.

That is format version 1, a block as it is. Version 2 holds an encoded block, a ``uint8`` tensor a layer: see
:mod:`kvferry.store.disk.encoded_header`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Final, cast

from kvferry.core.errors import ConfigError, CorruptBlockError
from kvferry.core.keys import KEY_NBYTES, BlockKey
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, Restore, TensorSpec
from kvferry.store.disk.encoded_header import (
    EncodedHeaders,
    encoded_nbytes,
    encoded_tensors,
    parse_encoding,
)
from kvferry.store.disk.header_fields import (
    ALIGNMENT,
    ENCODED,
    LENGTH_NBYTES,
    PLAIN,
    TAIL_AT,
    U64,
    checksum_at,
    dumps,
    has_parent,
    read_fields,
    round_up,
    tensor_entry,
    write_fields,
)
from kvferry.store.encoded_block import Encoding
from kvferry.store.tier import TierNamespace

__all__ = [
    "ALIGNMENT",
    "FORMAT_VERSION",
    "MAX_HEADER_NBYTES",
    "BlockHeader",
    "HeaderTemplate",
    "decoded_header",
    "header_length",
    "parse_header",
    "readable",
    "spec_from_json",
    "spec_to_json",
]

FORMAT_VERSION: Final = ENCODED
"""The newest that this release reads and writes; what is not encoded is written as version 1."""
MAX_HEADER_NBYTES: Final = 64 << 20

_DTYPES: Final = {
    DType.BFLOAT16: "BF16",
    DType.FLOAT16: "F16",
    DType.FLOAT32: "F32",
    DType.FLOAT64: "F64",
    DType.FLOAT8_E4M3FN: "F8_E4M3",
    DType.FLOAT8_E5M2: "F8_E5M2",
    DType.INT8: "I8",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
}


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a file says of itself.

    Attributes:
        version: Format version.
        key: Key of the block.
        parent: Key of the block before, ``None`` for the first of a chain.
        position: Number of the block in its chain, -1 if that was not known.
        checksum: xxh3_64 of the block.
        namespace_id: The namespace it was written for.
        tenant: The tenant it was written for.
        fingerprint: That of ``spec``, as stored.
        spec: Shape and identity of the block; its own fingerprint is ``fingerprint``.
        adapter: Name of the adapter, if any.
        adapter_revision: Its revision.
        header_nbytes: Where the data starts.
        encoding: How the block is encoded; ``None`` if it is not.
        sizes: Of the frames of an encoded block, one a layer.
    """

    version: int
    key: BlockKey
    parent: BlockKey | None
    position: int
    checksum: int
    namespace_id: bytes
    tenant: str
    fingerprint: bytes
    spec: KVSpec
    adapter: str | None
    adapter_revision: str | None
    header_nbytes: int
    encoding: Encoding | None = None
    sizes: tuple[int, ...] = ()

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data, which the checksum covers."""
        return encoded_nbytes(self.sizes) if self.version == ENCODED else self.spec.block_nbytes

    @property
    def file_nbytes(self) -> int:
        """Size of the whole file."""
        return self.header_nbytes + round_up(self.data_nbytes)

    @property
    def lossy(self) -> bool:
        """Whether the block is not just what was saved."""
        return self.encoding is not None and self.encoding.lossy

    def namespace(self) -> TierNamespace:
        """The namespace as far as the header knows it: the salt of its scope is not stored."""
        scope = KeyScope(self.adapter, self.adapter_revision)
        return TierNamespace(self.tenant, self.namespace_id, self.spec, scope)


class HeaderTemplate:
    """Makes and checks the headers of one namespace. Immutable, thread safe.

    Attributes:
        header_nbytes: Size of every header with its length field; a multiple of 4096.
        data_nbytes: Size of the block.
        file_nbytes: Size of every file: header and data, rounded up to 4096.
        rest_nbytes: Bytes of the data in its last, partial page; 0 if it has none.
    """

    def __init__(self, namespace: TierNamespace) -> None:
        spec = namespace.spec
        self.data_nbytes = spec.block_nbytes
        self._namespace = namespace
        fixed = _fixed_part(namespace)
        self.header_nbytes = round_up(TAIL_AT[True] + len(fixed))
        self.file_nbytes = self.header_nbytes + round_up(self.data_nbytes)
        self.rest_nbytes = self.data_nbytes % ALIGNMENT
        self._start = U64.pack(self.header_nbytes - LENGTH_NBYTES)
        self._tails = tuple(fixed.ljust(self.header_nbytes - TAIL_AT[has]) for has in (False, True))

    @cached_property
    def encoded(self) -> EncodedHeaders:
        """The same for encoded blocks of the namespace."""
        return EncodedHeaders(self._namespace.spec, _metadata(self._namespace).encode())

    def build(self, key: BlockKey, parent: BlockKey | None, position: int, checksum: int = 0) -> bytes:
        """The header of a block, ``header_nbytes`` long; its checksum may be put in later."""
        head = write_fields(parent, position, checksum, key)
        return b"".join((self._start, head, self._tails[parent is not None]))

    @staticmethod
    def checksum_at(parent: BlockKey | None) -> int:
        """Where the 16 hexadecimal digits of the checksum are in the header of a block with that parent."""
        return checksum_at(parent)

    def check(self, header: bytes, key: BlockKey) -> tuple[BlockKey | None, int, int] | None:
        """Parent, position and checksum of a header if it is exactly what :meth:`build` makes for ``key``.

        ``None`` says nothing bad yet: :func:`parse_header` finds out what it is.
        """
        if len(header) != self.header_nbytes:
            return None
        named = has_parent(header)
        tail_at = TAIL_AT[named]
        if header[tail_at:] != self._tails[named]:
            return None
        found = read_fields(header)
        if found is None or self._start + write_fields(*found, key) != header[:tail_at]:
            return None
        return found

    def same_layout(self, other: HeaderTemplate) -> bool:
        """Whether both make the same headers."""
        return self._start == other._start and self._tails == other._tails


def _metadata(namespace: TierNamespace) -> str:
    """What headers of all versions go on with: metadata that are the same for a namespace."""
    spec, scope = namespace.spec, namespace.scope
    metadata = {
        "namespace": namespace.namespace_id.hex(),
        "tenant": readable(namespace.tenant),
        "fingerprint": spec.fingerprint().hex(),
        "scope": dumps({"adapter": scope.adapter, "adapter_revision": scope.adapter_revision}),
        "spec": dumps(spec_to_json(spec)),
    }
    return dumps(metadata)[1:-1]


def decoded_header(header: BlockHeader, checksum: int) -> bytes:
    """The header of a file with the tensors of an encoded block: version 1, and what they come from."""
    how = header.encoding
    assert how is not None  # else the file is that already
    more = f',"codec":{dumps(how.codec)},"lossy":"{str(how.lossy).lower()}","bound":"{how.bound:g}"'
    body = write_fields(header.parent, header.position, checksum, header.key)
    body += _fixed_part(header.namespace(), more)
    nbytes = round_up(LENGTH_NBYTES + len(body))
    return U64.pack(nbytes - LENGTH_NBYTES) + body.ljust(nbytes - LENGTH_NBYTES)


def _fixed_part(namespace: TierNamespace, more: str = "") -> bytes:
    spec = namespace.spec
    entries = list(_tensors(spec))
    tensors = dumps(named := dict(entries))
    if len(named) != len(entries):
        raise ConfigError(f"{spec.model!r}: two tensors have the same name once written as UTF-8")
    ends = _metadata(namespace) + more + "}"
    return (ends + ("," + tensors[1:] if len(tensors) > len("{}") else "}")).encode()


def _tensors(spec: KVSpec) -> Iterable[tuple[str, dict[str, object]]]:
    """Tensors by name, without a gap from the first byte to the end of the last page."""
    pads, at, entry = 0, 0, tensor_entry
    for number, layer in enumerate(spec.layers):
        if spec.layout != "kvferry":  # an engine's own: what lies where is its secret
            yield f"layers.{number}.bytes", entry("U8", [layer.nbytes], at, at + layer.nbytes)
            at += layer.nbytes
            continue
        start = at
        for tensor in layer.tensors:
            name = f"layers.{number}.{readable(tensor.name)}"
            yield name, entry(_DTYPES[tensor.dtype], tensor.shape, at, at + tensor.nbytes)
            at += tensor.nbytes
        if at < start + layer.nbytes:
            yield f"_pad.{pads}", entry("U8", [start + layer.nbytes - at], at, start + layer.nbytes)
            pads, at = pads + 1, start + layer.nbytes
    if at < (end := round_up(at)):
        yield f"_pad.{pads}", entry("U8", [end - at], at, end)


def readable(value: str) -> str:
    """``value`` as headers have it: what no UTF-8 can hold is escaped, since readers refuse such a file."""
    return value.encode("utf-8", "backslashreplace").decode()


def spec_to_json(spec: KVSpec) -> dict[str, object]:
    """A spec as plain JSON values; equal layers in a row are given once, with their number."""
    layers = [
        {
            "count": len(list(run)),
            "tensors": [
                {"name": t.name, "shape": list(t.shape), "dtype": t.dtype.value} for t in layer.tensors
            ],
        }
        for layer, run in groupby(spec.layers)
    ]
    return {
        "model": spec.model,
        "revision": spec.revision,
        "block_tokens": spec.block_tokens,
        "group": spec.group,
        "restore": {"kind": spec.restore.kind, "window_tokens": spec.restore.window_tokens},
        "layout": spec.layout,
        "ranks": {
            "tp": [spec.tp_rank, spec.tp_size],
            "pp": [spec.pp_rank, spec.pp_size],
            "cp": [spec.cp_rank, spec.cp_size],
        },
        "layers": layers,
    }


_MAX_LAYERS: Final = 1 << 16


def spec_from_json(value: Any) -> KVSpec:  # noqa: ANN401  JSON of a file
    """The inverse of :func:`spec_to_json`.

    Raises:
        CorruptBlockError: If it is no spec.
    """
    try:
        if sum(int(run["count"]) for run in value["layers"]) > _MAX_LAYERS:
            raise CorruptBlockError(f"spec of more than {_MAX_LAYERS} layers")
        layers: list[LayerSpec] = []
        for run in value["layers"]:
            tensors = tuple(
                TensorSpec(t["name"], tuple(int(n) for n in t["shape"]), DType(t["dtype"]))
                for t in run["tensors"]
            )
            layers.extend([LayerSpec(tensors)] * int(run["count"]))
        restore = value["restore"]
        ranks = {
            f"{axis}_{what}": int(number)
            for axis in ("tp", "pp", "cp")
            for what, number in zip(("rank", "size"), value["ranks"][axis], strict=True)
        }
        return KVSpec(
            model=value["model"],
            revision=value["revision"],
            layers=tuple(layers),
            block_tokens=int(value["block_tokens"]),
            group=value["group"],
            restore=Restore(restore["kind"], restore["window_tokens"]),
            layout=value["layout"],
            **ranks,
        )
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise CorruptBlockError(f"no spec in the header: {type(error).__name__}: {error}") from error


def header_length(start: bytes) -> int:
    """Size of the whole header, from the first 8 bytes of the file.

    Raises:
        CorruptBlockError: If that is none of ours: not whole pages, or absurdly large.
    """
    if len(start) < LENGTH_NBYTES:
        raise CorruptBlockError(f"the file has {len(start)} bytes, its header's length alone has 8")
    nbytes = LENGTH_NBYTES + int(U64.unpack(start[:LENGTH_NBYTES])[0])
    if nbytes % ALIGNMENT or nbytes > MAX_HEADER_NBYTES:
        raise CorruptBlockError(f"a header of {nbytes} bytes: not whole pages up to {MAX_HEADER_NBYTES}")
    return nbytes


def parse_header(header: bytes) -> BlockHeader:
    """Read a header of any version that this release knows.

    Raises:
        CorruptBlockError: If it is none, or contradicts itself.
    """
    if header_length(header) != len(header):
        raise CorruptBlockError(f"a header of {header_length(header)} bytes is cut to {len(header)}")
    try:
        tree = json.loads(header[LENGTH_NBYTES:])
        metadata = cast("Mapping[str, str]", tree["__metadata__"])
        version = int(metadata["version"])
        if metadata["format"] != "kvferry.block" or version not in (PLAIN, ENCODED):
            raise CorruptBlockError(
                f"format {metadata['format']!r} version {metadata['version']!r}; this release reads "
                f"'kvferry.block' up to version {FORMAT_VERSION}"
            )
        tensors = {name: value for name, value in tree.items() if name != "__metadata__"}
        found = _from_metadata(metadata, len(header))
        expected = dict(_tensors(found.spec))
        if version == ENCODED:
            encoding, sizes = parse_encoding(found.spec, metadata, tensors)
            found = replace(found, encoding=encoding, sizes=sizes)
            expected = dict(encoded_tensors(sizes))
        elif "codec" in metadata:  # exported: decoded, but of what was encoded
            lossy = metadata["lossy"] != "false"
            found = replace(found, encoding=Encoding(metadata["codec"], lossy, float(metadata["bound"])))
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
        raise CorruptBlockError(f"the header cannot be read: {type(error).__name__}: {error}") from error
    if found.spec.fingerprint() != found.fingerprint:
        raise CorruptBlockError("the spec in the header does not have the fingerprint in the header")
    if tensors != expected:
        raise CorruptBlockError("the tensors in the header are not those of the spec in the header")
    return found


def _from_metadata(metadata: Mapping[str, str], header_nbytes: int) -> BlockHeader:
    key, parent = bytes.fromhex(metadata["key"]), bytes.fromhex(metadata["parent"])
    if len(key) != KEY_NBYTES or len(parent) not in (0, KEY_NBYTES):
        raise CorruptBlockError(f"key of {len(key)} and parent of {len(parent)} bytes")
    scope = json.loads(metadata["scope"])
    return BlockHeader(
        version=int(metadata["version"]),
        key=BlockKey(key),
        parent=BlockKey(parent) if parent else None,
        position=int(metadata["position"]),
        checksum=int(metadata["xxh3_64"], 16),
        namespace_id=bytes.fromhex(metadata["namespace"]),
        tenant=metadata["tenant"],
        fingerprint=bytes.fromhex(metadata["fingerprint"]),
        spec=spec_from_json(json.loads(metadata["spec"])),
        adapter=scope["adapter"],
        adapter_revision=scope["adapter_revision"],
        header_nbytes=header_nbytes,
    )
