"""What is sent of a block is the same value whenever it is hashed, in a command that ends where it should."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
import xxhash

from kvferry.store.remote.backend import Put
from kvferry.store.remote.payload import Pieces, send_block, send_part
from kvferry.store.remote.redis.requests import Write
from kvferry.store.remote.redis.resp import command

MANIFEST = b"a manifest"
SIZES = [1, 128 << 10, (128 << 10) + 1, 1 << 20, 4 << 20, (4 << 20) + 1, 9 << 20]
DATA = memoryview(np.random.default_rng(1).bytes(SIZES[-1]))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_block_is_its_manifest_its_data_and_their_checksum(nbytes: int, last: bool) -> None:
    data = DATA[:nbytes]
    sent = b"".join(b"".join(pieces) for pieces in send_block(MANIFEST, data, last=last))
    assert sent == MANIFEST + data.tobytes() + xxhash.xxh3_64_digest(data)[::-1]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_part_is_its_data(nbytes: int, last: bool) -> None:
    assert b"".join(b"".join(pieces) for pieces in send_part(DATA[:nbytes], last)) == DATA[:nbytes]


def _block(data: memoryview, last: bool) -> Iterable[Pieces]:
    return send_block(MANIFEST, data, last=last)


@pytest.mark.parametrize("seconds", [0, 600])
@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_command_is_whole_however_the_value_is_cut(nbytes: int, only_new: bool, seconds: int) -> None:
    data = DATA[:nbytes]
    value = MANIFEST + data.tobytes() + xxhash.xxh3_64_digest(data)[::-1]
    options = [b"NX"] * only_new + ([b"EX", b"600"] if seconds else [])

    for last in (False, True):
        write = Write(Put("name", len(value), partial(_block, data), only_new), seconds)
        sent = b"".join(b"".join(pieces) for pieces in write.pieces(last=last))
        assert sent == command(b"SET", b"name", value, *options)


@pytest.mark.parametrize(("last", "calls"), [(False, 1), (True, 2)])
def test_the_last_block_is_hashed_while_it_is_taken(last: bool, calls: int) -> None:
    """All others are sent whole: what is behind them would wait for a second call."""
    assert len(list(send_block(MANIFEST, DATA[: 1 << 20], last=last))) == calls
