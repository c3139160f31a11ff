"""What ``docs/rdma.md`` tells people to run, as far as it can be checked without an RDMA device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main
from kvferry.core.config_sources import load_config
from kvferry.testing.regions import RegionSuite
from kvferry.testing.transports import TransportSuite
from kvferry.transports.auto.options import parse_auto
from kvferry.transports.ucx.settings import parse_address

TEXT = (Path(__file__).parents[2] / "docs" / "rdma.md").read_text()
COMMANDS = re.findall(r"\$ (kvferry (?:[^\n]*\\\n)*[^\n]*)", TEXT)


def _classes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "docs/rdma.md", "exec"), found)
    return found


def test_the_suites_are_suites_with_addresses_that_can_be_read() -> None:
    found = _classes()
    assert issubclass(found["TestUcxRdma"], TransportSuite)
    assert issubclass(found["TestMooncakeRdma"], RegionSuite)
    assert parse_address(found["TestUcxRdma"]().listen_url())[1].require == "rdma"
    assert parse_auto(found["TestAutoRdma"]().listen_url())[1].require == "rdma"
    assert "wire='rdma'" in found["TestMooncakeRdma"].child_setup


def test_the_suite_runs_where_there_is_no_rdma_and_says_that(tmp_path: Path) -> None:
    block = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
    (tmp_path / "test_rdma.py").write_text(block)
    words = ["-q", "-x", "-p", "no:cacheprovider", "-c", "/dev/null", "-k", "addresses_are_urls"]
    path = ":".join(word for word in sys.path if word)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "test_rdma.py"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"RDMA_HOST": "127.0.0.1", "PYTHONPATH": path},
    )
    if "passed" not in done.stdout:
        assert "This host has" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_the_commands_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.replace("\\\n", " ").split()
    with pytest.raises(SystemExit) as done:
        main([*(word for word in words[1:3] if word.isalpha()), "--help"])
    assert not done.value.code
    text = capsys.readouterr().out
    for option in (word for word in words if word.startswith("--")):
        assert f"{option} " in text
    for setting in re.findall(r"--set '?([^' ]+)", command):
        load_config(assignments=[setting])


def test_commands_were_found() -> None:
    assert len(COMMANDS) == 8
