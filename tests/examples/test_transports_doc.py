"""The example of ``docs/transports.md`` runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "transports.md"


def test_two_ends_from_code(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "def answer(" in block]
    exec(compile("from __future__ import annotations\n" + code, str(PAGE), "exec"), {"__name__": "example"})
    said = capsys.readouterr().out.strip()
    assert said == "hello ferry"
    assert f"It prints `{said}`." in PAGE.read_text()
