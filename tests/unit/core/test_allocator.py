import pytest

from kvferry.core.allocator import PageAllocator
from kvferry.core.errors import StoreError


def test_best_fit_lowest_address_and_joining() -> None:
    pages = PageAllocator(20)
    a, b, c, d = (pages.allocate(n) for n in (4, 2, 4, 10))
    assert (a, b, c, d) == (0, 4, 6, 10)
    assert pages.allocate(1) is None
    assert pages.largest_run == pages.free_pages == 0
    pages.free(0)
    pages.free(6)
    assert pages.runs() == [(0, 4), (6, 4)]
    assert pages.allocate(3) == 0  # two runs fit equally well: the lower one
    assert pages.allocate(1) == 3  # the rest of that run fits better than the other run
    assert pages.free(4) == 2
    assert pages.runs() == [(4, 6)]
    for start in (3, 10, 0):
        pages.free(start)
    assert pages.runs() == [(0, 20)]
    assert pages.length(0) is None


def test_double_free_and_nonsense_change_nothing() -> None:
    pages = PageAllocator(4)
    assert pages.allocate(2) == 0
    assert pages.length(0) == 2
    for start in (1, 2, -1):
        with pytest.raises(StoreError, match=f"page {start}"):
            pages.free(start)
    pages.free(0)
    with pytest.raises(StoreError):
        pages.free(0)
    with pytest.raises(ValueError, match="0 pages"):
        pages.allocate(0)
    assert (pages.free_pages, pages.runs()) == (4, [(0, 4)])


def test_a_segment_of_no_pages_gives_none() -> None:
    pages = PageAllocator(0)
    assert pages.allocate(1) is None
    assert pages.largest_run == 0
