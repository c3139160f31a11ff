"""The README sends nobody to what is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_commands_of_make_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        named = re.findall(r"(?:`|^\s*|&& )make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)
        assert set(named) <= targets, page.name


def test_every_page_is_on_its_way() -> None:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    named = set(re.findall(r"docs/[\w-]+\.md", README))
    assert named == pages
