import ctypes
import time

import numpy as np
import pytest

from kvferry.core import clock
from kvferry.core.buffers import (
    PAGE_NBYTES,
    _rows,
    as_bytes_view,
    as_places,
    copy_into,
    page_aligned,
    total_nbytes,
    write_into,
)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE_NBYTES, PAGE_NBYTES + 1])
def test_page_aligned(nbytes: int) -> None:
    view = page_aligned(nbytes)
    assert len(view) == nbytes
    assert not view.readonly
    if nbytes:
        assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_NBYTES == 0


def test_page_aligned_refuses_less_than_nothing() -> None:
    with pytest.raises(ValueError, match="-1"):
        page_aligned(-1)


def test_views_of_bytes_share_memory() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    view = as_bytes_view(array)
    assert (len(view), view.format, view.ndim) == (24, "B", 1)
    array[0, 0] = 7
    assert view == array.tobytes()
    assert as_bytes_view(np.empty((0, 3), np.float32)).nbytes == 0
    assert bytes(as_bytes_view(b"ab")) == b"ab"
    with pytest.raises(TypeError, match=r"shape \(2, 2\) and strides \(12, 8\) is not contiguous: copy it"):
        as_bytes_view(array[:, ::2])
    with pytest.raises(TypeError, match=r"Python objects has addresses, not bytes"):
        as_bytes_view(np.array([None, 1], object))
    with pytest.raises(TypeError, match=r"list is no buffer; bytes, memoryview and numpy arrays are$"):
        as_bytes_view([b"x"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"int is no buffer; .*one buffer goes in a list .* \[data\]"):
        [as_bytes_view(part) for part in b"abc"]  # type: ignore[arg-type]
    assert total_nbytes([memoryview(b"ab"), memoryview(b"c")]) == 3


def test_places_are_flat_bytes_that_can_be_written() -> None:
    flat = [memoryview(bytearray(2)), memoryview(bytearray(3))]
    assert as_places(flat) is flat
    array = np.zeros((2, 3), np.float32)
    places = as_places([*flat, array.data, memoryview(bytearray(4)).cast("b"), memoryview(b"")])
    assert [(place.format, place.ndim, len(place)) for place in places] == [
        ("B", 1, n) for n in (2, 3, 24, 4, 0)
    ]
    places[2][:4] = np.float32(7).tobytes()
    assert array[0, 0] == 7
    with pytest.raises(TypeError, match="memoryview of 2 bytes is read-only: receive into a bytearray"):
        as_places([memoryview(b"ab")])
    with pytest.raises(TypeError, match="Python objects"):
        as_places([np.array([None, 1], object).data])


def test_copies_have_equal_sizes() -> None:
    target = page_aligned(8)
    copy_into(target, np.arange(2, dtype=np.int32))
    assert bytes(target) == np.arange(2, dtype=np.int32).tobytes()
    with pytest.raises(ValueError, match="copy of 7 bytes into 8"):
        copy_into(target, b"1234567")
    with pytest.raises(ValueError, match=r"read-only|not writeable"):
        copy_into(target.toreadonly(), bytes(8))


def test_deadlines() -> None:
    deadline = clock.deadline_in(60)
    assert 0 < clock.remaining(deadline) <= 60
    assert not clock.is_past(deadline)
    past = time.monotonic() - 1
    assert clock.is_past(past)
    assert clock.remaining(past) <= -1
    assert clock.time_left(past) == 0
    assert 0 < clock.time_left(deadline) <= 60
    assert clock.earliest(None, deadline, past) == past
    with pytest.raises(ValueError, match="needs a deadline"):
        clock.earliest(None)


@pytest.mark.parametrize(
    "nbytes", [0, 1, 4095, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 77, 40 << 20]
)
def test_copies_of_any_size_are_whole_and_stay_inside(nbytes: int) -> None:
    target = page_aligned(nbytes + 8192)
    array = np.frombuffer(target, np.uint8)
    array[:] = 0xAB
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    write_into(array, 4096, as_bytes_view(source))
    assert np.array_equal(array[4096 : 4096 + nbytes], source)
    assert bytes(target[:4096]) == b"\xab" * 4096
    assert bytes(target[4096 + nbytes :]) == b"\xab" * 4096
    array[:] = 0
    copy_into(target[4096 : 4096 + nbytes], source)
    assert np.array_equal(array[4096 : 4096 + nbytes], source)


def test_rows_cover_all_bytes_and_little_twice() -> None:
    for nbytes in [1 << 20, (1 << 20) + 1, (5 << 20) + 4096, 32 << 20, 33554431, 1 << 30]:
        (count, row), (step, one) = _rows(nbytes)
        assert (count - 1) * step + row == nbytes
        assert one == 1
        assert step < row, "rows that just meet are joined"
        assert step % 64 == 0
        assert count * row < 1.01 * nbytes


@pytest.mark.parametrize("nbytes", [64, 2 << 20])
def test_what_is_not_contiguous_is_refused_whatever_its_size(nbytes: int) -> None:
    with pytest.raises(TypeError, match="contiguous"):
        as_bytes_view(np.zeros((nbytes, 2), np.uint8)[:, 0])
