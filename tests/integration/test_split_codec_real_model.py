"""Greedy text of SmolLM2 behind a codec on the link, as issue and docs promise it."""

from __future__ import annotations

import argparse
import asyncio.base_events
import dataclasses
import inspect
import pydoc_data.topics
import tarfile
from pathlib import Path

import pytest

from kvferry.engine.demo.conversation import load_chat, load_script
from kvferry.engine.model_folder import resolve_model_folder
from kvferry.engine.tokenizer import load_tokenizer
from kvferry.testing.deployment import SplitDeployment

PROMPT_TOKENS = 600
TOKENS = 64
INT8 = "cast(to=float16)|int8(k=range)"


def _sources() -> list[str]:
    topics = pydoc_data.topics.topics
    return [
        load_script(None).text,
        topics["typesseq"],
        topics["objects"] + topics["customization"],
        inspect.getsource(argparse),
        inspect.getsource(tarfile),
        inspect.getsource(asyncio.base_events),
    ]


def _prompts(folder: Path) -> list[list[int]]:
    """Bare texts, to be continued."""
    tokenizer = load_tokenizer(folder)
    sources = _sources()
    found = [tokenizer.encode(text[:20_000], add_special_tokens=False)[:PROMPT_TOKENS] for text in sources]
    assert [len(prompt) for prompt in found] == [PROMPT_TOKENS] * 6
    return found


def _demo_prompts(folder: Path, characters: int) -> list[list[int]]:
    """What the demo asks: a text of so many characters and a question about it, in the model's own format."""
    chat, asked = load_chat(folder), load_script(None)
    scripts = [dataclasses.replace(asked, text=text).cut(characters) for text in _sources()]
    return [chat.first(script.first_turn) for script in scripts]


def _answers(folder: Path, codec: str, dtype: str, prompts: list[list[int]]) -> list[list[int]]:
    settings = [
        f"model.dtype={dtype}",
        "model.threads=1",
        "model.max_model_len=2048",
        "kv.num_blocks=160",
        f"stream.codec={codec}",
    ]
    with SplitDeployment(folder, settings) as split:
        answers = [split.complete(prompt, max_tokens=TOKENS) for prompt in prompts]
        assert f"{codec}: configured" in split.status("prefill").stream_codec or codec == "raw"
    return [answer["kvferry"]["token_ids"] for answer in answers]


def _assert_no_loss(codecs: dict[str, int]) -> None:
    """Each codec on so many of the texts."""
    folder = resolve_model_folder("smollm2", lambda _: None)
    prompts = _prompts(folder)
    raw = _answers(folder, "raw", "bfloat16", prompts)
    assert all(len(tokens) > 8 for tokens in raw)
    for codec, texts in codecs.items():
        assert _answers(folder, codec, "bfloat16", prompts[:texts]) == raw[:texts], codec


@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_a_lossless_codec_changes_no_text() -> None:
    _assert_no_loss({"ebp": 6, "split": 2})


@pytest.mark.soak
@pytest.mark.real_model
@pytest.mark.timeout(3600)
def test_no_lossless_codec_changes_a_text() -> None:
    _assert_no_loss(dict.fromkeys(("ebp(bits=4)", "split", "dedup(inner=split)", "shuffle|zstd"), 6))


def _assert_same_text(characters: int) -> None:
    """In float32, as the demo computes by default: in bfloat16 the model's own rounding decides near ties."""
    folder = resolve_model_folder("smollm2", lambda _: None)
    prompts = _demo_prompts(folder, characters)
    raw = _answers(folder, "raw", "float32", prompts)
    assert all(len(tokens) > 8 for tokens in raw)
    int8 = _answers(folder, INT8, "float32", prompts)
    same = [one == other for one, other in zip(raw, int8, strict=True)]
    assert sum(same) >= 5, [
        next((at for at, pair in enumerate(zip(*both, strict=False)) if pair[0] != pair[1]), None)
        for both in zip(raw, int8, strict=True)
    ]


@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_int8_keeps_the_demo_s_text() -> None:
    _assert_same_text(2400)


@pytest.mark.soak
@pytest.mark.real_model
@pytest.mark.timeout(3600)
def test_int8_keeps_the_demo_s_text_at_its_full_length() -> None:
    _assert_same_text(6000)
