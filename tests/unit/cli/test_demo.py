from __future__ import annotations

import json
from typing import Any

import pytest
import typer

pytest.importorskip("torch")

from kvferry.cli.demo import demo
from kvferry.engine.demo import run
from kvferry.engine.demo.report import PARTS, Answer, Outcome, report
from kvferry.engine.demo.run import DemoOptions, default_threads


def pretend(monkeypatch: pytest.MonkeyPatch, single: tuple[int, ...]) -> list[DemoOptions]:
    """``run_demo`` gives the report of a run in which the split side said (1, 2)."""
    asked: list[DemoOptions] = []
    figures: dict[str, float | None] = {"kv_nbytes": 1, "wire_s": 0.1, "overlap": 1.0, "cached_tokens": 0}
    times = {"total": 4.0, **dict.fromkeys(PARTS, 1.0)}
    answer = Answer(3, (1, 2), "ab", times, {**figures, "computed_tokens": 3, "generated_tokens": 2})
    alone = Answer(3, single, "ab", {"total": 2.0})
    settings = {"threads": 1, "dtype": "float32"}

    def run_demo(options: DemoOptions, display: object) -> dict[str, Any]:
        asked.append(options)
        return report("m", [Outcome((answer,), (alone,))], settings)

    monkeypatch.setattr(run, "run_demo", run_demo)
    return asked


def test_the_same_text_is_a_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = pretend(monkeypatch, (1, 2))
    demo(as_json=True, repeat=3)
    out, err = capsys.readouterr()
    assert json.loads(out)["identical"] is True
    assert "identical" in err
    assert (asked[0].repeat, asked[0].threads, asked[0].model) == (3, default_threads(), "smollm2")


def test_another_text_is_a_failure_and_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, (1, 3))
    with pytest.raises(typer.Exit) as raised:
        demo()
    assert raised.value.exit_code == 1
    out, _ = capsys.readouterr()
    assert "NOT identical to a single process: repeat 1, turn 1: token 1 is 2 split and 3" in " ".join(
        out.split()
    )


def test_half_of_the_cores_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (3, 1), (16, 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert default_threads() == threads
