"""The native library's own XXH3 against that of ``xxhash``, over every way through it."""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvferry.core.native import native

ARRAY = np.random.default_rng(5).integers(0, 256, 70_000, np.uint8)
DATA = ARRAY.data
START = int(ARRAY.__array_interface__["data"][0])
BIG = (4095, 4096, 4097, 8192, 9999, 65_535, 65_536, 65_537, 69_000)
pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = native().library
    assert found is not None
    for function in (found.kvc_hash_whole, found.kvc_hash_end):
        function.restype = ctypes.c_uint64
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    found.kvc_hash_whole.argtypes = (pointer, size)
    found.kvc_hash_update.argtypes = (pointer, pointer, size)
    return found


def test_every_length(library: ctypes.CDLL) -> None:
    for nbytes in [*range(2049), *BIG]:
        at = nbytes % 7  # of any alignment
        assert library.kvc_hash_whole(START + at, nbytes) == xxh3_64_intdigest(DATA[at : at + nbytes]), nbytes


def test_random_splits(library: ctypes.CDLL) -> None:
    chance = random.Random(7)
    state = ctypes.create_string_buffer(library.kvc_hash_nbytes())
    for _ in range(300):
        nbytes = chance.choice([chance.randrange(600), chance.randrange(5000), chance.randrange(69_000)])
        most = chance.choice([3, 70, 300, 3000, 70_000])
        at = 0
        library.kvc_hash_begin(state)
        while at < nbytes:
            n = min(nbytes - at, chance.randrange(most + 1))
            library.kvc_hash_update(state, START + at, n)
            at += n
            if chance.random() < 0.1:  # asked in between, it goes on
                assert library.kvc_hash_end(state) == xxh3_64_intdigest(DATA[:at])
        assert library.kvc_hash_end(state) == xxh3_64_intdigest(DATA[:nbytes]), (nbytes, most)


@pytest.mark.parametrize("instructions", ["portable", "avx2"])
def test_each_instruction_set(instructions: str) -> None:
    sizes = (0, 200, 241, 257, 1024, 1025, 1089, 9000, 20_000)
    code = (
        "import ctypes, json; from kvferry.core.native import native\n"
        "hash_of = native().library.kvc_hash_whole; hash_of.restype = ctypes.c_uint64\n"
        f"print(json.dumps([hash_of(bytes(i * 37 % 251 for i in range(n)), n) for n in {sizes}]))"
    )
    environment = {**os.environ, "KVFERRY_NATIVE_ISA": instructions}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    expected = [xxh3_64_intdigest(bytes(i * 37 % 251 for i in range(n))) for n in sizes]
    assert json.loads(done.stdout) == expected
