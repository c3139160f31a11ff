"""``kvferry demo`` from end to end, as a user runs it, with the tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvferry.engine.tiny import make_tiny

DEMO = [sys.executable, "-m", "kvferry.cli", "demo"]
TIMEOUT_S = 100.0
PARTS = ("queue", "prefill", "transfer_exposed", "first_decode")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = str(tmp_path_factory.mktemp("cache"))
    ours = {k: v for k, v in os.environ.items() if not k.startswith("KVFERRY_")}
    # a setting of the user's own services is none of the demo's business
    others = {"KVFERRY_DECODE__LISTEN": "tcp://127.0.0.1:1"}
    return {**ours, **others, "KVFERRY_CACHE_DIR": folder, "XDG_CACHE_HOME": folder}


def run(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, *options], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.fixture(scope="module")
def result(environment: dict[str, str]) -> dict[str, Any]:
    options = ["--model", "tiny", "--json", "--repeat", "2", "--max-tokens", "24", "--threads", "1"]
    done = run(environment, *options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1  # exactly one object, nothing else
    loaded: dict[str, Any] = json.loads(lines[0])
    return loaded


# ---- what it prints --------------------------------------------------------------------------


def test_both_sides_say_the_same(result: dict[str, Any]) -> None:
    assert result["model"] == "tiny"
    assert result["identical"] is True
    assert (result["repeats"], len(result["runs"])) == (2, 2)
    assert (result["threads"], result["dtype"]) == (1, "float32")


def test_tokens_computed_and_reused(result: dict[str, Any]) -> None:
    first, second = result["turns"]
    assert first["prompt_tokens"] >= 1500
    assert (first["cached_tokens"], first["computed_tokens"]) == (0, first["prompt_tokens"])
    assert second["cached_tokens"] >= 0.95 * first["prompt_tokens"]
    assert second["cached_tokens"] + second["computed_tokens"] == second["prompt_tokens"]
    for turn in (first, second):
        assert turn["generated_tokens"] == 24
        assert len(turn["text"]) == 24
        assert all(c.isalpha() or c == " " for c in turn["text"])


def test_where_the_time_went(result: dict[str, Any]) -> None:
    for turn in result["turns"]:
        ttft = turn["ttft_s"]
        assert ttft["total"] > 0
        assert min(ttft.values()) >= 0
        assert ttft["total"] == pytest.approx(sum(ttft[part] for part in PARTS), rel=1e-9)
        assert turn["ttft_ratio"] > 0
    for number, turn in enumerate(result["turns"]):
        totals = [r["split_ttft_s"][number]["total"] for r in result["runs"]]
        assert turn["ttft_s"]["total"] == pytest.approx(sum(totals) / 2)  # the median of two
        single = [r["single_ttft_s"][number] for r in result["runs"]]
        assert result["single_process"]["turns"][number]["ttft_s"] == pytest.approx(sum(single) / 2)


def test_what_moved(result: dict[str, Any]) -> None:
    first, second = result["turns"]
    per_token = 8 * 2 * 2 * 16 * 4  # layers, K and V, heads, head dim, float32
    assert first["kv_nbytes"] >= first["prompt_tokens"] * per_token
    assert 0 < second["kv_nbytes"] < 0.1 * first["kv_nbytes"]  # decode holds the first turn's blocks
    for turn in (first, second):
        assert turn["wire_s"] > 0
        assert turn["transfer_gb_per_s"] > 0
        assert turn["overlap"] <= 1


def test_a_prompt_file_and_a_table_for_people(environment: dict[str, str], tmp_path: Path) -> None:
    file, logs = tmp_path / "text.txt", tmp_path / "logs"
    file.write_text("A ferry carries what has to get to the other side. " * 10, encoding="utf-8")
    options = ["--model", "tiny", "--prompt-file", str(file), "--max-tokens", "8", "--rate", "50MB/s"]
    done = run(environment, *options, "--temperature", "0.8", "--keep-logs", str(logs))
    assert done.returncode == 0, done.stderr
    for wanted in (
        "time to first token",
        "first_decode",
        "single process",
        "reused from the cache",
        "identical",
    ):
        assert wanted in done.stdout
    assert "starting gateway" in done.stderr
    assert sorted(p.name for p in logs.iterdir()) == [
        "decode.log",
        "gateway.log",
        "prefill.log",
        "single.log",
    ]


# ---- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "/no/such/model"], "there is no such folder"),
        (["--chunk-tokens", "100"], "no multiple of --block-tokens 16"),
        (["--rate", "fast"], "fast"),
        (["--prompt-file", "/no/such/file"], "cannot be read"),
        (["--max-tokens", "0"], "max-tokens"),
        (["--max-tokens", "4000"], "lower --max-tokens"),
        (["--dtype", "int8"], "dtype"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    environment: dict[str, str], options: list[str], says: str
) -> None:
    done = run(environment, "--model", "tiny", "--json", *options)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "starting" not in done.stderr
    assert done.stdout == ""


def test_a_log_level_that_the_processes_would_refuse_is_refused_first(environment: dict[str, str]) -> None:
    done = run({**environment, "KVFERRY_LOG__LEVEL": "bogus"}, "--model", "tiny")
    assert done.returncode == 2
    assert "log.level = 'bogus' (from environment KVFERRY_LOG__LEVEL)" in done.stderr
    assert "starting" not in done.stderr


def test_a_tokenizer_that_does_not_fit_the_model_is_said_before_anything_starts(
    environment: dict[str, str], tmp_path: Path
) -> None:
    model = make_tiny(tmp_path / "small", layers=1, vocab=100)  # bytes go up to 255
    done = run(environment, "--model", str(model))
    assert done.returncode == 2
    assert (
        "the model's vocabulary is 0..99: tokenizer.json and config.json are not of the same" in done.stderr
    )
    assert "starting" not in done.stderr


def test_a_process_that_dies_is_said_with_the_end_of_its_log(
    environment: dict[str, str], tmp_path: Path
) -> None:
    from kvferry.engine.demo.tiny import write_tiny

    write_tiny(tmp_path / "broken")
    with (tmp_path / "broken" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    done = run(environment, "--model", str(tmp_path / "broken"), "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "process ended" in done.stderr
    assert "safetensors" in done.stderr


# ---- the end ---------------------------------------------------------------------------------


@contextlib.contextmanager
def running_demo(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], dict[int, int]]]:
    """A demo with its four children running, and a pidfd of each, which says when it has ended."""
    options = ["--model", "tiny", "--repeat", "1000", "--max-tokens", "8"]
    demo = subprocess.Popen(
        [*DEMO, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    handles: dict[int, int] = {}
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while len(handles) < 4:
            assert demo.poll() is None
            assert time.monotonic() < deadline
            for pid in _children(demo.pid):
                if pid not in handles:
                    handles[pid] = os.pidfd_open(pid)
            time.sleep(0.02)
        yield demo, handles
    finally:
        demo.kill()
        demo.communicate(timeout=20)
        for pid, handle in handles.items():
            with contextlib.suppress(ProcessLookupError):
                if not select.select([handle], [], [], 0)[0]:
                    os.kill(pid, signal.SIGKILL)
            os.close(handle)


def _children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z" and int(fields[1]) == parent:
                    found.append(int(folder.name))
    return found


def _all_ended(handles: dict[int, int], timeout_s: float = 50.0) -> bool:
    deadline = time.monotonic() + timeout_s
    return all(
        select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]
        for handle in handles.values()
    )


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_process_is_left_however_it_ends(
    environment: dict[str, str], number: signal.Signals, status: int
) -> None:
    with running_demo(environment) as (demo, handles):
        demo.send_signal(number)
        assert demo.wait(50) == status
        assert _all_ended(handles)


def test_a_worker_that_is_killed_in_mid_run_is_named(environment: dict[str, str]) -> None:
    with running_demo(environment) as (demo, handles):
        prefill = next(pid for pid in handles if b"prefill" in Path(f"/proc/{pid}/cmdline").read_bytes())
        assert demo.stdout is not None
        for line in demo.stdout:  # what is under way is the conversation, not the start
            if b"repeat 1 of" in line:
                break
        os.kill(prefill, signal.SIGKILL)
        output = demo.stdout.read().decode()
        assert demo.wait(50) == 1
        assert "the prefill process ended (signal 9)" in output
        assert "the log of the prefill process ends with" in output
        assert _all_ended(handles)
