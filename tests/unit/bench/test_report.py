from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvferry.bench.registry import Comparison
from kvferry.bench.report import print_report
from kvferry.bench.results import Param, Result, summarise
from kvferry.bench.scenarios.store import rounded

COMPARISON = Comparison(title="side by side", row="codec", columns=("kl", "top1"), repeated=("ratio",))


def result(metric: str, codec: str, *values: float) -> Result:
    return summarise(f"codec.x.{metric}", {"codec": codec, "model": "m"}, "units", {"subject": values})


def printed(results: list[Result], comparison: Comparison | None) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_report(results, console, comparison)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_figures_of_a_comparison_stand_side_by_side() -> None:
    results = [
        result(m, c, *v)
        for c in ("a", "b")
        for m, v in {"ratio": (1.5,), "kl": (1, 2, 4), "top1": (0.9,)}.items()
    ]
    text = printed(results, COMPARISON)
    before, _, after = text.partition("side by side")
    assert before.count("codec.x.ratio") == 2
    assert "kl" not in before
    (row,) = [line for line in after.splitlines() if "│ a " in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["a", "1.5", "2", "0.9"]
    assert "1.5 to 3" in after
    assert "model=m" in after
    assert "codec=" not in after


def test_without_a_comparison_each_result_has_a_row() -> None:
    results = [result("kl", "a", 1), result("ratio", "a", 2)]
    assert printed(results, None).count("codec.x.") == 2
    assert "side by side" not in printed([results[1]], COMPARISON)
    assert "kvferry bench" not in printed([results[0]], COMPARISON)


@pytest.mark.parametrize(
    ("runs", "walk", "said"),
    [
        (9, 256 << 20, ""),
        (9, None, ""),
        (8, None, "not fit to be quoted: fewer than 9 runs"),
        (9, 8 << 20, "not fit to be quoted: buffers of 8 MiB are not cold (256 MiB are)"),
        (2, 8 << 20, "fewer than 9 runs and buffers of"),
    ],
)
def test_figures_that_are_not_fit_to_be_quoted_say_so(runs: int, walk: int | None, said: str) -> None:
    params: dict[str, Param] = {} if walk is None else {"walk_nbytes": walk}
    timed = summarise("store.x", params, "us", {"subject": [1.0] * runs})
    once = summarise("store.x", {"measured": "memory"}, "bytes", {"subject": [1.0]})
    text = " ".join(printed([timed, once], None).split())
    assert said in text
    assert ("not fit" in text) == bool(said)


def test_entries_that_are_rounded_are_said() -> None:
    assert rounded(2048, 2048, 512) == ""
    assert rounded(2000, 1536, 512) == ", not 2000: in whole chains of 512"
