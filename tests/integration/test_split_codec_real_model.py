"""Greedy text of SmolLM2 behind a codec on the link, as issue and docs promise it."""

from __future__ import annotations

import argparse
import asyncio.base_events
import inspect
import pydoc_data.topics
import tarfile
from pathlib import Path

import pytest

from kvferry.engine.demo.conversation import load_script
from kvferry.engine.model_folder import resolve_model_folder
from kvferry.engine.tokenizer import load_tokenizer
from kvferry.testing.deployment import SplitDeployment

PROMPT_TOKENS = 600
TOKENS = 64


def _prompts(folder: Path) -> list[list[int]]:
    topics = pydoc_data.topics.topics
    texts = [
        load_script(None).text,
        topics["typesseq"],
        topics["objects"] + topics["customization"],
        inspect.getsource(argparse),
        inspect.getsource(tarfile),
        inspect.getsource(asyncio.base_events),
    ]
    tokenizer = load_tokenizer(folder)
    found = [tokenizer.encode(text[:20_000], add_special_tokens=False)[:PROMPT_TOKENS] for text in texts]
    assert [len(prompt) for prompt in found] == [PROMPT_TOKENS] * 6
    return found


def _texts(folder: Path, codec: str) -> list[list[int]]:
    settings = [
        "model.dtype=bfloat16",
        "model.threads=1",
        "model.max_model_len=1024",
        "kv.num_blocks=128",
        f"stream.codec={codec}",
    ]
    with SplitDeployment(folder, settings) as split:
        answers = [split.complete(prompt, max_tokens=TOKENS) for prompt in _prompts(folder)]
        assert f"{codec}: configured" in split.status("prefill").stream_codec or codec == "raw"
    return [answer["kvferry"]["token_ids"] for answer in answers]


@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_a_lossless_codec_changes_no_text() -> None:
    folder = resolve_model_folder("smollm2", lambda _: None)
    raw = _texts(folder, "raw")
    assert all(len(tokens) > 8 for tokens in raw)
    assert _texts(folder, "ebp") == raw
