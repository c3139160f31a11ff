"""Paired, interleaved runs: subject and baselines in turn, round by round.

The machines that we measure on vary by a third within minutes, so only figures of one round are
compared. The order changes from turn to turn, so that each runs first as often as any, and behind each other
one as often as behind any (a Williams design): what one leaves behind it, in caches and in the credit of a
limiter, is worth a percent to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvferry.bench.results import Sample

__all__ = ["MIN_RUNS", "Progress", "run_paired"]

MIN_RUNS = 9
Progress = Callable[[str, int, int], None]


def _silent(label: str, done: int, total: int) -> None:
    del label, done, total


def _order(names: Sequence[str], turn: int) -> list[str]:
    """Of one turn; all is balanced after twice as many as there are names."""
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(len(names))]
    order = [names[(at + turn // 2) % len(names)] for at in zigzag]
    return order[::-1] if turn % 2 else order


def run_paired(
    subjects: Mapping[str, Callable[[], Sample]],
    *,
    runs: int = MIN_RUNS,
    warmup: int = 1,
    turns: int = 1,
    progress: Progress = _silent,
    label: str = "",
) -> dict[str, list[Sample]]:
    """Run all ``subjects`` in each round.

    Args:
        subjects: What to time, by name; the subject and its baselines.
        runs: Rounds that count.
        warmup: Rounds before them that do not.
        turns: How often each is run in a round, whose sample is that of all of them. The shorter a turn is,
            the more alike is the machine that all of a round find.
        progress: Called after each single run with the label, how many are done and how many there are.
        label: What is being measured, for ``progress``.

    Returns:
        The samples of each, one a counted round, in the order of the rounds.
    """
    names = list(subjects)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    total = (warmup + runs) * turns * len(names)
    done = 0
    for turn in range((warmup + runs) * turns):
        for name in _order(names, turn):
            samples[name].append(subjects[name]())
            done += 1
            progress(label, done, total)
    return {
        name: [Sample.of_all(found[at : at + turns]) for at in range(warmup * turns, len(found), turns)]
        for name, found in samples.items()
    }
