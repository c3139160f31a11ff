"""The two turns of the demo as token ids.

The demo applies the chat template itself and never tokenises what the model has said: the second
prompt is the first one, the answer's tokens, and what the template puts between an answer and the next
answer. So its beginning is token for token what was prefilled before, and its KV can be reused.
"""

from __future__ import annotations

import importlib
import importlib.resources
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvferry.core.errors import ConfigError, PluginUnavailableError, RequestError
from kvferry.core.install_hint import install_hint
from kvferry.engine.tokenizer import BYTE_MARKER, load_tokenizer

__all__ = ["Chat", "PlainChat", "Script", "TemplateChat", "load_chat", "load_script"]

_PLACEHOLDER = "\u241fANSWER\u241f"  # survives any template; no text has it
_LICENCE_QUESTIONS = (
    "In two sentences: what does this licence let me do?",
    "And what must I do when I give a changed copy to others?",
)
_FILE_QUESTIONS = (
    "In two sentences: what does this text say?",
    "Which of its points matters most, and why?",
)


@dataclass(frozen=True, slots=True)
class Script:
    """What the user says: a long text, a question about it, and a second question.

    ``may_be_cut`` says whether the text may be shortened to what the model takes.
    """

    text: str
    questions: tuple[str, str]
    may_be_cut: bool

    @property
    def first_turn(self) -> str:
        """The first message."""
        return f"{self.text}\n\n{self.questions[0]}"

    def cut(self, characters: int) -> Script:
        """The same with at most ``characters`` of the text, whole lines where that is possible."""
        kept = self.text[:characters]
        return Script(kept[: kept.rfind("\n") + 1 or len(kept)].rstrip(), self.questions, self.may_be_cut)


def load_script(prompt_file: Path | None) -> Script:
    """The terms of the Apache licence, a paragraph a line, or the text of ``prompt_file``.

    Raises:
        ConfigError: The file cannot be read as UTF-8 text, or is empty.
    """
    if prompt_file is None:
        packaged = importlib.resources.files("kvferry.engine.demo").joinpath("apache-2.0.txt")
        # Without line breaks and appendix it is 1,900 tokens: models as small as the demo's, trained on
        # 2,048, talk nonsense beyond.
        terms = packaged.read_text(encoding="utf-8").partition("END OF TERMS AND CONDITIONS")[0]
        paragraphs = [" ".join(paragraph.split()) for paragraph in terms.split("\n\n")]
        return Script("\n\n".join(filter(None, paragraphs)), _LICENCE_QUESTIONS, may_be_cut=True)
    try:
        text = prompt_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"prompt file {prompt_file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt file {prompt_file} is no UTF-8 text: {error}") from error
    if not text:
        raise ConfigError(f"prompt file {prompt_file} is empty; it needs a text to ask about")
    return Script(text, _FILE_QUESTIONS, may_be_cut=False)


class Chat(Protocol):
    """Prompts of one conversation in a model's own format."""

    def first(self, message: str) -> list[int]:
        """The prompt for the first answer."""
        ...

    def follow(self, prompt: Sequence[int], answer: Sequence[int], message: str) -> list[int]:
        """The prompt for the next answer; begins with exactly ``prompt`` and ``answer``."""
        ...


class _AppendingChat:
    """Joins prompt, answer and what comes between; ``between`` ends the answer and asks for the next."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def _between(self, message: str) -> str:
        raise NotImplementedError

    def follow(self, prompt: Sequence[int], answer: Sequence[int], message: str) -> list[int]:
        between = self._encode(self._between(message))
        if answer and between and answer[-1] == between[0]:
            between = between[1:]  # the model has written the end of its turn itself
        return [*prompt, *answer, *between]


class PlainChat(_AppendingChat):
    """A plain dialogue, for models without a chat template."""

    def first(self, message: str) -> list[int]:
        """The prompt for the first answer."""
        return self._encode(f"User: {message}\n\nAssistant: ")

    def _between(self, message: str) -> str:
        return f"\n\nUser: {message}\n\nAssistant: "


class TemplateChat(_AppendingChat):
    """A checkpoint's own chat template.

    Args:
        render: Text of messages, with the beginning of the next answer.
        encode: Token ids of such a text; adds nothing, since the template has the special tokens.
    """

    def __init__(
        self, render: Callable[[list[dict[str, str]]], str], encode: Callable[[str], list[int]]
    ) -> None:
        super().__init__(encode)
        self._render = render
        self._said: list[str] = []

    def first(self, message: str) -> list[int]:
        """The prompt for the first answer."""
        self._said = [message]
        return self._encode(self._render([{"role": "user", "content": message}]))

    def _between(self, message: str) -> str:
        messages = [
            {"role": "user", "content": self._said[0] if self._said else ""},
            {"role": "assistant", "content": _PLACEHOLDER},
            {"role": "user", "content": message},
        ]
        before, found, after = self._render(messages).rpartition(_PLACEHOLDER)
        if not found or not before:
            raise ConfigError(
                "the model's chat template does not repeat earlier answers; the demo needs one that does"
            )
        return after


def load_chat(directory: Path) -> Chat:
    """The chat format of a checkpoint: its template, through transformers, else a plain dialogue.

    Raises:
        PluginUnavailableError: The checkpoint has a template and transformers is not installed.
        ConfigError: It has no ``tokenizer.json``, or its tokenizer or template cannot be read.
    """
    if not any((directory / name).is_file() for name in ("tokenizer.json", BYTE_MARKER)):
        raise ConfigError(
            f"{directory} has no tokenizer.json, which the demo needs to talk in text: put the checkpoint's "
            "own there, or take --model smollm2 or --model tiny"
        )
    if not _has_template(directory):
        return PlainChat(load_tokenizer(directory).encode)
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: no request leaves the machine
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise PluginUnavailableError(
            f"the chat template of {directory} needs transformers: {install_hint('demo')}"
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer of {directory} cannot be read: {error}") from error

    def render(messages: list[dict[str, str]]) -> str:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]

    return TemplateChat(render, encode)


def _has_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / 'tokenizer_config.json'} cannot be read: {error}") from error
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def first_prompt(script: Script, chat: Chat, limit: int, max_tokens: int) -> list[int]:
    """The first prompt, of which two turns fit into ``limit`` tokens; the text is cut if it may be.

    Raises:
        RequestError: The text is too long and is the user's own, or nothing is left of it.
    """
    while True:
        prompt = chat.first(script.first_turn)
        second = chat.follow(prompt, [], script.questions[1])
        needed = len(second) + 2 * max_tokens
        if needed <= limit:
            return prompt
        over = f"both turns need {needed} tokens with {max_tokens} an answer; the model takes {limit}"
        if not script.may_be_cut:
            raise RequestError(f"the prompt file is too long: {over}; shorten it or lower --max-tokens")
        keep = int(len(script.text) * (1 - (needed - limit) / len(prompt)) * 0.99)
        if keep < 1:
            raise RequestError(f"there is no room for a text: {over}; lower --max-tokens")
        script = script.cut(keep)
