"""Text to token ids and back: ``tokenizer.json`` of a checkpoint, or bytes for models made here."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvferry.core.errors import PluginUnavailableError, RequestError, UnsupportedModelError
from kvferry.core.install_hint import install_hint

if TYPE_CHECKING:
    import tokenizers

__all__ = ["BYTE_MARKER", "ByteTokenizer", "HFTokenizer", "TextStream", "Tokenizer", "load_tokenizer"]

BYTE_MARKER = "kvferry_tokenizer.json"
"""File that marks a model directory whose token ids are bytes: ``{"kind": "byte"}``."""


class TextStream(Protocol):
    """Turns the tokens of one answer into text, piece by piece. Not thread safe."""

    def push(self, token: int) -> str:
        """The text that is certain with this token; may be empty in the middle of a character."""
        ...

    def finish(self) -> str:
        """What is left at the end."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. Thread safe."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows, special ones included; a model's vocabulary may be larger."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with the model's start token if it has one, unless told otherwise."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        ...

    def stream(self) -> TextStream:
        """For an answer that comes token by token; its pieces together are :meth:`decode`'s text."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8; ids from 256 on are special."""

    vocab_size = 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 (it adds none)
        """The bytes of ``text``."""
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of bytes; what is not UTF-8 becomes the replacement character."""
        return bytes(t for t in tokens if 0 <= t < 256).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """Piecewise :meth:`decode`."""
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if 0 <= token < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class HFTokenizer:
    """A ``tokenizer.json``, run by the ``tokenizers`` library.

    Raises:
        UnsupportedModelError: If the file cannot be read.
        PluginUnavailableError: If the library is not installed.
    """

    def __init__(self, file: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise PluginUnavailableError(
                f"{file} needs the tokenizers library: {install_hint('engine')}"
            ) from error
        try:
            self._inner: tokenizers.Tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception for a bad file
            raise UnsupportedModelError(f"{file} cannot be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        try:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:  # a bare Exception again, such as for a word without a token
            raise RequestError(f"the tokenizer of this model cannot encode the text: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """Piecewise :meth:`decode`."""
        return _HFStream(self)


class _HFStream:
    """Decodes a window of the last tokens twice, with and without what is new, and takes the difference.

    A token's text may depend on those before it (spaces, merged characters), so it is never decoded
    alone; the window moves on whenever the new text is complete, so its cost does not grow.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = 0  # tokens of the window whose text was given out
        self._text = ""  # their text

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith("�") or len(text) <= len(self._text):
            return ""
        piece = text[len(self._text) :]
        self._window = self._window[self._given :]
        self._given = len(self._window)
        self._text = self._tokenizer.decode(self._window)
        return piece

    def finish(self) -> str:
        return self._tokenizer.decode(self._window)[len(self._text) :]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory.

    Raises:
        UnsupportedModelError: If it has none that can be read.
    """
    folder = Path(path)
    if (folder / "tokenizer.json").exists():
        return HFTokenizer(folder / "tokenizer.json")
    marker = folder / BYTE_MARKER
    if not marker.exists():
        raise UnsupportedModelError(f"{folder} has no tokenizer.json; send token ids instead of text")
    try:
        kind = json.loads(marker.read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnsupportedModelError(f"{marker} cannot be read: {error!r}") from error
    if kind != "byte":
        raise UnsupportedModelError(f"{marker}: kind {kind!r} is not supported; supported: 'byte'")
    return ByteTokenizer()
