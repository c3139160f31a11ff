"""The header of a file that holds an encoded block: format version 2.

It is that of version 1 (:mod:`kvferry.store.disk.header`) but for its end: the metadata go on with ``codec``,
the pipeline as text, ``lossy`` and ``bound``, and the tensors are ``layers.N.encoded``, the frame of each
layer as ``uint8``, with ``_pad.N`` between them. The checksum covers all of that up to the padding of the
last page. Frames have any size, so each header is made anew, and is as long as it comes to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvferry.codecs.frame import MAX_HEADER_NBYTES, aligned
from kvferry.core.errors import CorruptBlockError
from kvferry.core.keys import BlockKey
from kvferry.core.spec import KVSpec
from kvferry.store.disk.header_fields import (
    ALIGNMENT,
    ENCODED,
    LENGTH_NBYTES,
    TAIL_AT,
    U64,
    dumps,
    has_parent,
    read_fields,
    round_up,
    tensor_entry,
    write_fields,
)
from kvferry.store.encoded_block import Encoding, most_encoded_nbytes

__all__ = ["EncodedFields", "EncodedHeaders", "encoded_nbytes", "encoded_tensors", "parse_encoding"]

_ENCODING: Final = re.compile(
    rb',"codec":("(?:[^"\\]|\\.){0,1000}"),"lossy":"(true|false)","bound":"([0-9.e+-]{1,16})"}', re.ASCII
)
_MOST_ENCODING: Final = 1100  # bytes of the above
_SIZE: Final = re.compile(rb'"layers\.\d{1,9}\.encoded":\{"dtype":"U8","shape":\[(\d{1,15})\]', re.ASCII)
_TENSOR: Final = '"layers.%d.encoded":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}'
_PAD: Final = '"_pad.%d":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}'


class EncodedFields(NamedTuple):
    """What the header of an encoded block says beside its identity."""

    parent: BlockKey | None
    position: int
    checksum: int
    encoding: Encoding
    sizes: tuple[int, ...]


def encoded_nbytes(sizes: Sequence[int]) -> int:
    """Bytes of an encoded block whose frames have these sizes."""
    return sum(map(aligned, sizes))


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """For each frame its number, -1 for a padding, the number of that, start and end."""
    at = pads = 0
    for number, size in enumerate(sizes):
        yield number, 0, at, at + size
        if at + size < (end := at + aligned(size)):
            yield -1, pads, at + size, end
            pads += 1
        at = end
    if at < (end := round_up(at)):
        yield -1, pads, at, end


def encoded_tensors(sizes: Sequence[int]) -> Iterator[tuple[str, dict[str, object]]]:
    """Tensors by name, without a gap from the first byte to the end of the last page."""
    for number, pad, start, stop in _places(sizes):
        name = f"_pad.{pad}" if number < 0 else f"layers.{number}.encoded"
        yield name, tensor_entry("U8", [stop - start], start, stop)


def parse_encoding(
    spec: KVSpec, metadata: Mapping[str, str], tensors: Mapping[str, object]
) -> tuple[Encoding, tuple[int, ...]]:
    """How the block of a parsed header is encoded, and the sizes of its frames, as the tensors seem to say.

    Raises:
        CorruptBlockError: If a frame is missing or larger than it can be.
        KeyError, TypeError, ValueError: If something is not as it should be.
    """
    sizes: list[int] = []
    for number, layer in enumerate(spec.layers):
        tensor = tensors[f"layers.{number}.encoded"]
        (size,) = tensor["shape"]  # type: ignore[index]  # JSON of a file: the caller expects a TypeError
        if not 0 < int(size) <= layer.nbytes + MAX_HEADER_NBYTES:
            raise CorruptBlockError(f"layer {number} of {layer.nbytes} bytes is encoded by {size}")
        sizes.append(int(size))
    if not isinstance(metadata["codec"], str):
        raise CorruptBlockError("the codec in the header is no text")
    encoding = Encoding(metadata["codec"], metadata["lossy"] != "false", float(metadata["bound"]))
    return encoding, tuple(sizes)


class EncodedHeaders:
    """Makes and checks the headers of encoded blocks of one namespace. Immutable, thread safe.

    Args:
        spec: What the blocks are.
        fixed: The metadata that are the same for all, as JSON with a comma between them.

    Attributes:
        most_nbytes: The longest header there may be.
        most_file_nbytes: The largest file.
    """

    def __init__(self, spec: KVSpec, fixed: bytes) -> None:
        self._fixed = fixed
        self._most_sizes = [layer.nbytes + MAX_HEADER_NBYTES for layer in spec.layers]
        digits = len(str(most_encoded_nbytes(spec)))
        longest = (len(_TENSOR) + len(_PAD) + 2 + 6 * digits) * (len(spec.layers) + 1) + _MOST_ENCODING
        self.most_nbytes = round_up(TAIL_AT[True] + len(fixed) + longest)
        self.most_file_nbytes = self.most_nbytes + round_up(most_encoded_nbytes(spec))

    def file_nbytes(self, header_nbytes: int, sizes: Sequence[int]) -> int:
        """Size of the whole file."""
        return header_nbytes + round_up(encoded_nbytes(sizes))

    def build(self, key: BlockKey, fields: EncodedFields) -> bytes:
        """The header of a block: whole pages."""
        encoding = fields.encoding
        tensors = ",".join(
            _PAD % (pad, stop - start, start, stop)
            if number < 0
            else _TENSOR % (number, stop - start, start, stop)
            for number, pad, start, stop in _places(fields.sizes)
        )
        text = f',"codec":{dumps(encoding.codec)},"lossy":"{str(encoding.lossy).lower()}",'
        text += f'"bound":"{encoding.bound:g}"}},{tensors}}}'
        head = write_fields(fields.parent, fields.position, fields.checksum, key, ENCODED)
        body = b"".join((head, self._fixed, text.encode()))
        nbytes = round_up(LENGTH_NBYTES + len(body))
        return U64.pack(nbytes - LENGTH_NBYTES) + body.ljust(nbytes - LENGTH_NBYTES)

    def check(self, header: bytes, key: BlockKey) -> EncodedFields | None:
        """What a header says if it is exactly what :meth:`build` makes for ``key``.

        ``None`` says nothing bad yet: :func:`~kvferry.store.disk.header.parse_header` finds out what it is.
        """
        found = read_fields(header)
        if found is None:
            return None
        at = TAIL_AT[has_parent(header)] + len(self._fixed)
        how = _ENCODING.match(header, at)
        if how is None:
            return None
        sizes = tuple(map(int, _SIZE.findall(header, how.end())))
        fits = len(sizes) == len(self._most_sizes)
        if not fits or not all(0 < s <= most for s, most in zip(sizes, self._most_sizes, strict=True)):
            return None
        try:
            encoding = Encoding(json.loads(how[1]), how[2] == b"true", float(how[3]))
        except ValueError:
            return None
        fields = EncodedFields(*found, encoding, sizes)
        return fields if self.build(key, fields) == header else None


assert ALIGNMENT % 64 == 0  # frames are aligned in the file as they are in the block
