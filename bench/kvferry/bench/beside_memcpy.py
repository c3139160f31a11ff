"""Blocks moved in batches, beside a cold memcpy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from kvferry.bench.ceilings import MemcpyCold
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, summarise

__all__ = ["Rounds", "beside_memcpy"]


class Rounds(Protocol):
    """How often, and through how much memory: what the options of every group have."""

    @property
    def runs(self) -> int:
        """Rounds that count."""
        ...

    @property
    def warmup(self) -> int:
        """Rounds before them."""
        ...

    @property
    def walk_nbytes(self) -> int:
        """What both ends walk through."""
        ...


def beside_memcpy(
    scenario: str,
    subject: Callable[[], Sample],
    memcpy: tuple[int, int],
    rounds: Rounds,
    progress: Progress,
    *,
    params: Mapping[str, Param],
    verify: Callable[[], bool],
) -> Result:
    """Time a subject in GB/s.

    Args:
        scenario: Its name.
        subject: One run.
        memcpy: Bytes of a copy of the baseline, and how many copies one run of it makes.
        rounds: How often.
        progress: Told of each run.
        params: Of the result; ``layout`` and ``nbytes`` are shown while it runs.
        verify: Called behind the rounds: whether the bytes are right.
    """
    nbytes, pieces = memcpy
    samples = run_paired(
        {"subject": subject, "memcpy_cold": MemcpyCold(nbytes, pieces, walk_nbytes=rounds.walk_nbytes)},
        runs=rounds.runs,
        warmup=rounds.warmup,
        progress=progress,
        label=f"{scenario} nbytes={params['nbytes']} layout={params['layout']}",
    )
    values = {name: [one.gb_per_s for one in found] for name, found in samples.items()}
    return summarise(scenario, params, "GB/s", values, samples=samples["subject"], verified=verify())
