from __future__ import annotations

import logging

import pytest

from kvferry.core import cause
from kvferry.core.cause import kind_of
from kvferry.store.problems import Problems


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("h:6379: refused after 0.5 s", "h:6380: refused after 12 s", True),
        (f"block {'ab' * 16}: gone", f"block {'0c' * 16}: gone", True),
        ("bucket kv is left alone for a while, after: refused", "refused", True),
        ("answered with status 403", "answered with status 503", False),
        ("answered with status 403 in 12 ms", "answered with status 403 in 7 ms", True),
        ("connection refused", "timed out", False),
    ],
)
def test_kinds_of_reasons(one: str, other: str, same: bool) -> None:
    assert (kind_of(one) == kind_of(other)) is same


def test_a_condition_with_another_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cause, "_LEAST_S", 0.0)
    caplog.set_level(logging.INFO)
    problems = Problems("disk", logging.getLogger("kvferry.test"))
    for text in ("it is full: 5 bytes free", "it is full: 7 bytes free", "a quota is used up"):
        problems.begin("/d", "full", text)
        assert problems.conditions() == {"/d: full": text}
    problems.end("/d", "full")
    assert [r.getMessage().partition("/d: ")[2] for r in caplog.records] == [
        "it is full: 5 bytes free; going on without it",
        "the reason is another now: a quota is used up",
        "works again, after: a quota is used up",
    ]
