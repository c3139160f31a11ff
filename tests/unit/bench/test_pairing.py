from __future__ import annotations

from collections import Counter

import pytest

from kvferry.bench.ceilings import MemcpyCold, RawSocket
from kvferry.bench.pairing import run_paired
from kvferry.bench.registry import GROUPS, Options, run_group
from kvferry.bench.results import Sample
from kvferry.core.errors import UnknownPluginError


def test_runs_are_interleaved_with_turning_order_and_warmups_do_not_count() -> None:
    order: list[str] = []
    seen: list[tuple[str, int, int]] = []

    def subject(name: str) -> Sample:
        order.append(name)
        return Sample(float(len(order)))

    samples = run_paired(
        {"a": lambda: subject("a"), "b": lambda: subject("b")},
        runs=2,
        warmup=1,
        progress=lambda *args: seen.append(args),
        label="x",
    )
    assert order == ["a", "b", "b", "a", "b", "a"]
    assert [s.seconds for s in samples["a"]] == [4.0, 6.0]
    assert [s.seconds for s in samples["b"]] == [3.0, 5.0]
    assert seen[-1] == ("x", 6, 6)


@pytest.mark.parametrize("names", ["abc", "abcd", "abcdef"])
def test_none_comes_first_or_behind_another_more_often_than_any(names: str) -> None:
    order: list[str] = []

    def subject(name: str) -> Sample:
        order.append(name)
        return Sample(1.0)

    count = len(names)
    run_paired({n: lambda n=n: subject(n) for n in names}, runs=2 * count, warmup=0)  # type: ignore[misc]
    rounds = ["".join(order[at : at + count]) for at in range(0, len(order), count)]
    assert all(sorted(one) == list(names) for one in rounds)
    assert Counter(one[0] for one in rounds) == dict.fromkeys(names, 2)
    behind = Counter(one[at : at + 2] for one in rounds for at in range(count - 1))
    assert behind == {a + b: 2 for a in names for b in names if a != b}


def test_a_round_of_several_turns_is_one_sample() -> None:
    order: list[str] = []

    def subject(name: str) -> Sample:
        order.append(name)
        seconds = float(len(order))
        return Sample(seconds, 10, 0.5 if name == "a" else None, (seconds,))

    subjects = {"a": lambda: subject("a"), "b": lambda: subject("b")}
    samples = run_paired(subjects, runs=2, warmup=1, turns=2)
    assert "".join(order) == "abbabaababba"
    assert samples["a"] == [
        Sample(6.0 + 7.0, 20, 1.0, (6.0, 7.0)),
        Sample(9.0 + 12.0, 20, 1.0, (9.0, 12.0)),
    ]
    assert samples["b"][0] == Sample(5.0 + 8.0, 20, None, (5.0, 8.0))


def test_ceilings_move_what_they_say() -> None:
    memcpy = MemcpyCold(1 << 20, 4)()
    assert memcpy.nbytes == 4 << 20
    assert memcpy.gb_per_s > 0
    raw = RawSocket(1 << 16, 4)
    try:
        assert raw().nbytes == 4 << 16
        assert raw().gb_per_s > 0
    finally:
        raw.close()


def test_unknown_group_names_those_there_are() -> None:
    known = ", ".join(sorted(GROUPS))
    with pytest.raises(UnknownPluginError, match=f"no benchmark group 'nope'; there are: {known}$"):
        list(run_group("nope", Options(), lambda *_: None))


def test_every_group_can_be_imported_and_options_have_defaults() -> None:
    assert Options(params={"a": None}).param("a", 3) == 3
    assert Options(params={"a": 5}).param("a", 3) == 5
    for group in GROUPS.values():
        module, function = group.runner.split(":")
        assert module.startswith("kvferry.bench.scenarios.")
        assert function
