from __future__ import annotations

from kvferry.core.arrivals import Arrivals


def test_the_oldest_of_the_host_with_most_makes_room() -> None:
    arrivals: Arrivals[int] = Arrivals(4)
    assert [arrivals.add(n, host) for n, host in enumerate("abba")] == [None] * 4
    assert arrivals.add(4, "b") == 1, "b's oldest, though a's came first"
    assert arrivals.add(5, "c") == 0, "a and b have two each: the oldest of all"
    arrivals.remove(2)
    arrivals.remove(2)
    assert len(arrivals) == 3
    assert 2 not in arrivals
    assert 5 in arrivals


def test_a_flood_pushes_out_its_own() -> None:
    arrivals: Arrivals[int] = Arrivals(3)
    arrivals.add(-1, "honest")
    for n in range(20):
        assert arrivals.add(n, "flood") == (None if n < 2 else n - 2)
    assert -1 in arrivals
    newest: Arrivals[int] = Arrivals(1)
    newest.add(0, "a")
    assert newest.add(1, "b") == 0


def test_who_has_just_spoken_goes_last() -> None:
    speaks = {0, 1}
    arrivals: Arrivals[int] = Arrivals(3, speaks.__contains__)
    assert [arrivals.add(n, "a") for n in range(5)] == [None, None, None, 2, 3]
    speaks.update(range(9))
    assert arrivals.add(5, "a") == 0
    speaks.discard(6)
    assert arrivals.add(6, "a") == 1, "not itself, though it is the only silent one"
