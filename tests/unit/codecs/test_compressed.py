"""Byte stages at the ends of their pieces (C089)."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from kvferry.codecs.compressed import Lz4Stage, ZstdStage
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CorruptBlockError

LIMIT = 4096
GIB = 1 << 30


def stage_of(kind: type[Lz4Stage | ZstdStage]) -> Lz4Stage | ZstdStage:
    stage = kind()
    stage.piece_nbytes = LIMIT
    return stage


@pytest.mark.parametrize("kind", [Lz4Stage, ZstdStage])
@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("nbytes", [LIMIT - 1, LIMIT, LIMIT + 1, 2 * LIMIT - 1, 2 * LIMIT, 2 * LIMIT + 1])
def test_pieces_are_split_and_joined_exactly(
    kind: type[Lz4Stage | ZstdStage], nbytes: int, random: bool
) -> None:
    stage = stage_of(kind)
    data = np.random.default_rng(1).integers(0, 256 if random else 2, nbytes, np.uint8)
    dst = page_aligned(stage.max_encoded_nbytes(nbytes))
    used = stage.encode_into(data.data, dst)
    out = np.full(nbytes, 0xA5, np.uint8)
    assert stage.decode_into(dst[:used], out.data) == nbytes
    assert np.array_equal(out, data)
    pieces, at = 0, 0
    while at < used:
        at += 8 + struct.unpack_from("<I", dst, at)[0]
        pieces += 1
    assert pieces == -(-nbytes // LIMIT)


@pytest.mark.parametrize("kind", [Lz4Stage, ZstdStage])
@pytest.mark.parametrize(("packed", "plain"), [(0xFFFFFFFF, 100), (20, 0xFFFFFFFF), (20, 0), (20, LIMIT + 1)])
def test_lengths_are_compared_before_anything_is_made(
    kind: type[Lz4Stage | ZstdStage], packed: int, plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(kind)
    monkeypatch.setattr(kind, "decompress", lambda *_: pytest.fail("it was decompressed"))
    with pytest.raises(CorruptBlockError, match=f"declares {packed} bytes for {plain}"):
        stage.decode_into(memoryview(struct.pack("<II", packed, plain) + bytes(20)), page_aligned(2 * LIMIT))


@pytest.mark.parametrize("kind", [Lz4Stage, ZstdStage])
def test_a_piece_that_says_less_than_it_holds(kind: type[Lz4Stage | ZstdStage]) -> None:
    stage = stage_of(kind)
    dst = page_aligned(stage.max_encoded_nbytes(1000))
    used = stage.encode_into(memoryview(bytes(1000)), dst)
    for plain in (999, 1001):
        struct.pack_into("<I", dst, 4, plain)
        with pytest.raises(CorruptBlockError):
            stage.decode_into(dst[:used], page_aligned(2000))


def _available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", [Lz4Stage, ZstdStage])
@pytest.mark.parametrize("nbytes", [2 * GIB - 1, 2 * GIB, 2 * GIB + 1])
def test_more_than_two_gib_at_once(kind: type[Lz4Stage | ZstdStage], nbytes: int) -> None:
    if _available() < 12 * GIB:
        pytest.skip("needs 12 GiB of free memory")
    stage = kind()
    data = np.frombuffer(page_aligned(nbytes), np.uint8)
    data[:: 1 << 20] = 1
    data[-1] = 7
    dst = page_aligned(stage.max_encoded_nbytes(nbytes))
    used = stage.encode_into(data.data, dst)
    out = np.frombuffer(page_aligned(nbytes), np.uint8)
    assert stage.decode_into(dst[:used], out.data) == nbytes
    assert np.array_equal(out, data)
