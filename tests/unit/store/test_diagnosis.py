from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.core.config import TierConfig
from kvferry.core.diagnosis import Finding
from kvferry.store.diagnosis import tier_probes


def _found(**options: object) -> list[Finding]:
    tier = TierConfig.model_validate({"kind": "disk", "capacity": "1GiB", **options})
    return [one for _, _, probe in tier_probes([tier]) for one in probe()]


def test_directories_are_looked_at_and_left_as_they_were(tmp_path: Path) -> None:
    (old := tmp_path / "old").mkdir()
    new = tmp_path / "not" / "yet"
    plugin, first, second = _found(directories=[str(old), str(new)])
    assert plugin.value == "kind disk is installed"
    assert "O_DIRECT works" in first.value or "O_DIRECT does not work" in first.value
    assert f"will be made in {tmp_path}" in second.value
    assert {one.level for one in (plugin, first, second)} == {"ok"}
    assert list(tmp_path.iterdir()) == [old]
    assert list(old.iterdir()) == []


def test_the_codec_of_a_tier_and_its_loss_are_told(tmp_path: Path) -> None:
    place = {"directory": str(tmp_path)}
    for options, told in (
        ({"codec": "ebp"}, "ebp (lossless)"),
        ({"codec": "int8", "allow_lossy": True}, "int8 (lossy, lossy blocks are read)"),
        ({"codec": "off", "allow_lossy": True}, "off (lossless, lossy blocks are read)"),
        ({"codec": "raw"}, "off"),
    ):
        found = _found(**place, **options)[-1]
        assert (found.area, found.name, found.value, found.level) == ("codecs", "tier disk", told, "ok")
    wrong = TierConfig.model_construct(kind="disk", name="disk", options={**place, "codec": "int8"})
    found = [one for _, _, probe in tier_probes([wrong]) for one in probe()][-1]
    assert found.level == "fail"
    assert "int8 is lossy" in found.value
    assert len(_found(**place)) == 2


def test_a_directory_that_is_none_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = _found(directory=str(tmp_path / "file" / "kv"))[1]
    assert (found.level, found.remedy) == ("fail", "choose another directory")


def test_a_directory_of_others_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_args: False)
    found = _found(directory=str(tmp_path))[1]
    assert found.level == "fail"
    assert "may not write" in found.value
    assert "sudo install -d" in found.remedy
