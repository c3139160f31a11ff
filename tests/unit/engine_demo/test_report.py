from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from kvferry.engine.demo.report import PARTS, Answer, Outcome, difference, median_split, render_table, report


def times(queue: float, prefill: float, exposed: float, first: float) -> dict[str, float]:
    parts = dict(zip(PARTS, (queue, prefill, exposed, first), strict=True))
    return {"total": queue + prefill + exposed + first, **parts}


def split_answer(
    ttft: dict[str, float], overlap: float | None = 0.9, ids: tuple[int, ...] = (1, 2)
) -> Answer:
    figures: dict[str, float | None] = {
        "kv_nbytes": 1000,
        "wire_s": 0.5,
        "transfer_gb_per_s": 2e-6,
        "overlap": overlap,
        "computed_tokens": 10,
        "cached_tokens": 90,
        "generated_tokens": 2,
    }
    return Answer(100, ids, "ab", ttft, figures)


def single_answer(total: float, ids: tuple[int, ...] = (1, 2), text: str = "ab") -> Answer:
    return Answer(100, ids, text, {"total": total})


def outcome(total: float, single: float, overlap: float | None = 0.9) -> Outcome:
    answer = split_answer(times(0.1, total - 0.3, 0.1, 0.1), overlap)
    return Outcome((answer, answer), (single_answer(single), single_answer(single / 2)))


def test_the_parts_are_those_of_the_median_repeat_and_sum_to_the_median() -> None:
    # part by part the medians would be 0.2, 2, 0.1, 0.1: their sum is no repeat's total
    runs = [times(0.2, 1, 0.1, 0.9), times(0.1, 3, 0.1, 0.1), times(0.9, 2, 0.2, 0.1)]
    found = median_split(runs)
    assert found["total"] == pytest.approx(3.2)
    assert {k: found[k] for k in PARTS} == pytest.approx({k: runs[2][k] for k in PARTS})


def test_an_even_number_of_repeats_takes_the_mean_of_the_middle_two() -> None:
    runs = [times(0, 1, 0, 0), times(0, 9, 0, 0), times(1, 1, 1, 1), times(0, 2, 0, 0)]
    found = median_split(runs)
    assert found == pytest.approx(times(0.5, 1.5, 0.5, 0.5))
    assert found["total"] == pytest.approx(3.0)


def test_every_figure_is_the_median_of_the_repeats() -> None:
    outcomes = [outcome(2.0, 1.0, 0.5), outcome(1.0, 2.0, 0.9), outcome(3.0, 4.0, None)]
    result = report("m", outcomes, {"threads": 1})
    first = result["turns"][0]
    assert first["ttft_s"]["total"] == pytest.approx(2.0)
    assert result["single_process"]["turns"] == [{"ttft_s": 2.0}, {"ttft_s": 1.0}]
    assert first["ttft_ratio"] == pytest.approx(0.75)  # of the paired 2.0, 0.5, 0.75
    assert first["overlap"] == pytest.approx(0.7)
    assert (first["kv_nbytes"], first["cached_tokens"]) == (1000, 90)
    assert isinstance(first["kv_nbytes"], int)
    assert (result["repeats"], result["threads"], result["identical"]) == (3, 1, True)
    assert json.loads(json.dumps(result)) == result


def test_a_turn_that_moved_nothing_has_no_rate() -> None:
    assert report("m", [outcome(1.0, 1.0, None)], {})["turns"][1]["overlap"] is None


@pytest.mark.parametrize(
    ("single", "says"),
    [
        (single_answer(1, (1, 3)), "repeat 2, turn 1: token 1 is 2 split and 3"),
        (single_answer(1, (1,)), "token 1 is 2 split and the end"),
        (single_answer(1, (1, 2, 3)), "token 2 is the end split and 3"),
        (single_answer(1, text="aB"), "the tokens are the same, the text is 'ab' and 'aB'"),
    ],
)
def test_a_difference_is_found_and_said(single: Answer, says: str) -> None:
    good = outcome(1.0, 1.0)
    bad = Outcome(good.split, (single, good.single[1]))
    assert difference([good, good]) is None
    assert says in str(difference([good, bad]))
    result = report("m", [good, bad], {})
    assert result["identical"] is False
    assert says in result["difference"]


@pytest.mark.parametrize(
    ("rate", "overlap", "says"),
    [
        (1.234, 0.5, ("1.23 GB/s", "50.0%")),
        (0.0125, -5.864, ("12.50 MB/s", "0.0%")),
        (2e-6, None, ("2.00 kB/s", "-")),
        (None, 1.0, ("-", "100.0%")),
    ],
)
def test_rates_have_the_unit_that_shows_digits_and_no_overlap_is_below_zero(
    rate: float | None, overlap: float | None, says: tuple[str, str]
) -> None:
    result = report("m", [outcome(2.0, 1.0)], {"threads": 1})
    for turn in result["turns"]:
        turn |= {"transfer_gb_per_s": rate, "overlap": overlap}
    stream = io.StringIO()
    Console(file=stream, width=100).print(render_table(result))
    lines = {line[:24].strip(): line[24:].split("  ") for line in stream.getvalue().splitlines()}
    for name, expected in zip(("rate", "overlap with compute"), says, strict=True):
        assert [cell.strip() for cell in lines[name] if cell.strip()] == [expected] * 2


def test_the_table_shows_each_turn() -> None:
    result: dict[str, Any] = report("m", [outcome(1.0, 0.8, None)], {})
    stream = io.StringIO()
    Console(file=stream, width=100).print(render_table(result))
    text = stream.getvalue()
    for wanted in (
        "transfer_exposed",
        "1,000.0 ms",
        "split / single",
        "1.25",
        "2.50",
        "reused",
        "0.0 MB",
        "-",
    ):
        assert wanted in text
