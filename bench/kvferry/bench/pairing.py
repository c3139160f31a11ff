"""Paired, interleaved runs: subject and baselines in turn, round by round.

The machines that we measure on vary by a third within minutes, so only figures of one round are
compared. The order turns from round to round, and every other one runs backwards, so that none always runs
first, or always behind the same other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry.bench.results import Sample

__all__ = ["MIN_RUNS", "Progress", "run_paired"]

MIN_RUNS = 9
Progress = Callable[[str, int, int], None]


def _silent(label: str, done: int, total: int) -> None:
    del label, done, total


def run_paired(
    subjects: Mapping[str, Callable[[], Sample]],
    *,
    runs: int = MIN_RUNS,
    warmup: int = 1,
    progress: Progress = _silent,
    label: str = "",
) -> dict[str, list[Sample]]:
    """Run all ``subjects`` once a round.

    Args:
        subjects: What to time, by name; the subject and its baselines.
        runs: Rounds that count.
        warmup: Rounds before them that do not.
        progress: Called after each single run with the label, how many are done and how many there are.
        label: What is being measured, for ``progress``.

    Returns:
        The samples of each, one a counted round, in the order of the rounds.
    """
    names = list(subjects)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    total = (warmup + runs) * len(names)
    done = 0
    for round_number in range(warmup + runs):
        shift = round_number // 2 % len(names)
        order = names[shift:] + names[:shift]
        for name in reversed(order) if round_number % 2 else order:
            sample = subjects[name]()
            if round_number >= warmup:
                samples[name].append(sample)
            done += 1
            progress(label, done, total)
    return samples
