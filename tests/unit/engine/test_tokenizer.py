from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from kvferry.core.errors import RequestError, UnsupportedModelError
from kvferry.engine.tokenizer import BYTE_MARKER, ByteTokenizer, Tokenizer, load_tokenizer

TEXTS = ["hello world", " leading and  double spaces ", "naïve café – 日本語 🚀👩‍🚀", "", "\n\ttabs", "a"]


def _byte_level(path: Path) -> Tokenizer:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["hello world, the quick brown fox"] * 5, trainer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


def _metaspace(path: Path) -> Tokenizer:
    """Words with a mark for the space before them, which a decoder drops at the start of a text."""
    library = Library(
        models.Unigram([("<unk>", 0.0), *((c, -5.0) for c in "▁abcdehlorwn"), ("▁a", -1.0)], unk_id=0)
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


def _streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in tokens), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_there_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert all(0 <= t < 256 for t in tokens)
    assert tokenizer.decode([*tokens, 256, 271]) == text
    assert "".join(_streamed(tokenizer, tokens)) == text


def test_byte_streams_give_whole_characters_and_mark_broken_ones() -> None:
    tokenizer = ByteTokenizer()
    assert _streamed(tokenizer, list("aé🚀".encode())) == ["a", "", "é", "", "", "", "🚀", ""]
    broken = [0xE2, 0x82, 65, 300, 0xF0, 0x9F]
    assert "".join(_streamed(tokenizer, broken)) == tokenizer.decode(broken) == "�A�"


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_bpe_there_and_back(tmp_path: Path, text: str) -> None:
    tokenizer = _byte_level(tmp_path)
    tokens = tokenizer.encode(text)
    assert tokens[0] == 0
    assert tokenizer.encode(text, add_special_tokens=False) == tokens[1:]
    assert tokenizer.decode([*tokens, 1]) == text
    assert "".join(_streamed(tokenizer, [*tokens, 1])) == text


def test_streams_never_give_half_a_character(tmp_path: Path) -> None:
    tokenizer = _byte_level(tmp_path)
    pieces = _streamed(tokenizer, tokenizer.encode("日本🚀"))
    assert "�" not in "".join(pieces)
    assert [p for p in pieces if p] == ["日", "本", "🚀"]


def test_streams_keep_the_spaces_that_a_token_alone_would_lose(tmp_path: Path) -> None:
    tokenizer = _metaspace(tmp_path)
    text = "a hello world a a bad"
    tokens = tokenizer.encode(text)
    assert "".join(_streamed(tokenizer, tokens)) == tokenizer.decode(tokens) == text


def test_a_stream_that_ends_inside_a_character_gives_what_decode_gives(tmp_path: Path) -> None:
    tokenizer = _byte_level(tmp_path)
    tokens = tokenizer.encode("ok 🚀", add_special_tokens=False)[:-1]
    assert "".join(_streamed(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_the_tokenizer_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no tokenizer\.json; send token ids"):
        load_tokenizer(tmp_path)
    for text, message in (
        ("{", "cannot be read"),
        ("{}", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"kind": "word"}', "kind 'word'"),
    ):
        (tmp_path / BYTE_MARKER).write_text(text)
        with pytest.raises(UnsupportedModelError, match=message):
            load_tokenizer(tmp_path)
    (tmp_path / BYTE_MARKER).write_text('{"kind": "byte"}')
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_text_that_a_tokenizer_cannot_encode_is_refused(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"known": 0}, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    )
    with pytest.raises(RequestError, match="cannot encode the text"):
        load_tokenizer(tmp_path).encode("unknown")
