"""What a worker says at start: limits, revision, and checkpoints that it cannot run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.config import Config
from kvferry.core.config_sources import load_config
from kvferry.core.errors import ConfigError, UnsupportedModelError
from kvferry.engine.model_folder import resolve_model_folder
from kvferry.engine.prefill import prefill
from kvferry.engine.tiny import make_tiny
from kvferry.engine.workers.common import load_engine
from kvferry.testing.blocks import wait_until
from kvferry.testing.processes import Command
from kvferry.wire.messages import SamplingParams


def config(path: Path | None, **values: Any) -> Config:
    fields = {"model.path": None if path is None else str(path), "kv.num_blocks": 8, "model.threads": 1}
    given = {**fields, "store.dram_capacity": "1MiB", **{k.replace("__", "."): v for k, v in values.items()}}
    return load_config(None, flags=given).config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", layers=1, max_positions=256)


def test_name_and_revision_come_from_the_folder(tiny: Path) -> None:
    engine = load_engine(config(tiny))
    assert (engine.spec.model, len(engine.spec.revision)) == ("tiny", 64)
    described = engine.description("prefill")
    assert described.model == "tiny"
    assert described.vocab_size == 272
    engine.store.close()


def test_no_revision_is_said_at_start(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = load_engine(config(tiny, model__revision=""))
    assert engine.spec.revision == ""
    assert "entries are keyed by name only" in caplog.text
    engine.store.close()


def test_the_limit_is_the_least_of_model_and_memory(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        small = load_engine(config(tiny))
    assert small.max_model_len == 8 * 16
    assert "paged KV has room for 128 tokens, the model for 256" in caplog.text
    large = load_engine(config(tiny, kv__num_blocks=40))
    assert large.max_model_len == 256
    for engine in (small, large):
        engine.store.close()


def test_prompts_that_are_kept_are_shared_and_stored(tiny: Path) -> None:
    engine = load_engine(config(tiny, kv__keep_prefixes=True))
    namespace, tokens = engine.store.namespace(engine.spec), list(range(40))
    sampling, soon = SamplingParams(max_tokens=1), deadline_in(60)
    first = prefill(engine.model, engine.kv, tokens, sampling, namespace=namespace, deadline=soon)
    wait_until(lambda: namespace.lookup(namespace.keys(tokens)).prefix == 2, 20)
    namespace.clear()
    second = prefill(engine.model, engine.kv, tokens, sampling, namespace=namespace, deadline=soon)
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert second.first_token == first.first_token
    assert second.sequence.blocks[:2] == first.sequence.blocks[:2]
    for result in (first, second):
        result.sequence.release()
    engine.kv.close()
    engine.store.close()


def test_a_limit_that_does_not_fit_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 300, the model has positions for 256"):
        load_engine(config(tiny, model__max_model_len=300))
    with pytest.raises(ConfigError, match="max_model_len is 200, paged KV has room for 128"):
        load_engine(config(tiny, model__max_model_len=200))


def test_a_worker_needs_a_model() -> None:
    with pytest.raises(ConfigError, match="--model DIR"):
        load_engine(config(None))


@pytest.mark.parametrize("name", ["loop", "nul\0byte", "long" * 100])
def test_a_path_that_leads_nowhere_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"\(model\.path\): (it is no|there is no such) folder"):
        load_engine(config(tmp_path / name))


def test_the_models_of_the_demo_go_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    (tmp_path / "tiny").mkdir()  # a folder of that name is ./tiny
    monkeypatch.chdir(tmp_path)
    engine = load_engine(config(Path("tiny")))
    assert (engine.spec.model, engine.shape.num_layers) == ("tiny", 8)
    engine.store.close()
    with pytest.raises(ConfigError, match="smollm2 or tiny"):
        resolve_model_folder("small", print)
    assert resolve_model_folder(str(tiny), print) == tiny


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "sharded", layers=2, shards=2)
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UnsupportedModelError, match=shard.name):
        load_engine(config(path))


def test_an_unknown_model_type_ends_the_command_with_one_clear_line(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "strange"
    path.mkdir()
    raw = json.loads((tiny / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "model_type": "mamba"}))
    with Command("prefill", "--model", str(path), "--listen", "tcp://127.0.0.1:0") as worker:
        assert worker.wait() == 2
        errors = [line for line in worker.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "model_type 'mamba' is not supported" in errors[0]
        assert "Traceback" not in worker.err
        assert worker.out == ""
