"""``kvferry bench codec`` on a tiny model: it prints its fields and tables; no figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvferry.bench.registry import Options, run_group
from kvferry.bench.results import Param
from kvferry.core.errors import ConfigError

MAIN = "from kvferry.cli import main; main()"
QUALITY = {"relative_l2_k", "relative_l2_v", "max_error", "kl", "top1", "perplexity", "out_of_bound"}
CODECS = "ebp;int8(k=channel);shuffle|zstd"


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "bench", "codec", "--model", "tiny", "--tokens", "64"]
    command += ["--slice-tokens", "32", "--walk", "2MiB", "--runs", "1", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "own.txt"
    path.write_text("Twelve ferries crossed the strait.\n" * 20, encoding="utf-8")
    return str(path)


def test_one_line_a_result(text: str) -> None:
    done = bench("--codecs", CODECS, "--text", text, "--threads", "2", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    by_codec = {
        codec: [line for line in lines if line["params"]["codec"] == codec] for codec in CODECS.split(";")
    }
    assert sum(map(len, by_codec.values())) == len(lines)
    for codec, own in by_codec.items():
        found = {line["scenario"].rpartition(".")[2]: line for line in own}
        assert set(found) == {"ratio", "encode", "decode", "memcpy_threads"} | QUALITY
        assert {line["scenario"].split(".")[0] for line in own} == {"codec"}
        for direction in ("encode", "decode"):
            line = found[direction]
            assert line["unit"] == "GB/s"
            assert line["verified"] is True
            assert set(line["ratios"]) == {"memcpy_cold", "one_thread", "memcpy_threads"}
            assert line["params"]["threads"] == 2
            assert line["params"]["cold"] is False
        assert found["kl"]["params"]["texts"] == "own.txt"
        if codec != "int8(k=channel)":
            assert [found[name]["value"] for name in ("kl", "max_error", "out_of_bound")] == [0, 0, 0]
            assert found["top1"]["value"] == found["perplexity"]["value"] == 1


def test_tables_for_people(text: str) -> None:
    done = bench("--codecs", "ebp;int8", "--text", text)
    assert done.returncode == 0, done.stderr
    speed, quality = done.stdout.split("what codecs do to K, V and the answers")
    assert "codec.ebp.encode" in speed
    assert "memcpy_cold" in speed
    assert "kl" not in speed
    for word in ("ebp", "int8", "ratio", "kl", "nats", "texts=own.txt"):
        assert word in quality


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"codecs": "ebq"}, "did you mean ebp"),
        ({"only": "size"}, "write speed, quality"),
        ({"codecs": "ebp(bits=7)"}, "--codecs: codec 'ebp': bits is 7"),
        ({"codecs": "ebp;cast|int8"}, r"cast[|]int8 does not apply to KV in bfloat16.*needs float32 tensors"),
        ({"tokens": 8}, "do not fill a slice"),
        ({"tokens": 80}, "no whole number of slices of 32; change --tokens"),
        ({"tokens": 32768}, "takes texts of 32768 tokens, 32832 are needed"),
        ({"threads": 5000}, "--threads is 5000: each needs a CPU of its own"),
        ({"text": "/nowhere/at/all"}, "No such file"),
        ({"kernels": "cuda"}, "native or numpy"),
        ({"text": __file__, "tokens": 1 << 20}, "lower --tokens"),
        ({"text": __file__, "predicted": 8000}, "of which 8000 are predicted; lower --tokens or --predicted"),
    ],
)
def test_what_cannot_be_measured(params: dict[str, str | int], message: str) -> None:
    own: dict[str, Param | None] = {"model": "tiny", "tokens": 64, "slice_tokens": 32, **params}
    options = Options(runs=1, params=own)
    with pytest.raises(ConfigError, match=message):
        list(run_group("codec", options, lambda *_: None))


def test_only_quality(text: str) -> None:
    params: dict[str, Param | None] = {
        "model": "tiny",
        "tokens": 64,
        "slice_tokens": 32,
        "only": "quality",
        "text": text,
        "codecs": "int4",
    }
    results = list(run_group("codec", Options(runs=1, params=params), lambda *_: None))
    assert {result.scenario.rpartition(".")[2] for result in results} == QUALITY
