"""Values made once for the keys used last."""

from __future__ import annotations

import pytest

from kvferry.core.recent import Recent


def test_the_one_used_longest_ago_is_forgotten_and_made_again() -> None:
    made: list[int] = []

    def make(key: int) -> object:
        made.append(key)
        return object()

    recent = Recent(make, most=2)
    first = recent.get(1)
    recent.get(2)
    assert recent.get(1) is first
    recent.get(3)
    assert [key for key, _ in recent.items()] == [1, 3]
    assert recent.get(1) is first
    recent.get(2)
    assert made == [1, 2, 3, 2]
    assert len(recent) == 2


def test_who_asks_while_it_is_made_gets_the_same_one() -> None:
    inner: list[object] = []

    def make(key: str) -> object:
        if not inner:
            inner.append(object())
            inner.append(recent.get(key))
        return object()

    recent = Recent(make)
    assert recent.get("key") is inner[1]


def test_what_cannot_be_made_is_not_kept() -> None:
    def make(key: int) -> int:
        raise ValueError(key)

    recent = Recent(make)
    with pytest.raises(ValueError, match="1"):
        recent.get(1)
    assert not recent
