from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvferry.testing.processes import Command


def test_a_command_runs_the_same_code_and_no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.Popen

    def show(words: list[str], **options: Any) -> subprocess.Popen[str]:
        del words
        code = "import json, os; print('ready', json.dumps(dict(os.environ)))"
        return started([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "Popen", show)
    for name in ("NATIVE", "NATIVE_ISA", "CONFIG", "DAEMON__SOCKET", "TOKEN"):
        monkeypatch.setenv(f"KVFERRY_{name}", "ours")
    with Command("serve", environment={"KVFERRY_TOKEN": "its own"}) as command:
        assert command.wait() == 0
        found: dict[str, str] = json.loads(command.out.removeprefix("ready "))
    assert {name: value for name, value in found.items() if name.startswith("KVFERRY_")} == {
        "KVFERRY_NATIVE": "ours", "KVFERRY_NATIVE_ISA": "ours", "KVFERRY_TOKEN": "its own",
    }  # fmt: skip
