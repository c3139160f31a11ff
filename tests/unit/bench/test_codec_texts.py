from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.bench.scenarios.codec_texts import OWN_TEXTS, texts
from kvferry.core.errors import ConfigError


def test_every_machine_has_six_texts_that_are_long_enough() -> None:
    """For 2048 tokens and those that are predicted, at some 3.3 characters a token."""
    found = texts((), OWN_TEXTS)
    assert len(found) == OWN_TEXTS
    for name, text in found.items():
        assert len(text) > 9000, name
        assert len(set(text.splitlines())) > 100, name
    assert list(texts((), 3)) == list(found)[:3]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("äöü", encoding="utf-8")
    assert texts((str(path),), 3) == {"a.txt": "äöü"}
    with pytest.raises(ConfigError, match="No such file"):
        texts((str(tmp_path / "b.txt"),), 3)
