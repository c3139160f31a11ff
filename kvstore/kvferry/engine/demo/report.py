"""The figures of the demo: medians over repeats, the JSON object, the table, and whether both sides agree.

Every figure is the median over the repeats. The parts of a time to first token are not medians one by
one, since those would not add up: they are the parts of the repeat whose total is the median (with an
even number of repeats, the mean of the two in the middle), so ``total`` is the median and their sum.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

__all__ = ["Answer", "Outcome", "difference", "median_split", "render_table", "report"]

PARTS = ("queue", "prefill", "transfer_exposed", "first_decode")
_FIGURES = ("kv_nbytes", "wire_s", "transfer_gb_per_s", "overlap")
_COUNTS = ("computed_tokens", "cached_tokens", "generated_tokens")


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn of one side.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        token_ids: The answer.
        text: The answer as text.
        ttft_s: Seconds to token 0: ``total``, and for the split side its parts.
        figures: What the gateway says beside that (``kv_nbytes``, ``overlap``, …).
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    ttft_s: Mapping[str, float]
    figures: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """One repeat: the turns of the split deployment and those of the single process."""

    split: tuple[Answer, ...]
    single: tuple[Answer, ...]


def difference(outcomes: Sequence[Outcome]) -> str | None:
    """Where the two sides first differ, in words; ``None`` if they are identical in every repeat."""
    for repeat, outcome in enumerate(outcomes, 1):
        for turn, (split, single) in enumerate(zip(outcome.split, outcome.single, strict=True), 1):
            where = f"repeat {repeat}, turn {turn}"
            if split.token_ids != single.token_ids:
                at = _first_difference(split.token_ids, single.token_ids)
                return (
                    f"{where}: token {at} is {_at(split.token_ids, at)} split "
                    f"and {_at(single.token_ids, at)} in a single process"
                )
            if split.text != single.text:
                return f"{where}: the tokens are the same, the text is {split.text!r} and {single.text!r}"
    return None


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    same = [x == y for x, y in zip(a, b, strict=False)]
    return same.index(False) if False in same else len(same)


def _at(tokens: Sequence[int], index: int) -> str:
    return str(tokens[index]) if index < len(tokens) else "the end"


def median_split(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A time to first token with its parts, so that ``total`` is the median total and their sum."""
    ordered = sorted(times, key=lambda t: t["total"])
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    parts = {name: statistics.fmean(t[name] for t in middle) for name in PARTS}
    return {"total": sum(parts.values()), **parts}


def _median(values: Sequence[float | None]) -> float | int | None:
    known = [v for v in values if v is not None]
    if not known:
        return None
    middle = statistics.median(known)
    whole = all(isinstance(v, int) for v in known) and middle == int(middle)
    return int(middle) if whole else middle


def report(model: str, outcomes: Sequence[Outcome], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The object that ``--json`` prints; ``settings`` (threads, dtype, …) are added to it."""
    turns, single = [], []
    for number in range(len(outcomes[0].split)):
        split = [o.split[number] for o in outcomes]
        alone = [o.single[number].ttft_s["total"] for o in outcomes]
        turn: dict[str, Any] = {"prompt_tokens": split[0].prompt_tokens}
        turn |= {name: _median([a.figures.get(name) for a in split]) for name in _COUNTS}
        turn |= {"text": split[0].text, "ttft_s": median_split([a.ttft_s for a in split])}
        turn |= {name: _median([a.figures.get(name) for a in split]) for name in _FIGURES}
        ratios = [a.ttft_s["total"] / b for a, b in zip(split, alone, strict=True)]
        turn["ttft_ratio"] = statistics.median(ratios)
        turns.append(turn)
        single.append({"ttft_s": statistics.median(alone)})
    different = difference(outcomes)
    return {
        "model": model,
        "identical": different is None,
        **({} if different is None else {"difference": different}),
        "turns": turns,
        "single_process": {"turns": single},
        "repeats": len(outcomes),
        **settings,
        "runs": [
            {
                "split_ttft_s": [dict(a.ttft_s) for a in o.split],
                "single_ttft_s": [a.ttft_s["total"] for a in o.single],
                "overlap": [a.figures.get("overlap") for a in o.split],
            }
            for o in outcomes
        ],
    }


def render_table(result: Mapping[str, Any]) -> Table:
    """The closing table: one column a turn."""
    turns: list[Mapping[str, Any]] = result["turns"]
    table = Table(show_edge=False, pad_edge=False, box=None, header_style="bold")
    table.add_column("time to first token")
    for number in range(1, len(turns) + 1):
        table.add_column(f"turn {number}", justify="right")

    def row(name: str, cells: Sequence[str], style: str | None = None) -> None:
        table.add_row(name, *cells, style=style)

    for name in PARTS:
        row(f"  {name}", [_milliseconds(t["ttft_s"][name]) for t in turns])
    row("  total", [_milliseconds(t["ttft_s"]["total"]) for t in turns], "bold")
    single = result["single_process"]["turns"]
    row("single process", [_milliseconds(t["ttft_s"]) for t in single])
    row("split / single", [f"{t['ttft_ratio']:.2f}" for t in turns])
    row("tokens of the prompt", [str(t["prompt_tokens"]) for t in turns])
    row("  computed", [str(t["computed_tokens"]) for t in turns])
    row("  reused from the cache", [str(t["cached_tokens"]) for t in turns])
    row("tokens generated", [str(t["generated_tokens"]) for t in turns])
    row("KV moved", [f"{(t['kv_nbytes'] or 0) / 1e6:.1f} MB" for t in turns])
    row("time on the wire", [_milliseconds(t["wire_s"]) for t in turns])
    row("rate", [_rate(t["transfer_gb_per_s"]) for t in turns])
    row("overlap with compute", [_overlap(t["overlap"]) for t in turns])
    return table


def _rate(gb_per_s: float | None) -> str:
    """In the unit in which it has digits: a slow link's is 0.00 GB/s."""
    for unit, size in (("GB/s", 1.0), ("MB/s", 1e-3)):
        if gb_per_s is None or gb_per_s >= size:
            return _optional(gb_per_s and gb_per_s / size, f"{{:.2f}} {unit}")
    return _optional(gb_per_s and gb_per_s * 1e6, "{:.2f} kB/s")


def _overlap(share: float | None) -> str:
    """Nothing is hidden where fixed costs outweigh a transfer; the JSON object has the figure itself."""
    return _optional(None if share is None else max(0.0, share), "{:.1%}")


def _milliseconds(seconds: float | None) -> str:
    return _optional(None if seconds is None else seconds * 1e3, "{:,.1f} ms")


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
