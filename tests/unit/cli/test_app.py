from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvferry.cli import app, main, options
from kvferry.core.errors import AuthError, ConfigError, ConnectError, RequestError

MINE = "test_app_commands"


def run(*args: str) -> int:
    """The exit code of ``kvferry ARGS`` in this process."""
    with pytest.raises(SystemExit) as caught:
        main(args)
    code = caught.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


@pytest.fixture
def raises(monkeypatch: pytest.MonkeyPatch) -> type:
    """A command that raises what is set on the class."""

    class Failing:
        error: BaseException = RuntimeError("not set")

    def command() -> None:
        raise Failing.error

    module = type(sys)(MINE)
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MINE, module)
    monkeypatch.setitem(app.COMMANDS, "fail", app.CommandEntry(f"{MINE}:command", "Fails."))
    monkeypatch.delenv("KVFERRY_DEBUG", raising=False)
    return Failing


def test_help_is_light() -> None:
    """In a process of its own: neither numpy nor pydantic nor torch is imported for the list of commands."""
    code = (
        "import sys\nfrom kvferry.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert not e.code\n"
        "heavy = {'numpy', 'torch', 'pydantic', 'msgspec', 'starlette', 'uvicorn', 'prometheus_client'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    for name, entry in app.COMMANDS.items():
        assert name in done.stdout
        assert entry.help.split()[0] in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", sorted(app.COMMANDS))
def test_every_command_can_be_imported_and_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    assert f"kvferry {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"kvferry {metadata.version('kvferry')}\n"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plugin") == 2
    assert "plugins" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a\nb"), 2),
        (RequestError("a b"), 2),
        (ConnectError("a b"), 1),
        (AuthError("a b"), 1),
    ],
)
def test_an_error_of_ours_is_one_line_and_a_code(
    error: Exception, code: int, raises: type, capsys: pytest.CaptureFixture[str]
) -> None:
    raises.error = error  # type: ignore[attr-defined]
    assert run("fail") == code
    assert capsys.readouterr().err == "error: a b\n"


def test_a_traceback_is_shown_when_asked_for(
    raises: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raises.error = ConnectError("password=hunter2")  # type: ignore[attr-defined]
    assert run("fail") == 1
    assert capsys.readouterr().err == "error: password=***\n"
    raises.error = ConnectError("a b")  # type: ignore[attr-defined]
    monkeypatch.setenv("KVFERRY_DEBUG", "0")
    assert run("--traceback", "fail") == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("error: a b\n")


def test_a_command_without_its_extra_says_what_to_install(
    raises: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = app.CommandEntry(f"{MINE}:command", "Fails.", "turbo")
    monkeypatch.setitem(app.COMMANDS, "fail", entry)
    raises.error = ModuleNotFoundError("No module named 'turbolib'", name="turbolib")  # type: ignore[attr-defined]
    assert run("fail") == 2
    assert capsys.readouterr().err == (
        "error: kvferry fail needs turbolib: pip install 'kvferry[turbo]' "
        "(in a clone of it: pip install -e '.[turbo]')\n"
    )
    monkeypatch.setitem(app.COMMANDS, "fail", entry._replace(extra=""))
    with pytest.raises(ModuleNotFoundError):
        main(["fail"])
    monkeypatch.setitem(app.COMMANDS, "fail", entry)
    raises.error = ModuleNotFoundError("our own", name="kvferry.gone")  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError):
        main(["fail"])


def test_a_bug_keeps_its_traceback(raises: type) -> None:
    raises.error = ZeroDivisionError("bug")  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        main(["fail"])


def test_an_interrupted_command_exits_130(raises: type) -> None:
    raises.error = KeyboardInterrupt()  # type: ignore[attr-defined]
    assert run("fail") == 130


def test_a_real_ctrl_c_exits_130_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "kvt_slow.py").write_text(
        "import threading\n"
        "def command() -> None:\n"
        "    print('ready', flush=True)\n"
        "    threading.Event().wait(60)\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from kvferry.cli import app\n"
        "app.COMMANDS['slow'] = app.CommandEntry('kvt_slow:command', 'Waits.')\n"
        "app.main(['slow'])\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == 130
    assert "Traceback" not in err


def test_plugins_lists_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plugins", "--json") == 0
    found = {(p["group"], p["name"]): p for p in json.loads(capsys.readouterr().out)["plugins"]}
    assert found["kvferry.transports", "tcp"]["distribution"] == "kvferry"
    assert run("plugins") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kind", "name", "module", "distribution", "state"]
    assert any(line.split()[:2] == ["transports", "tcp"] for line in lines)


def test_config_show_prints_values_with_their_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if n.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "a.toml"
    path.write_text("[decode]\nmax_queue = 3\n")
    monkeypatch.setenv("KVFERRY_LOG__LEVEL", "debug")
    options = ["config", "show", "--config", str(path), "--set", "wire.max_meta=1MiB"]
    assert run(*options, "--json") == 0
    found = json.loads(capsys.readouterr().out)["config"]
    shown = {key: (found[key]["value"], found[key]["source"]) for key in found}
    assert shown["decode.max_queue"] == (3, str(path))
    assert shown["log.level"] == ("debug", "environment KVFERRY_LOG__LEVEL")
    assert shown["wire.max_meta"] == (2**20, "--set")
    assert shown["wire.checksum"] == (True, "default")
    assert run(*options) == 0
    table = capsys.readouterr().out
    assert str(path) in table  # into a pipe nothing is cut
    assert "1 MiB" in table
    assert run("config", "show", "--set", "wire.max_metta=1") == 2
    assert "did you mean max_meta?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["demo"], ["bench", "stream"], ["config"], ["prefill"]])
def test_help_is_filled_and_offers_only_what_is_ours(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert run(*command, "--help") == 0
    shown = capsys.readouterr().out
    assert "completion" not in shown
    prose = shown.partition("Options")[0].splitlines()[2:]
    lines = [line.strip() for line in prose]
    for line, following in itertools.pairwise(lines):  # no line ends while the next word would fit
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 86, line
    if command == ["prefill"]:
        assert "[model.path]" in shown


@pytest.mark.parametrize(
    ("given", "taken"),
    [("./dd", "{}/dd"), ("/a/b", "/a/b"), ("none", "none"), ("~/x", "/home/me/x"), (None, None)],
)
def test_paths_of_the_command_line_are_from_where_it_is_given(
    given: str | None, taken: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert options.absolute(given, "--disk") == (taken and taken.format(tmp_path))
