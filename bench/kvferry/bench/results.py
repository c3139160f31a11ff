"""What a benchmark measured, as one JSON line or one table row a result."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

__all__ = ["Param", "Result", "Sample", "percentile", "quartiles", "summarise"]

Param: TypeAlias = "str | int | float | bool"


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed run of a subject or a baseline.

    Attributes:
        seconds: How long it took.
        nbytes: Bytes moved; 0 where the figure is a time.
        cpu_s: Processor seconds of all processes that took part, if known.
        latencies: Seconds of single operations, if they were taken.
    """

    seconds: float
    nbytes: int = 0
    cpu_s: float | None = None
    latencies: tuple[float, ...] = ()

    @classmethod
    def of_all(cls, samples: Sequence[Sample]) -> Sample:
        """One of all ``samples``, as if they had been one run."""
        cpu_s = [sample.cpu_s for sample in samples if sample.cpu_s is not None]
        return cls(
            sum(sample.seconds for sample in samples),
            sum(sample.nbytes for sample in samples),
            sum(cpu_s) if len(cpu_s) == len(samples) else None,
            tuple(second for sample in samples for second in sample.latencies),
        )

    @property
    def gb_per_s(self) -> float:
        """Bytes moved over time, in 1e9 bytes a second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One figure with what was measured beside it in the same run.

    ``ratios`` are medians of paired ratios (the subject's value over the baseline's value of the same
    round), ``ratio_spread`` their quartiles, ``spread`` the quartiles of the value. Whatever changes the
    work is in ``params``. ``verified`` says that the received bytes were compared.
    """

    scenario: str
    params: dict[str, Param]
    value: float
    unit: str
    spread: tuple[float, float]
    runs: int
    baselines: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    ratio_spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    p50_us: float | None = None
    p99_us: float | None = None
    cpu_s_per_gb: float | None = None
    verified: bool = False

    def to_json(self) -> str:
        """The result as one line of JSON, floats rounded to five significant digits."""
        return msgspec.json.encode(_rounded(msgspec.to_builtins(self))).decode()


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-quantile of ``values``, linearly interpolated.

    Raises:
        ValueError: If there are none or ``q`` is outside [0, 1].
    """
    if not values or not 0.0 <= q <= 1.0:
        raise ValueError(f"the {q}-quantile of {len(values)} values")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile."""
    return percentile(values, 0.25), percentile(values, 0.75)


def summarise(
    scenario: str,
    params: Mapping[str, Param],
    unit: str,
    values: Mapping[str, Sequence[float]],
    *,
    subject: str = "subject",
    samples: Sequence[Sample] = (),
    verified: bool = False,
) -> Result:
    """Fold paired rounds into a result.

    Args:
        scenario: Its name.
        params: Everything that changes the work.
        unit: Unit of the values.
        values: Values of the subject and of each baseline, one a round, in the order of the rounds.
        subject: Which of ``values`` is the subject.
        samples: The subject's samples, for latencies and processor time.
        verified: Whether the received bytes were compared.

    Raises:
        ValueError: If the rounds are not paired.
    """
    own = values[subject]
    baselines = {name: v for name, v in values.items() if name != subject}
    for name, other in baselines.items():
        if len(other) != len(own):
            raise ValueError(f"{scenario}: {len(own)} rounds of the subject, {len(other)} of {name}")
    ratios = {
        name: [a / b for a, b in zip(own, other, strict=True) if b] for name, other in baselines.items()
    }
    ratios = {name: found for name, found in ratios.items() if found}
    latencies = [second for sample in samples for second in sample.latencies]
    moved = sum(s.nbytes for s in samples if s.cpu_s is not None)
    cpu = sum(s.cpu_s for s in samples if s.cpu_s is not None)
    return Result(
        scenario=scenario,
        params=dict(params),
        value=statistics.median(own),
        unit=unit,
        spread=quartiles(own),
        runs=len(own),
        baselines={name: statistics.median(v) for name, v in baselines.items()},
        ratios={name: statistics.median(v) for name, v in ratios.items()},
        ratio_spread={name: quartiles(v) for name, v in ratios.items()},
        p50_us=percentile(latencies, 0.5) * 1e6 if latencies else None,
        p99_us=percentile(latencies, 0.99) * 1e6 if latencies else None,
        cpu_s_per_gb=cpu / (moved / 1e9) if moved else None,
        verified=verified,
    )
