from __future__ import annotations

import struct

import pytest

from kvferry.codecs import CodecPipeline, decode_frame
from kvferry.codecs.frame import (
    MAX_HEADER_NBYTES,
    StageId,
    encode_header,
    header_nbytes,
    parse_frame,
    stage_bytes,
)
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.testing.codecs import kv_layer

LAYER = kv_layer(16, 2, 64)
STAGES: tuple[StageId, ...] = (("shuffle", {}), ("zstd", {"level": 3}))


def frame(body: bytes = b"body", decoded: int = 8, **flags: bool) -> bytearray:
    named = stage_bytes(STAGES)
    whole = bytearray(header_nbytes(named) + len(body))
    kept = {"lossy": False, "stored_raw": False, **flags}
    encode_header(memoryview(whole), named, decoded, len(body), **kept)
    whole[header_nbytes(named) :] = body
    return whole


def encoded(text: str = "ebp") -> bytes:
    pipeline = CodecPipeline.parse(text)
    dst = page_aligned(pipeline.max_encoded_nbytes(LAYER))
    return bytes(dst[: pipeline.encode_into(memoryview(bytes(LAYER.nbytes)), LAYER, dst)])


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("stored_raw", [False, True])
def test_what_was_written_is_read(lossy: bool, stored_raw: bool) -> None:
    found = parse_frame(memoryview(frame(lossy=lossy, stored_raw=stored_raw)))
    assert found.stage_ids() == STAGES
    assert (found.lossy, found.stored_raw) == (lossy, stored_raw)
    assert found.decoded_nbytes == 8
    assert bytes(found.body) == b"body"


def test_the_format_is_pinned() -> None:
    fixed = bytes.fromhex("4b5663 01 02 00 4000 1d00 000000000000 0800000000000000 0400000000000000")
    named = b"\x92\x92\xa7shuffle\x80\x92\xa4zstd\x81\xa5level\x03"
    assert (
        bytes(frame(stored_raw=True))
        == (fixed[:8] + struct.pack("<H", len(named)) + fixed[10:] + named).ljust(64, b"\0") + b"body"
    )


def test_the_body_is_aligned_as_the_frame_is() -> None:
    for level in range(1, 8):
        assert header_nbytes(stage_bytes((("zstd", {"level": level}),) * level)) % 64 == 0


def test_two_frames_in_a_row_are_no_frame() -> None:
    for wrong in (encoded() * 2, encoded() + b"\0", encoded()[:-1], encoded()[:20], b""):
        with pytest.raises(CorruptBlockError):
            decode_frame(memoryview(wrong), LAYER, page_aligned(LAYER.nbytes))


@pytest.mark.parametrize("at", [16, 24])
@pytest.mark.parametrize("declared", [1 << 40, (1 << 64) - 1])
def test_a_header_that_declares_a_terabyte(at: int, declared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(nbytes: int) -> memoryview:
        asked.append(nbytes)
        return memoryview(bytearray(nbytes))

    monkeypatch.setattr("kvferry.codecs.scratch.page_aligned", counted)
    for text in ("ebp", "shuffle|zstd", "int8|lz4"):
        wrong = bytearray(encoded(text))
        struct.pack_into("<Q", wrong, at, declared)
        asked.clear()
        with pytest.raises(CorruptBlockError, match=str(declared)):
            decode_frame(memoryview(wrong), LAYER, page_aligned(LAYER.nbytes))
        assert not asked


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(0, 0x58, "magic"), (3, 2, "format 2"), (4, 0x80, "flags"), (6, 65, "header"), (9, 0xFF, "header")],
)
def test_damaged_headers(at: int, value: int, message: str) -> None:
    wrong = frame()
    wrong[at] = value
    with pytest.raises(CorruptBlockError, match=message):
        parse_frame(memoryview(wrong))


def with_stages(named: bytes) -> memoryview:
    size = header_nbytes(named)
    whole = bytearray(size + LAYER.nbytes)
    encode_header(memoryview(whole), named, LAYER.nbytes, LAYER.nbytes, lossy=False, stored_raw=False)
    return memoryview(whole)


def test_a_stage_that_is_not_installed() -> None:
    with pytest.raises(CodecError, match="did you mean ebp"):
        decode_frame(with_stages(stage_bytes((("ebb", {}),))), LAYER, page_aligned(LAYER.nbytes))


@pytest.mark.parametrize(
    "named",
    [
        b"\xc1",
        b"\x91",
        b"\x91\x01",
        stage_bytes((("ebp", {}),)) + b"\0",
        b"\x99" + b"\x92\xa3raw\x80" * 9,
        stage_bytes((("ebp", {"bits": 7}),)),
        stage_bytes((("ebp", {"size": 1}),)),
        stage_bytes((("lz4", {}), ("ebp", {}))),
        stage_bytes((("zstd", {"level": 1 << 62}),)),
    ],
)
def test_stages_that_cannot_be(named: bytes) -> None:
    with pytest.raises(CodecError):
        decode_frame(with_stages(named), LAYER, page_aligned(LAYER.nbytes))


def test_too_many_stages_and_too_long_parameters() -> None:
    with pytest.raises(CodecError, match="9 stages"):
        stage_bytes((("lz4", {}),) * 9)
    with pytest.raises(CodecError, match="bytes of parameters"):
        stage_bytes((("lz4", {"text": "x" * MAX_HEADER_NBYTES}),))
