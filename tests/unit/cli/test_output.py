"""Tables on terminals of any width: nothing is cut."""

from __future__ import annotations

import re

import pytest

from kvferry.cli.output import plain, print_table

HEADER = ("key", "value", "source", "allowed")
ROWS = [
    ("wire.trusted_network", "false", "default", "true or false"),
    (
        "gateway.prefill",
        "tcp://127.0.0.1:8410, tcp://127.0.0.2:8410",
        "environment KVFERRY_X",
        "addresses " * 9,
    ),
]


def shown(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich can tell
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(HEADER, ROWS, optional=1)
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


def test_a_narrow_terminal_folds_and_leaves_out_the_optional_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(60, monkeypatch, capsys)
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("wire.trusted_network  false") for line in lines)
    assert "allowed" not in lines[0]
    value = "".join(line[22:].split("  ")[0] for line in lines)  # the second column, put together again
    assert "tcp://127.0.0.1:8410,tcp://127.0.0.2:8410" in value.replace(" ", "")
    assert "…" not in "".join(lines)


def test_a_wide_terminal_and_a_pipe_show_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "allowed" in shown(300, monkeypatch, capsys)[0]
    for name in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name)
    print_table(HEADER, ROWS, optional=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "addresses " * 8 in lines[2]


def test_what_is_no_text_is_escaped() -> None:
    assert plain("Grüße 漢字 🙂 a b") == "Grüße 漢字 🙂 a b"
    assert plain("\x1b[31m\x07\x7f\x9b\r\n\t") == r"\x1b[31m\x07\x7f\x9b\r\n\t"
    assert plain("\u202e\u2028\udcff\U000e0001") == r"\u202e\u2028\udcff\U000e0001"
