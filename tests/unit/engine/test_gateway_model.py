"""A gateway whose --model is not what the workers serve refuses them, and says both."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.config_sources import load_config
from kvferry.core.errors import ConfigError
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.engine.gateway.model import GatewayModel, open_model
from kvferry.engine.revision import revision
from kvferry.engine.tiny import make_tiny
from kvferry.wire.messages import Description

LAYER = LayerSpec((TensorSpec("k", (16, 1, 8), DType.FLOAT32),))
SPEC = KVSpec(model="m", revision="r", layers=(LAYER,), block_tokens=16)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "ours", layers=1)


def described(model_revision: str, vocab_size: int = 272) -> Description:
    spec = dataclasses.replace(SPEC, revision=model_revision)
    return Description(
        role="decode", model="m", revision=model_revision, spec=spec, vocab_size=vocab_size, max_model_len=64
    )


def test_the_same_checkpoint_is_taken_and_one_of_other_weights_refused(folder: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "theirs", layers=1, seed=1)
    model = GatewayModel(folder)
    assert model.refusal(described(revision(folder))) is None
    said = model.refusal(described(revision(other)))
    assert said is not None
    assert revision(other)[:12] in said
    assert revision(folder)[:12] in said
    assert str(folder) in said


@pytest.mark.parametrize("theirs", ["", "v1"])
def test_without_comparable_revisions_vocabularies_are_compared(folder: Path, theirs: str) -> None:
    model = GatewayModel(folder)
    assert model.refusal(described(theirs)) is None
    assert "a vocabulary of 272" in (model.refusal(described(theirs, 300)) or "")


def test_a_folder_with_the_tokenizer_alone_is_compared_by_it(folder: Path) -> None:
    theirs = revision(folder)
    for file in ("config.json", "model.safetensors"):
        (folder / file).unlink()
    model = GatewayModel(folder)
    assert model.refusal(described(theirs)) is None
    assert "its tokenizer has 256 tokens" in (model.refusal(described(theirs, 255)) or "")


def test_a_given_revision_is_compared_as_it_is(folder: Path) -> None:
    assert GatewayModel(folder, "v1").refusal(described("v1", 300)) is None
    assert "revision v1" in (GatewayModel(folder, "v1").refusal(described("v2")) or "")


def config(**values: Any) -> Any:
    return load_config(None, flags={f"model.{k}": v for k, v in values.items()}).config


def test_a_folder_that_is_not_there_is_an_error_and_one_without_tokenizer_says_so(folder: Path) -> None:
    assert open_model(config()) is None
    with pytest.raises(ConfigError, match=r"/nope .*there is no such folder"):
        open_model(config(path="/nope"))
    (folder / "kvferry_tokenizer.json").unlink()
    model = open_model(config(path=str(folder)))
    assert model is not None
    assert model.tokenizer is None
    assert model.problem == f"{folder} has no tokenizer.json"
