"""The part of the transport suite on bytes: all of them arrive, in order, where they belong."""

# ruff: noqa: D102 - the names of the tests say what is required
from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvferry.core.buffers import Buf
from kvferry.testing.transports_common import (
    GUARD,
    GUARD_NBYTES,
    LARGEST,
    SIZES,
    TransportFixtures,
    random_bytes,
)

__all__ = ["TransportBytes"]


class TransportBytes(TransportFixtures):
    """Sizes, scattered parts, guard bytes, both directions."""

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_bytes_arrive_and_nothing_else_is_touched(self, pool: ThreadPoolExecutor, nbytes: int) -> None:
        """Case C097."""
        data = random_bytes(nbytes := self.largest_nbytes if nbytes == LARGEST else nbytes)
        whole = np.full(nbytes + 2 * GUARD_NBYTES, GUARD, np.uint8)
        target = whole.data[GUARD_NBYTES : GUARD_NBYTES + nbytes]
        with self.connected() as ends:
            self.transfer(pool, ends, [data], [target])
            self.transfer(pool, (ends[1], ends[0]), [data[:1]], [memoryview(bytearray(min(1, nbytes)))])
        assert np.array_equal(whole[GUARD_NBYTES:-GUARD_NBYTES], data)
        assert (whole[:GUARD_NBYTES] == GUARD).all()
        assert (whole[-GUARD_NBYTES:] == GUARD).all()

    def test_scattered_bytes_of_every_size(self, pool: ThreadPoolExecutor) -> None:
        """Case C097: each size as three parts into three views, cut elsewhere, with guards between them."""
        with self.connected() as ends:
            for nbytes in SIZES:
                if nbytes == LARGEST:
                    continue
                data = random_bytes(nbytes)
                first, second = nbytes // 3, nbytes - nbytes // 5
                whole = np.full(nbytes + 4 * GUARD_NBYTES, GUARD, np.uint8)
                places = [
                    slice(start + (n + 1) * GUARD_NBYTES, end + (n + 1) * GUARD_NBYTES)
                    for n, (start, end) in enumerate([(0, first), (first, second), (second, nbytes)])
                ]
                parts = [data[: nbytes // 2], data[nbytes // 2 : nbytes - 1], data[max(0, nbytes - 1) :]]
                self.transfer(pool, ends, parts, [whole.data[place] for place in places])
                assert np.array_equal(np.concatenate([whole[place] for place in places]), data), nbytes
                for place in places:
                    whole[place] = GUARD
                assert (whole == GUARD).all(), nbytes

    def test_parts_and_views_need_not_match(self, pool: ThreadPoolExecutor) -> None:
        sizes_out = [0, 1, 300_000, 0, 7, 64, 4096, 100_000, 0]
        sizes_in = [5, 0, 200_000, 150_000, 0, 64, 50_000, 4096 + 3]
        data = random_bytes(sum(sizes_out))
        sizes_in.append(len(data) - sum(sizes_in))
        cuts = np.cumsum([0, *sizes_out])
        parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
        whole = np.full(len(data) + (len(sizes_in) + 1) * GUARD_NBYTES, GUARD, np.uint8)
        targets, position = [], GUARD_NBYTES
        for size in sizes_in:
            targets.append(whole.data[position : position + size])
            position += size + GUARD_NBYTES
        with self.connected() as ends:
            self.transfer(pool, ends, parts, targets)
        assert b"".join(targets) == data.tobytes()
        for target in targets:
            target[:] = bytes([GUARD]) * len(target)
        assert (whole == GUARD).all(), "wrote outside its views"

    def test_more_parts_than_one_call_takes(self, pool: ThreadPoolExecutor) -> None:
        parts = [random_bytes(i % 8, seed=i) for i in range(3000)]
        data = b"".join(part.tobytes() for part in parts)
        received = bytearray(len(data))
        targets = [memoryview(received)[i : i + 3] for i in range(0, len(data), 3)]
        assert len(targets) > 2048
        with self.connected() as ends:
            self.transfer(pool, ends, parts, targets)
        assert received == data

    def test_parts_of_any_type_and_shape(self) -> None:
        numbers = np.arange(6, dtype=np.int32).reshape(2, 3)
        parts: list[Buf] = [b"bytes", bytearray(b"array"), memoryview(b"view"), numbers]
        received = bytearray(14 + 24)
        with self.connected() as (one, other):
            one.send(parts, self.soon())
            other.recv_into([memoryview(received)], self.soon())
        assert received == b"bytesarrayview" + numbers.tobytes()

    @pytest.mark.parametrize("rows", [3, 100_000])
    def test_views_of_any_items_and_shape_are_filled(self, pool: ThreadPoolExecutor, rows: int) -> None:
        numbers = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
        received = np.zeros_like(numbers)
        with self.connected() as ends:
            self.transfer(pool, ends, [numbers], [received[:1].data, received[1:].data])
            self.transfer(pool, ends, [numbers[:1]], [received[-1:].data])
        assert np.array_equal(received[:-1], numbers[:-1])
        assert np.array_equal(received[-1], numbers[0])

    @pytest.mark.parametrize("nbytes", [8, 1 << 20])
    def test_memory_that_cannot_be_moved_is_refused_and_the_stream_goes_on(
        self, pool: ThreadPoolExecutor, nbytes: int
    ) -> None:
        scattered = [memoryview(bytearray(2 * nbytes))[::2], np.zeros((nbytes, 2), np.uint8)[:, 0].data]
        received = bytearray(nbytes)
        with self.connected() as (one, other):
            for view in scattered:
                with pytest.raises(TypeError, match="is not contiguous"):
                    one.send([b"x" * nbytes, view], self.soon())
            self.transfer(pool, (one, other), [bytes(nbytes)], [memoryview(received)])
            sending = pool.submit(one.send, [b"y" * nbytes], self.soon())
            for view in [*scattered, memoryview(bytes(nbytes))]:
                with pytest.raises(TypeError, match=r"is not contiguous|is read-only"):
                    other.recv_into([view], self.soon())
            other.recv_into([memoryview(received)], self.soon())
            sending.result(timeout=self.patience_s)
        assert received == b"y" * nbytes

    def test_sent_buffers_may_be_reused_at_once(self, pool: ThreadPoolExecutor) -> None:
        rounds, nbytes = 20, 500_000
        buffer = bytearray(nbytes)
        received = np.zeros((rounds, nbytes), np.uint8)
        with self.connected() as (one, other):
            receiving = pool.submit(other.recv_into, [received.data.cast("B")], self.soon())
            for i in range(rounds):
                buffer[:] = bytes([i + 1]) * nbytes
                one.send([buffer], self.soon())
                buffer[:] = bytes(nbytes)
            receiving.result(timeout=self.patience_s)
        assert (received == np.arange(1, rounds + 1, dtype=np.uint8)[:, None]).all()

    def test_both_directions_at_once(self, pool: ThreadPoolExecutor) -> None:
        nbytes = min(self.largest_nbytes, 16 << 20)
        with self.connected() as ends:
            data = [random_bytes(nbytes, seed) for seed in (1, 2)]
            received = [np.zeros(nbytes, np.uint8) for _ in ends]
            calls = [
                *(pool.submit(end.send, [d], self.soon()) for end, d in zip(ends, data, strict=True)),
                *(
                    pool.submit(end.recv_into, [r.data], self.soon())
                    for end, r in zip(ends, received, strict=True)
                ),
            ]
            for call in calls:
                call.result(timeout=self.patience_s)
        assert np.array_equal(received[0], data[1])
        assert np.array_equal(received[1], data[0])

    def test_small_messages_both_ways_before_either_is_read(self) -> None:
        answers = [bytearray(4096), bytearray(4096)]
        with self.connected() as ends:
            for end in ends:
                end.send([b"x" * 4096], self.soon())
            for end, answer in zip(ends, answers, strict=True):
                end.recv_into([memoryview(answer)], self.soon())
        assert all(answer == b"x" * 4096 for answer in answers)
