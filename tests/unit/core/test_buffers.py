import ctypes
import time

import numpy as np
import pytest

from kvferry.core import clock
from kvferry.core.buffers import PAGE_NBYTES, as_bytes_view, copy_into, page_aligned, total_nbytes


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
    with pytest.raises(TypeError):
        as_bytes_view(array[:, ::2])
    assert total_nbytes([memoryview(b"ab"), memoryview(b"c")]) == 3


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
