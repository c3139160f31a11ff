"""``kvferry bench codec --only adaptive`` at a small scale: it runs, and its lines say what was compared."""

from __future__ import annotations

import json
import subprocess
import sys

from kvferry.bench.scenarios.codec_adaptive import _over_fair_best


def _bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry.cli", "bench", "codec", "--only", "adaptive", "--json", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_every_rate_is_measured_beside_raw_and_each_fixed_codec() -> None:
    small = ["--model", "tiny", "--layers", "6", "--tokens", "256", "--slice-tokens", "64", "--runs", "2"]
    done = _bench(*small, "--rates", "50MB/s;2GB/s", "--codecs", "ebp;lz4")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["params"]["rate"] for r in results] == ["50 MB/s", "2 GB/s"]
    for result in results:
        assert result["scenario"] == "codec.adaptive"
        assert set(result["baselines"]) == {"raw", "raw_again", "ebp", "lz4", "best_fixed"}
        noise = result["params"]["raw_again_over_raw"]
        assert isinstance(noise, float)
        assert noise > 0
        fair = result["params"]["over_fair_best"]
        assert isinstance(fair, float)
        assert fair > 0
        assert result["params"]["best_fixed"] in ("raw", "ebp", "lz4")
        assert result["params"]["chosen"] in ("raw", "ebp", "lz4")
        assert result["params"]["kv_nbytes"] == 6 * 256 * 2 * 2 * 64 * 2
        assert result["unit"] == "s"
        assert result["value"] > 0
        assert result["verified"] is True  # every byte was compared by the receiver


def test_the_best_of_noisy_ones_is_judged_in_other_rounds_than_it_was_chosen_in() -> None:
    first, second = [1.0, 2.0] * 4, [2.0, 1.0] * 4
    assert _over_fair_best([1.5] * 8, {"a": first, "b": second}) == 0.75
    assert _over_fair_best([1.5] * 8, {"a": [1.0] * 8, "b": second}) == 1.5
    assert _over_fair_best([3.0], {"a": [2.0], "b": [1.5]}) == 2.0


def test_what_cannot_be_measured_is_said() -> None:
    done = _bench("--model", "tiny", "--rates", "fast")
    assert done.returncode == 2
    assert "fast" in done.stderr
