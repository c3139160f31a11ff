"""The page allocator against a plain model: a list of pages, each free or of one run."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.allocator import PageAllocator

PAGES = 48
STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(min_value=1, max_value=12), st.integers(min_value=0)), max_size=80
)


def model_runs(owner: list[int | None]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for page, user in enumerate(owner):
        if user is not None:
            continue
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


@settings(max_examples=150)
@given(STEPS)
def test_against_a_model(steps: list[tuple[bool, int, int]]) -> None:
    allocator = PageAllocator(PAGES)
    owner: list[int | None] = [None] * PAGES
    used: dict[int, int] = {}
    for allocate, length, choice in steps:
        if allocate:
            fits = [run for run in model_runs(owner) if run[1] >= length]
            start = allocator.allocate(length)
            if not fits:
                assert start is None
                continue
            assert start is not None
            assert start == min(fits, key=lambda run: (run[1], run[0]))[0]
            assert owner[start : start + length] == [None] * length, "overlap"
            owner[start : start + length] = [start] * length
            used[start] = length
        elif used:
            start = sorted(used)[choice % len(used)]
            length = used.pop(start)
            assert allocator.free(start) == length
            owner[start : start + length] = [None] * length
        assert allocator.runs() == model_runs(owner), "free runs are not joined"
        assert allocator.free_pages == owner.count(None)
        assert allocator.largest_run == max((n for _, n in model_runs(owner)), default=0)
    for start in list(used):
        allocator.free(start)
    assert allocator.runs() == [(0, PAGES)]


@settings(max_examples=100)
@given(STEPS, st.lists(st.integers(min_value=1, max_value=6), min_size=80, max_size=80))
def test_many_at_once_are_those_of_single_calls(
    steps: list[tuple[bool, int, int]], counts: list[int]
) -> None:
    many, single = PageAllocator(PAGES), PageAllocator(PAGES)
    used: list[int] = []
    for (allocate, length, choice), count in zip(steps, counts, strict=False):
        if allocate:
            starts = many.allocate_many(count, length)
            assert starts == [single.allocate(length) for _ in starts]
            if len(starts) < count:
                gap = many.allocate_many(1, length)
                assert gap == [s for s in [single.allocate(length)] if s is not None]
                starts += gap
            used += starts
        elif used:
            start = used.pop(choice % len(used))
            assert many.free(start) == single.free(start)
        assert many.runs() == single.runs()
        assert many.free_pages == single.free_pages
