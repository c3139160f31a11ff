"""``kvferry demo --json`` with SmolLM2, as issue and README promise it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PARTS = ("queue", "prefill", "transfer_exposed", "first_decode")


@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_a_real_model_says_the_same_split_and_single() -> None:
    command = [sys.executable, "-m", "kvferry.cli", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    first, second = result["turns"]
    assert result["identical"] is True
    assert result["model"] == "SmolLM2-135M-Instruct"
    assert first["prompt_tokens"] >= 1500
    assert second["cached_tokens"] >= 0.95 * first["prompt_tokens"]
    for turn in (first, second):
        assert turn["generated_tokens"] > 0
        assert len(turn["text"].split()) > 5  # words, not noise
        assert turn["ttft_s"]["total"] == pytest.approx(sum(turn["ttft_s"][part] for part in PARTS))
        assert 0 < turn["overlap"] <= 1
    assert len(result["single_process"]["turns"]) == 2
