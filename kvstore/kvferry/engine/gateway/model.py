"""The model as the gateway knows it by itself: its tokenizer, and whether the workers serve the same."""

from __future__ import annotations

import json
import logging
import re
import threading
from pathlib import Path

from kvferry.core.config import Config
from kvferry.core.errors import KVFerryError
from kvferry.engine.model_folder import resolve_model_folder
from kvferry.engine.revision import revision
from kvferry.engine.tokenizer import Tokenizer, load_tokenizer
from kvferry.wire.messages import Description

__all__ = ["GatewayModel", "open_model"]

log = logging.getLogger(__name__)

_HASH = re.compile(r"[0-9a-f]{64}")


class GatewayModel:
    """The folder of ``--model``. Thread safe.

    Args:
        folder: It.
        given_revision: ``model.revision``: ``auto`` is the hash of the folder's files, empty is not known.

    Attributes:
        tokenizer: Its tokenizer; ``None`` if it has none that can be read.
        problem: Why not.
    """

    def __init__(self, folder: Path, given_revision: str = "auto") -> None:
        self.folder = folder
        self.tokenizer: Tokenizer | None = None
        self.problem = ""
        self._given_revision = given_revision
        self._computed: str | None = None
        self._lock = threading.Lock()
        try:
            self.tokenizer = load_tokenizer(folder)
        except KVFerryError as error:
            self.problem = str(error).partition(";")[0]

    def refusal(self, description: Description) -> str | None:
        """Why a worker cannot be used, since it serves another model; ``None`` if it can.

        Revisions are compared where both are known, else the sizes of the vocabularies. The first call may
        read all weight files, whose digests are then kept in the cache folder.
        """
        ours, theirs = self._revision(description.revision), description.revision
        vocabulary = self._vocab_size()
        if ours and theirs:
            if ours == theirs:
                return None
            shown = f"revision {ours[:12]}"
        elif vocabulary is None or vocabulary == description.vocab_size:
            tokens = 0 if self.tokenizer is None else self.tokenizer.vocab_size
            if tokens <= description.vocab_size:
                return None
            shown = f"its tokenizer has {tokens} tokens"
        else:
            shown = f"a vocabulary of {vocabulary}"
        return (
            f"it serves model {description.model!r} (revision {theirs[:12] or 'not given'}, a vocabulary of "
            f"{description.vocab_size}), this gateway's --model {self.folder} is another one ({shown})"
        )

    def _revision(self, theirs: str) -> str:
        """Ours, if it can be compared with theirs; else empty."""
        if self._given_revision != "auto":
            return self._given_revision
        if not _HASH.fullmatch(theirs):  # a name that somebody gave: a hash says nothing about it
            return ""
        with self._lock:
            if self._computed is None:
                log.info("comparing %s with the workers' model; large weights are read once", self.folder)
                try:
                    self._computed = revision(self.folder)
                except KVFerryError as error:  # such as a folder with the tokenizer alone
                    log.info("the revision of --model is not known, vocabularies are compared: %s", error)
                    self._computed = ""
            return self._computed

    def _vocab_size(self) -> int | None:
        """What ``config.json`` says, if there is one."""
        try:
            found = json.loads((self.folder / "config.json").read_text(encoding="utf-8")).get("vocab_size")
        except (OSError, ValueError, AttributeError, RecursionError):
            return None
        return found if isinstance(found, int) else None


def open_model(config: Config) -> GatewayModel | None:
    """The model of ``model.path``, if one is given.

    Raises:
        ConfigError: If there is no such folder.
    """
    if not config.model.path:
        log.warning("no model folder given (--model): prompts must be token ids, answers have no text")
        return None
    model = GatewayModel(resolve_model_folder(config.model.path, log.info), config.model.revision)
    if model.tokenizer is None:
        log.warning("%s: prompts must be token ids, answers have no text", model.problem)
    return model
