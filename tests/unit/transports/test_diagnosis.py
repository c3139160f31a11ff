from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from kvferry.core.diagnosis import Finding
from kvferry.transports import diagnosis
from kvferry.transports.auto import choosing
from kvferry.transports.diagnosis import address_probe, transport_probes
from kvferry.transports.ucx import rdma


@pytest.fixture(autouse=True)
def _no_rdma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rdma, "_DEVICES", tmp_path / "no-infiniband")


def _found(name: str) -> list[Finding]:
    return [one for _, label, probe in transport_probes() if label == name for one in probe()]


def _address(url: str, *, listens: bool = True) -> Finding:
    _, _, probe = address_probe("decode.listen", url, listens=listens)
    (found,) = probe()
    return found


def test_every_transport_is_looked_at() -> None:
    for name in ("tcp", "tls", "unix", "inproc", "ucx", "mooncake", "RDMA", "socket buffers"):
        found = _found(name)
        assert found, name
        for one in found:
            assert one.level == "ok" or one.remedy, one


def test_no_rdma_device_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(diagnosis, "_INFINIBAND", tmp_path / "infiniband")
    (found,) = _found("RDMA")
    assert found.value.startswith("none")
    assert found.level == "ok"


def test_rdma_devices_are_listed_with_their_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(diagnosis, "_INFINIBAND", tmp_path)
    for port, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        place = tmp_path / "mlx5_0" / "ports" / port
        place.mkdir(parents=True)
        (place / "state").write_text(f"{state}\n")
        (place / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (place / "link_layer").write_text("Ethernet\n")
    first, second = _found("RDMA")[:2]
    assert (first.name, first.value) == ("mlx5_0:1", "ACTIVE, 400 Gb/sec (4X NDR), Ethernet")
    assert (second.level, second.remedy[:10]) == ("warn", "bring the ")


def test_small_socket_buffers_have_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in (("tcp_rmem", "4096 131072 212992"), ("tcp_wmem", "4096 16384 8388608")):
        (tmp_path / "ipv4").mkdir(exist_ok=True)
        (tmp_path / "ipv4" / name).write_text(text)
    monkeypatch.setattr(diagnosis, "_NET", tmp_path)
    low, high = _found("socket buffers")[:2]
    assert (low.level, high.level) == ("warn", "ok")
    assert low.remedy == "sudo sysctl -w net.ipv4.tcp_rmem='4096 131072 16777216'"


# -- addresses -------------------------------------------------------------------------------------------


def test_a_taken_port_is_a_warning_that_names_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for scheme in ("tcp", "http", "auto"):
            found = _address(f"{scheme}://127.0.0.1:{port}")
            assert found.level == "warn"
            assert "taken" in found.value
            assert "move decode.listen" in found.remedy
        assert _address(f"tcp://127.0.0.1:{port}", listens=False).level == "ok"
    assert "free" in _address(f"tcp://127.0.0.1:{port}").value


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("carrier-pigeon://127.0.0.1:9", "no plug-in 'carrier-pigeon'"),
        ("tcp://192.0.2.1:0", "cannot be listened on"),
        ("tls://127.0.0.1:0?cert=/no/such/file&key=/no/such/file", "/no/such/file"),
        ("unix:///no/such/folder/s", "no such folder"),
        ("auto://127.0.0.1:0?fallbak=tcp", "fallbak"),
        ("auto://127.0.0.1:0?require=rdma", "asked for rdma, found unix, tcp"),
        ("tcp://no-such-host.invalid:0", "'no-such-host.invalid' is not known"),
        ("http://no-such-host.invalid:9", "'no-such-host.invalid' is not known"),
    ],
)
def test_an_address_that_cannot_be_had_is_a_failure(url: str, reason: str) -> None:
    found = _address(url)
    assert found.level == "fail"
    assert reason in found.value
    assert "decode.listen" in found.remedy


def test_rdma_with_a_fallback_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """C119: with fallback=tcp it runs."""
    url = "auto://127.0.0.1:0?require=rdma&fallback=tcp"
    assert _address(url).level == "warn"
    monkeypatch.setattr(choosing, "ucx_problem", lambda *_: "")
    assert _address(url).level == "ok"


def test_what_the_environment_says_to_ucx_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """C121: a clash is a failure that names both; what takes effect is listed with whose word it is."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    found = _address("ucx://127.0.0.1:0?tls=posix")
    assert found.level == "fail"
    assert "tls=posix contradicts the environment, which has UCX_TLS=tcp" in found.value
    settings = next(one for one in _found("ucx") if one.name == "ucx settings")
    assert "UCX_TLS=tcp (environment)" in settings.value
    assert "UCX_TCP_TX_SEG_SIZE=256k (kvferry)" in settings.value


@pytest.mark.parametrize(
    ("child", "says"),
    [
        ("import os; os.abort()", "UCX ended the process that looked at it (SIGABRT)"),
        ("import sys; sys.exit('no such thing')", "failed: no such thing"),
    ],
)
def test_a_ucx_that_ends_its_process_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child: str, says: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{child}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    (found,) = _found("ucx")
    assert (found.level, says in found.value) == ("warn", True), found
    assert found.remedy
    for url in ("auto://127.0.0.1:0?require=ucx", "ucx://127.0.0.1:0"):
        found = _address(url)
        assert (found.level, says in found.value) == ("fail", True), found
    monkeypatch.setattr(rdma, "_DEVICES", tmp_path)
    (found,) = _found("auto")
    assert says in found.value
