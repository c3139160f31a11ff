from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.cli import main
from kvferry.transports.ucx import rdma


def _run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *args])
    code = caught.value.code
    return code if isinstance(code, int) else 0


def test_everything_asked_for_works(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "kvferry.toml"
    config.write_text(f'[store]\ndram_capacity = "1MiB"\ntiers = ["disk:{tmp_path}/kv?capacity=1MiB"]\n')
    assert _run("--json", "--config", str(config), "--set", "kv.memory=1MiB") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    names = {(one["area"], one["name"]) for one in found["findings"]}
    for expected in (
        ("transports", "ucx"), ("rdma", "devices"), ("devices", "musa"), ("devices", "cuda"),
        ("limits", "open files"), ("limits", "pinning"), ("memory", "/dev/shm"), ("memory", "NUMA nodes"),
        ("tiers", f"disk {tmp_path}/kv"), ("addresses", "gateway.listen"), ("versions", "torch"),
    ):  # fmt: skip
        assert expected in names
    assert all(set(one) == {"area", "name", "value", "level", "why", "remedy"} for one in found["findings"])
    assert not (tmp_path / "kv").exists()


def test_what_is_asked_for_and_does_not_work_gives_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """C119: asked, found and remedy, for people and for scripts."""
    monkeypatch.setattr(rdma, "_DEVICES", tmp_path / "no-infiniband")
    sets = ("--set", "decode.listen=auto://127.0.0.1:0?require=rdma")
    assert _run(*sets) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "asked for rdma, found unix, tcp" in text
    assert "1 of what the configuration asks for does not work here" in text
    assert _run("--json", "--set", "decode.listen=auto://127.0.0.1:0?require=rdma&fallback=tcp") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_codec_of_streams_that_cannot_be_had_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--set", "stream.codec=itn8") == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "no plug-in 'itn8', did you mean int8?" in text
    assert _run("--json", "--set", "stream.codec=int8") == 0
    found = {one["name"]: one["value"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["stream.codec"] == "int8 (lossy accepted)"


def test_what_the_worker_refuses_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    open_to_all = ("--set", "decode.listen=tcp://0.0.0.0:0")
    assert _run(*open_to_all) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "tcp://0.0.0.0:0 (decode.listen) can be reached from other hosts" in text
    assert _run(*open_to_all, "--set", "wire.trusted_network=true") == 0
    capsys.readouterr()
    assert _run("--set", "decode.kv_listen=tcp://127.0.0.1:8430") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "decode.kv_listen" in error
    assert "is the place where decode.listen (--listen) takes requests already" in error


def test_addresses_of_the_daemon_are_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is taken may be by a daemon that runs already."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert _run("--set", f"daemon.listen=tcp://127.0.0.1:{port}") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"daemon.listen warn tcp://127.0.0.1:{port}: taken, maybe by kvferry itself" in text
    assert _run("--set", "daemon.listen=tcp://0.0.0.0:0") == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "tcp://0.0.0.0:0 (daemon.listen) can be reached from other hosts" in text
    assert _run("--set", "daemon.listen=tpc://host:1") == 1
    assert "there is no transport 'tpc'" in " ".join(capsys.readouterr().out.split())
    _run("--set", "daemon.listen=tls://0.0.0.0:0", "--set", "daemon.credentials=/there")
    assert "can be reached" not in " ".join(
        capsys.readouterr().out.split()
    )  # what is wrong is the certificate
    assert _run("--set", "daemon.http=http://0.0.0.0:0") == 1
    assert "(daemon.http) can be reached from other hosts" in " ".join(capsys.readouterr().out.split())


def test_a_wrong_configuration_is_not_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--set", "decode.lissen=x") == 2
    assert "did you mean listen" in capsys.readouterr().err


def test_a_process_of_its_own_is_done_soon_and_without_torch() -> None:
    code = (
        "import sys\nfrom kvferry.cli import main\n"
        "try: main(['doctor'])\nexcept SystemExit as e: print('rc', e.code)\n"
        "print('torch' in sys.modules)"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert time.monotonic() - started < 50
    assert done.stdout.splitlines()[-1] == "False"
    assert "Traceback" not in done.stdout + done.stderr
