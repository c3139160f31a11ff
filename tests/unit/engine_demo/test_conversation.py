from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError, PluginUnavailableError, RequestError
from kvferry.engine.demo.conversation import (
    PlainChat,
    Script,
    TemplateChat,
    first_prompt,
    load_chat,
    load_script,
)
from kvferry.engine.demo.tiny import write_tiny


def encode(text: str) -> list[int]:
    return list(text.encode())


def render(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{m['role'][0]}>{m['content'].strip()}</>" for m in messages) + "<a>"


def chat_of(kind: str) -> PlainChat | TemplateChat:
    return PlainChat(encode) if kind == "plain" else TemplateChat(render, encode)


@pytest.mark.parametrize("kind", ["plain", "template"])
def test_the_second_prompt_begins_with_the_first_and_the_answer(kind: str) -> None:
    chat = chat_of(kind)
    prompt = chat.first("a long text, a question")
    # bytes that no text would encode to: tokenising the answer's text again would change them
    answer = [0xC3, 0x28, 0xFF]
    second = chat.follow(prompt, answer, "and then?")
    assert second[: len(prompt) + 3] == prompt + answer
    assert b"and then?" in bytes(second[len(prompt) + 3 :])


def test_between_an_answer_and_the_next_is_what_the_template_says() -> None:
    chat = TemplateChat(render, encode)
    prompt = chat.first("one")
    assert bytes(prompt) == b"<u>one</><a>"
    assert bytes(chat.follow(prompt, encode("two"), "three")) == b"<u>one</><a>two</><u>three</><a>"


def test_an_end_that_the_model_wrote_is_not_written_twice() -> None:
    def tokens(text: str) -> list[int]:
        return [300 if part == "</>" else ord(part) for part in _parts(text)]

    chat = TemplateChat(render, tokens)
    prompt = chat.first("one")
    with_end = chat.follow(prompt, [ord("t"), 300], "x")
    assert with_end == chat.follow(prompt, [ord("t")], "x")


def _parts(text: str) -> list[str]:
    parts: list[str] = []
    for piece in text.split("</>"):
        parts += [*piece, "</>"]
    return parts[:-1]


def test_a_template_that_drops_answers_is_refused() -> None:
    chat = TemplateChat(lambda messages: messages[-1]["content"], encode)
    with pytest.raises(ConfigError, match="does not repeat earlier answers"):
        chat.follow(chat.first("one"), [1], "x")


# ---- the text --------------------------------------------------------------------------------


def test_the_licence_is_shipped_and_long() -> None:
    script = load_script(None)
    assert script.may_be_cut
    assert "Apache License" in script.text
    assert len(script.first_turn) > 9_000
    assert "APPENDIX" not in script.text
    assert "   " not in script.text


def test_a_prompt_file_is_taken_whole(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("  hello\n", encoding="utf-8")
    script = load_script(file)
    assert (script.text, script.may_be_cut) == ("hello", False)
    assert script.first_turn.startswith("hello\n\n")


@pytest.mark.parametrize(
    ("data", "says"), [(b"\xff\xfe", "UTF-8"), (b" \n", "is empty"), (None, "No such file")]
)
def test_a_bad_prompt_file_is_said(tmp_path: Path, data: bytes | None, says: str) -> None:
    file = tmp_path / "text"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        load_script(file)


def test_the_licence_is_cut_to_the_context_at_a_line_end() -> None:
    chat = PlainChat(encode)
    script = load_script(None)
    prompt = first_prompt(script, chat, limit=4096, max_tokens=32)
    second = chat.follow(prompt, [0] * 32, script.questions[1])
    assert 2000 < len(second) + 32 <= 4096
    text = bytes(prompt).decode()
    assert script.questions[0] in text
    kept = text.removeprefix("User: ").partition("\n\nIn two sentences")[0]
    assert script.text.startswith(kept + "\n")


def test_a_text_of_the_user_is_never_cut() -> None:
    script = Script("x" * 5000, ("a?", "b?"), may_be_cut=False)
    with pytest.raises(RequestError, match=r"the model takes 4096.*shorten it"):
        first_prompt(script, PlainChat(encode), limit=4096, max_tokens=32)


def test_no_room_at_all_is_said() -> None:
    with pytest.raises(RequestError, match="--max-tokens"):
        first_prompt(load_script(None), PlainChat(encode), limit=256, max_tokens=200)


# ---- the checkpoint --------------------------------------------------------------------------


def test_tiny_speaks_bytes(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny")
    chat = load_chat(tmp_path / "tiny")
    assert bytes(chat.first("hi")) == b"User: hi\n\nAssistant: "


def test_a_checkpoint_without_tokenizer_is_refused_with_advice_that_the_demo_can_follow(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=r"has no tokenizer\.json.*--model smollm2 or --model tiny"
    ) as raised:
        load_chat(tmp_path)
    assert "token ids" not in str(raised.value)


def test_a_template_without_transformers_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "tokenizer.json").write_text("{}")

    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(PluginUnavailableError, match=r"kvferry\[demo\]"):
        load_chat(tmp_path)


def test_the_template_of_a_checkpoint_is_applied_through_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # load_chat sets it; this puts back what was before
    words = ["<s>", "</s>", "one", "two", "three", "user", "assistant"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}<s> assistant "
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = load_chat(tmp_path)
    prompt = chat.first("one")
    assert prompt == [0, 5, 2, 1, 0, 6]
    assert chat.follow(prompt, [3, 1], "three") == [0, 5, 2, 1, 0, 6, 3, 1, 0, 5, 4, 1, 0, 6]
