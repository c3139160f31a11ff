"""Removed blocks that are not shown: bounded, and never at the cost of one that comes back."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.keys import BlockKey
from kvferry.store.hidden import Hidden

KEYS = [BlockKey(b"%032d" % number) for number in range(6)]
SPACES = [b"%032d" % number for number in range(4)]
ALL = frozenset(KEYS)


def hidden(most: int = 100) -> Hidden:
    return Hidden("slow", most)


def test_what_is_being_removed_is_hidden_until_the_last_removal_ends() -> None:
    found = hidden()
    found.mask(SPACES[0], KEYS[:2])
    found.mask(SPACES[0], None)
    assert found.removes(SPACES[0])(KEYS[5])
    assert found.among(SPACES[0], KEYS) == ALL
    found.unmask(SPACES[0], None)
    assert found.among(SPACES[0], KEYS) == set(KEYS[:2])
    assert not found.removes(SPACES[0])(KEYS[5])
    found.unmask(SPACES[0], KEYS[:2])
    assert not found.among(SPACES[0], KEYS)


def test_what_could_not_be_removed_is_hidden_until_it_is_stored_anew() -> None:
    found = hidden()
    found.keep(SPACES[0], KEYS[:2])
    found.stored(SPACES[0], KEYS[1:])
    assert found.among(SPACES[0], KEYS) == {KEYS[0]}
    found.keep_all(SPACES[1])
    found.stored(SPACES[1], KEYS[:1])
    assert found.among(SPACES[1], KEYS) == ALL - {KEYS[0]}
    found.keep(SPACES[1], KEYS[:1])
    assert found.among(SPACES[1], KEYS) == ALL
    found.named(SPACES[1])
    assert found.among(SPACES[1], KEYS) == {KEYS[0]}


def test_namespaces_with_more_than_is_remembered_are_hidden_whole() -> None:
    found = hidden(4)
    found.keep(SPACES[0], KEYS[:3])
    found.keep(SPACES[1], KEYS[:3])
    assert found.among(SPACES[0], KEYS) == found.among(SPACES[1], KEYS) == ALL
    assert not found.among(SPACES[2], KEYS)
    found.stored(SPACES[0], KEYS[:1])
    assert found.among(SPACES[0], KEYS) == ALL - {KEYS[0]}


def test_beyond_that_only_what_is_stored_from_then_on_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    found = hidden(2)
    with caplog.at_level(logging.WARNING):
        for space in SPACES[:3]:
            found.keep_all(space)
        found.keep_all(SPACES[0])
    assert found.among(SPACES[3], KEYS) == ALL
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["tier slow"]
    found.stored(SPACES[3], KEYS[:2])
    assert found.among(SPACES[3], KEYS) == ALL - set(KEYS[:2])
    found.stored(SPACES[2], KEYS[:1])  # more than is remembered: what was stored first is hidden again
    assert found.among(SPACES[3], KEYS) == ALL
    assert found.among(SPACES[2], KEYS) == ALL - {KEYS[0]}


verbs = st.sampled_from(("keep", "keep_all", "named", "stored"))


@given(
    most=st.integers(1, 6),
    calls=st.lists(st.tuples(verbs, st.sampled_from(SPACES), st.sets(st.sampled_from(KEYS))), max_size=30),
)
def test_none_comes_back_and_little_is_remembered(
    most: int, calls: list[tuple[str, bytes, set[BlockKey]]]
) -> None:
    bounded, whole = hidden(most), hidden(10_000)
    for verb, space, keys in calls:
        for one in (bounded, whole):
            getattr(one, verb)(*((space, keys) if verb in {"keep", "stored"} else (space,)))
        for name in SPACES:
            assert bounded.among(name, KEYS) >= whole.among(name, KEYS)
        assert len(bounded._undead) <= most
        assert len(bounded._unnamed) <= most
        assert len(bounded._anew) <= max(most, len(KEYS))
