from __future__ import annotations

import json
import math

import pytest

from kvferry.bench.results import Sample, percentile, quartiles, summarise


def test_percentile_interpolates_and_refuses_nothing() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([7.0], 0.99) == 7.0
    assert quartiles([0.0, 1.0, 2.0, 3.0, 4.0]) == (1.0, 3.0)
    with pytest.raises(ValueError, match="0 values"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match=r"1\.5-quantile"):
        percentile([1.0], 1.5)


def test_ratios_are_medians_of_paired_ratios_not_ratios_of_medians() -> None:
    # Round by round the subject is always half the baseline; the medians alone would say otherwise.
    subject, baseline = [1.0, 2.0, 50.0], [2.0, 4.0, 100.0]
    shuffled = summarise("x", {}, "GB/s", {"subject": subject, "raw": baseline})
    assert shuffled.ratios == {"raw": 0.5}
    assert shuffled.ratio_spread == {"raw": (0.5, 0.5)}
    assert shuffled.value == 2.0
    assert shuffled.runs == 3


def test_unpaired_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rounds of the subject, 1 of raw"):
        summarise("x", {}, "s", {"subject": [1.0, 2.0], "raw": [1.0]})


def test_json_line_has_the_fields_of_the_design() -> None:
    samples = [Sample(0.5, 10**9, 0.25, (1e-6, 3e-6)), Sample(0.5, 10**9, 0.75, (2e-6,))]
    values = {"subject": [s.gb_per_s for s in samples], "raw_socket": [4.0, 4.0]}
    result = summarise("t", {"nbytes": 1}, "GB/s", values, samples=samples, verified=True)
    line = json.loads(result.to_json())
    assert list(line) == [
        "scenario", "params", "value", "unit", "spread", "runs", "baselines", "ratios", "ratio_spread",
        "p50_us", "p99_us", "cpu_s_per_gb", "verified",
    ]  # fmt: skip
    assert line["value"] == 2.0
    assert line["ratios"] == {"raw_socket": 0.5}
    assert line["cpu_s_per_gb"] == 0.5
    assert math.isclose(line["p50_us"], 2.0)
    assert line["verified"] is True


def test_a_baseline_of_zero_gives_no_ratio() -> None:
    result = summarise("t", {}, "s", {"subject": [1.0], "none": [0.0]})
    assert result.ratios == {}
    assert result.baselines == {"none": 0.0}
