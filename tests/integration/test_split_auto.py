"""The split over ``auto`` addresses: on one host KV goes by shared memory, and the workers say so."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from kvferry.engine.local import LocalEngine
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.testing.deployment import SplitDeployment
from kvferry.wire.messages import SamplingParams

SETTINGS = [
    "model.threads=1",
    "model.max_model_len=512",
    "kv.num_blocks=64",
    "store.dram_capacity=16MiB",
    "prefill.chunk_tokens=64",
]
PROMPT = [(7 * i) % 250 for i in range(150)]


def test_split_over_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model = make_tiny(tmp_path / "tiny", max_positions=512)
    with contextlib.closing(LocalEngine(load_model(model), chunk_tokens=64)) as engine:
        expected = engine.generate(PROMPT, SamplingParams(max_tokens=8)).run()
    with SplitDeployment(model, SETTINGS, listen="auto://127.0.0.1:0") as split:
        assert {split.addresses[role].partition("://")[0] for role in ("prefill", "decode", "kv")} == {"auto"}
        assert split.complete(PROMPT, max_tokens=8)["kvferry"]["token_ids"] == expected
        prefill, decode = split.status("prefill"), split.status("decode")
        assert prefill.choices[split.addresses["kv"]].startswith("unix, both ends are on one host; not ucx:")
        assert prefill.choices[split.addresses["prefill"]].startswith("unix+tcp, offered to peers")
        assert decode.connections["unix"] >= 1


def test_split_over_ucx(tmp_path: Path) -> None:
    """C121: the status of each worker says what UCX uses and who decided."""
    pytest.importorskip("ucxx")
    model = make_tiny(tmp_path / "tiny", max_positions=512)
    with contextlib.closing(LocalEngine(load_model(model), chunk_tokens=64)) as engine:
        expected = engine.generate(PROMPT, SamplingParams(max_tokens=8)).run()
    with SplitDeployment(model, SETTINGS, listen="ucx://127.0.0.1:0?tls=posix,cma") as split:
        assert split.complete(PROMPT, max_tokens=8)["kvferry"]["token_ids"] == expected
        for role in ("prefill", "decode"):
            (line,) = split.status(role).choices.values()
            assert "UCX_TLS=posix,cma (address)" in line
