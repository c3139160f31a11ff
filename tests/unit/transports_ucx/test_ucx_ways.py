"""Which way a message is received, by what the last ones took: ``ways.h``, without UCX."""

from __future__ import annotations

import ctypes
from typing import Final

import pytest

from kvferry.core.native import native

_KIB: Final = 1 << 10
_SIZES: Final = [64 * _KIB, 1024 * _KIB, 4096 * _KIB]


class _Ways:
    """Messages that take ``ns_per_kib`` on each of two ways, the first of a row ``cold`` times as long."""

    def __init__(self, nbytes: int, cold: int = 1) -> None:
        found = native()
        if found.library is None:
            pytest.skip("there is no native library")
        self._library = ctypes.CDLL(str(found.path))
        self._state = ctypes.create_string_buffer(self._library.kvc_ways_nbytes())
        self._nbytes = nbytes
        self._cold = cold
        self._last = 0

    def move(self, count: int, *ns_per_kib: int) -> tuple[list[int], float]:
        """The ways that ``count`` messages took, and how much longer than on the better way all the time."""
        size, spent = ctypes.c_uint64(self._nbytes), 0
        taken = []
        for _ in range(count):
            way = self._library.kvc_ways_next(self._state, size)
            ns = ns_per_kib[way] * self._nbytes // _KIB * (1 if way == self._last else self._cold)
            self._library.kvc_ways_took(self._state, size, ctypes.c_uint64(ns))
            self._last = way
            taken.append(way)
            spent += ns
        return taken, spent / (count * min(ns_per_kib) * self._nbytes // _KIB)


@pytest.mark.parametrize("nbytes", _SIZES)
@pytest.mark.parametrize("better", [0, 1])
def test_takes_the_better_way_and_tries_the_other_at_little_cost(nbytes: int, better: int) -> None:
    ways = _Ways(nbytes, cold=3)
    paces = (100, 300) if better == 0 else (300, 100)
    ways.move(500, *paces)

    taken, cost = ways.move(4000, *paces)

    assert taken.count(better) > 3800
    assert taken.count(1 - better) > 0
    assert cost < 1.06


@pytest.mark.parametrize("nbytes", _SIZES)
def test_follows_when_the_better_way_becomes_the_worse(nbytes: int) -> None:
    ways = _Ways(nbytes, cold=3)
    ways.move(1000, 100, 200)

    ways.move(10, 450, 200)  # seen at once, the way is in use
    assert ways.move(20, 450, 200)[0].count(1) == 20

    ways.move(4000, 100, 200)  # seen when it is tried
    assert ways.move(200, 100, 200)[0].count(0) > 150


def test_a_message_that_had_to_wait_changes_nothing() -> None:
    ways = _Ways(1024 * _KIB)
    ways.move(1000, 100, 200)

    ways.move(1, 100_000, 100_000)
    ways.move(4, 100, 200)  # it may have let the other way be tried

    assert ways.move(20, 100, 200)[0] == [0] * 20
