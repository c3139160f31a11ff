"""Blocking batches by address, through a real daemon and over a store in this process."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.client import Client, ClientOptions, RawBlocks, raw
from kvferry.core import raw_copy
from kvferry.core.blockstore import WriteLease
from kvferry.core.buffers import ByteArray
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, UnavailableError
from kvferry.core.keys import BlockKey
from kvferry.core.memory import MemoryStore
from kvferry.core.raw_copy import Segments
from kvferry.testing.blocks import block_bytes, small_spec
from kvferry.testing.processes import Command

SPEC = small_spec("raw", pages=4)
TOKENS = SPEC.block_tokens
NBYTES = SPEC.block_nbytes


def put(to: RawBlocks, keys: Sequence[BlockKey], segments: Sequence[Segments]) -> list[bool]:
    return to.put_batch(keys, segments, parent=None, deadline=deadline_in(30))


def get(of: RawBlocks, keys: Sequence[BlockKey], segments: Sequence[Segments]) -> list[bool]:
    return of.get_batch(keys, segments, deadline=deadline_in(30))


class Pages:
    """An engine's pages: each a few pieces in arrays of their own, as a layer-first pool has them."""

    def __init__(self, count: int, pieces: int) -> None:
        self.arrays: list[ByteArray] = [np.zeros((count, NBYTES // pieces), np.uint8) for _ in range(pieces)]

    def segments(self, numbers: Sequence[int]) -> list[Segments]:
        return [[(int(a[n].ctypes.data), a.shape[1]) for a in self.arrays] for n in numbers]

    def fill(self, number: int, data: bytes) -> None:
        for array, part in zip(
            self.arrays, np.frombuffer(data, np.uint8).reshape(len(self.arrays), -1), strict=True
        ):
            array[number] = part

    def content(self, number: int) -> bytes:
        return b"".join(bytes(array[number]) for array in self.arrays)


def filled(keys: Sequence[BlockKey], pieces: int = 4) -> Pages:
    pages = Pages(len(keys), pieces)
    for number, key in enumerate(keys):
        pages.fill(number, block_bytes(key, NBYTES))
    return pages


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a daemon in a process of its own."""
    folder: Path = tmp_path_factory.mktemp("raw")
    words = ["--socket", f"{folder}/d.sock", "--disk", "none", "--http", "none", "--capacity", "16MiB"]
    with Command(
        "serve", *words, "--set", "daemon.listen=none", "--set", "daemon.token_file=none"
    ) as command:
        command.wait_ready()
        yield f"unix://{folder}/d.sock"


@pytest.fixture(params=["shared", "sent"])
def client(served: str, request: pytest.FixtureRequest) -> Iterator[Client]:
    options = ClientOptions(share_memory=request.param == "shared", call_timeout_s=30)
    with Client(served, options) as made:
        made.namespace(SPEC).clear()
        yield made


def test_pages_go_in_and_come_out_elsewhere(client: Client) -> None:
    batches = RawBlocks(client.namespace(SPEC))
    keys = batches.namespace.keys(range(6 * TOKENS))
    pages, other = filled(keys), Pages(9, 2)
    assert batches.exists_prefix(keys) == 0
    numbers = [5, 0, 3, 1, 2, 4]
    chain = [keys[n] for n in range(6)]
    assert put(batches, chain[:4], pages.segments(range(4))) == [True] * 4
    assert batches.exists_prefix(chain) == 4
    assert put(batches, chain, pages.segments(range(6))) == [True] * 6
    assert get(batches, chain, other.segments(numbers)) == [True] * 6
    assert [other.content(n) for n in numbers] == [block_bytes(key, NBYTES) for key in chain]
    assert not any(other.content(n).strip(b"\0") for n in (6, 7, 8)), "no other page was touched"


def test_a_miss_in_the_middle_hides_nothing(client: Client) -> None:
    batches = RawBlocks(client.namespace(SPEC))
    keys = batches.namespace.keys(range(8 * TOKENS))
    pages, other = filled(keys), Pages(8, 4)
    put(batches, keys, pages.segments(range(8)))
    batches.namespace.remove([keys[1], keys[4], keys[5]])
    assert batches.exists_prefix(keys) == 1
    found = get(batches, keys, other.segments(range(8)))
    assert found == [True, False, True, True, False, False, True, True]
    for number, key in enumerate(keys):
        assert other.content(number) == (block_bytes(key, NBYTES) if found[number] else bytes(NBYTES))


def test_keys_that_come_twice_and_batches_of_none(client: Client) -> None:
    batches = RawBlocks(client.namespace(SPEC))
    keys = batches.namespace.keys(range(2 * TOKENS))
    pages = filled([keys[0], keys[0], keys[1]])
    twice = [keys[0], keys[0], keys[1]]
    assert put(batches, twice, pages.segments(range(3))) == [True] * 3
    other = Pages(3, 4)
    assert get(batches, keys, other.segments(range(2))) == [True, True]
    assert (
        batches.put_batch([], [], parent=None, deadline=0.0) == batches.get_batch([], [], deadline=0.0) == []
    )
    assert batches.exists_prefix([]) == 0


@pytest.mark.parametrize(
    ("segments", "what"),
    [
        ([[(4096, NBYTES - 1)]], f"have {NBYTES - 1} bytes, a block of this spec has {NBYTES}"),
        ([[(0, NBYTES)]], "at address 0x0"),
        ([[(1 << 64, NBYTES)]], "at address"),
        ([[(4096, -1), (4096, NBYTES + 1)]], "-1 bytes"),
        ([], "1 keys, and segments of 0 blocks"),
    ],
)
def test_segments_that_cannot_be_meant(segments: list[Segments], what: str) -> None:
    batches = RawBlocks(MemoryStore(1 << 20).namespace(SPEC))
    keys = batches.namespace.keys(range(TOKENS))
    with pytest.raises(ConfigError, match=what):
        batches.get_batch(keys, segments, deadline=deadline_in(20))
    with pytest.raises(ConfigError, match=what):
        batches.put_batch(keys, segments, parent=None, deadline=deadline_in(20))


def test_what_failed_or_is_not_known_does_not_count_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in three pieces: of the second nobody knows, and the third is not tried."""
    store = MemoryStore(1 << 20)
    batches = RawBlocks(store.namespace(SPEC))
    keys = batches.namespace.keys(range(6 * TOKENS))
    monkeypatch.setattr(raw, "_PIECE_NBYTES", 2 * NBYTES)
    commits: list[int] = []

    def commit(lease: WriteLease, deadline: float) -> None:
        del deadline
        commits.append(len(lease))
        if len(commits) == 2:
            raise UnavailableError("no answer")
        lease.commit()

    monkeypatch.setattr(raw, "_commit", commit)
    segments = filled(keys).segments(range(6))
    stored = batches.put_batch(keys, segments, parent=None, deadline=deadline_in(20))
    assert stored == [True, True, False, False, False, False]
    assert commits == [2, 2]
    assert batches.exists_prefix(keys) == 2
    assert store.stats().leases == 0
    assert batches.put_batch(keys, segments, parent=None, deadline=deadline_in(20)) == [True] * 6
    lease = store.namespace(SPEC).load(keys, deadline=deadline_in(20))  # none of these can be evicted
    more = batches.namespace.keys(range(500, 500 + 64 * TOKENS))
    stored = batches.put_batch(more, [segments[0]] * 64, parent=None, deadline=deadline_in(0))
    assert stored == [tier is not None for tier in batches.namespace.lookup(more).tiers]
    assert not all(stored)
    lease.release()
    store.close()


def test_while_the_daemon_is_away_nothing_is_there(tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/none") as client:
        batches = RawBlocks(client.namespace(SPEC))
        keys = batches.namespace.keys(range(2 * TOKENS))
        pages = filled(keys)
        assert batches.exists_prefix(keys) == 0
        assert put(batches, keys, pages.segments(range(2))) == [
            False,
            False,
        ]
        assert get(batches, keys, pages.segments(range(2))) == [False, False]


def test_threads_move_batches_of_their_own(client: Client) -> None:
    batches = RawBlocks(client.namespace(SPEC))
    begin = threading.Barrier(4)

    def both_ways(thread: int) -> bool:
        keys = batches.namespace.keys([1000 + thread, *range(8 * TOKENS - 1)])
        pages, other = filled(keys), Pages(8, 2)
        begin.wait(30)
        done = put(batches, keys, pages.segments(range(8)))
        done += get(batches, keys, other.segments(range(8)))
        return all(done) and [other.content(n) for n in range(8)] == [block_bytes(k, NBYTES) for k in keys]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(both_ways, range(4)))


def test_the_documented_example_runs(served: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    (code,) = (part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "RawBlocks" in part)
    scope: dict[str, Any] = {"hashes": [bytes([number]) * 32 for number in range(8)]}
    exec(code.replace("Client()", f"Client({served!r})"), scope)
    assert (scope["done"], scope["hits"], scope["here"]) == ([True] * 8, 8, [True] * 8)


@pytest.mark.parametrize("native", [True, False])
def test_copies_are_right_to_the_byte(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(raw_copy, "pages_kernel", lambda: None)
    rng = np.random.default_rng(6)
    memory = rng.integers(0, 256, 1 << 20, np.uint8)
    places = [(0, 1), (13, 4096), (5000, 0), (70_001, 100_000), (300_000, 129)]
    segments = [(int(memory.ctypes.data) + at, nbytes) for at, nbytes in places]
    wanted = b"".join(bytes(memory[at : at + nbytes]) for at, nbytes in places)
    block = np.zeros(len(wanted), np.uint8)
    raw_copy.copy_segments([block.data], [segments], to_segments=False)
    assert bytes(block) == wanted
    before, fresh = memory.copy(), rng.integers(0, 256, len(block), np.uint8)
    raw_copy.copy_segments([fresh.data.toreadonly()], [segments], to_segments=True)
    touched = np.zeros(len(memory), bool)
    for at, nbytes in places:
        touched[at : at + nbytes] = True
    assert bytes(memory[touched]) == bytes(fresh)
    assert np.array_equal(memory[~touched], before[~touched])


@pytest.mark.parametrize("nbytes", [1, 4096, 300 << 10])  # the last are copied past the caches
@pytest.mark.parametrize("native", [True, False])
def test_blocks_are_copied_to_their_places_and_nowhere_else(
    native: bool, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(raw_copy, "pages_kernel", lambda: None)
    rng = np.random.default_rng(nbytes)
    memory = np.zeros((8, nbytes + 7), np.uint8)
    blocks = rng.integers(1, 256, (3, nbytes), np.uint8)
    sources = [blocks[0].data, blocks[1].data.toreadonly(), memoryview(bytes(blocks[2]))]
    places = [int(memory[row].ctypes.data) for row in (5, 0, 3)]
    raw_copy.copy_blocks(places, sources, nbytes)
    wanted = np.zeros_like(memory)
    wanted[[5, 0, 3], :nbytes] = blocks
    assert np.array_equal(memory, wanted)
    for wrong in (sources[:2], [*sources[:2], memoryview(bytes(nbytes + 1))]):
        with pytest.raises(ValueError, match=f"to 3 places of {nbytes} bytes each"):
            raw_copy.copy_blocks(places, wrong, nbytes)
    raw_copy.copy_blocks([], [], nbytes)
    assert np.array_equal(memory, wanted)
