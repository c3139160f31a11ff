"""What the README shows is run, word for word."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_python_of_the_readme_runs() -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert snippets
    for code in snippets:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "6 of 12 blocks" in done.stdout


def test_the_files_that_the_readme_names_exist() -> None:
    for name in re.findall(r"`((?:docs|examples)/[\w./-]+|CONTRIBUTING\.md)`", README):
        assert (Path(__file__).parents[2] / name).exists(), name


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"^[A-Z_]{6,}$", README, re.MULTILINE)
