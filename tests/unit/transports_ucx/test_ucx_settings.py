from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, PluginUnavailableError
from kvferry.transports import choices, registry
from kvferry.transports.choices import uses
from kvferry.transports.ucx import UcxTransport, context, effective_settings, library, rdma, rdma_remedy
from kvferry.transports.ucx.context import get_context
from kvferry.transports.ucx.settings import DEFAULTS, Options, context_config, parse_address


def test_options_of_an_address() -> None:
    address, options = parse_address(
        "ucx://h:1?tls=rc,tcp&net_devices=mlx5_0:1&require=rdma&inline=32KiB&spin=1ms"
    )
    assert address.host_port == "h:1"
    assert options == Options((("TLS", "rc,tcp"), ("NET_DEVICES", "mlx5_0:1")), "rdma", 32 << 10, 0.001)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("require=ib", "rdma, shm, tcp"),
        ("inline=1MiB", "8192 to 65536"),
        ("inline=0", "8192 to 65536"),
        ("spin=1s", "10ms"),
        ("spin=fast", "spin"),
        ("tsl=tcp", "tls"),
    ],
)
def test_bad_options_say_what_is_right(query: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_address(f"ucx://127.0.0.1:1?{query}")


def test_environment_comes_first_and_is_never_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """C121: documented precedence, nothing overwritten silently."""
    assert context_config(Options()) == dict(DEFAULTS)
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "64k")
    monkeypatch.setenv("UCX_TLS", "tcp")
    config = context_config(parse_address("ucx://127.0.0.1:1?tls=tcp&net_devices=lo")[1])
    assert config == {"NET_DEVICES": "lo", "TCP_RX_SEG_SIZE": "256k", "RNDV_THRESH": "8192"}
    for call in (UcxTransport().listen, lambda url: UcxTransport().connect(url, deadline_in(20))):
        with pytest.raises(ConfigError, match=r"tls=posix contradicts .* UCX_TLS=tcp; remove one"):
            call("ucx://127.0.0.1:1?tls=posix")


@pytest.mark.parametrize("value", ["0", "1k", "8191", "intra:64k,inter:4KB"])
def test_a_threshold_below_what_is_taken_to_be_copied_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("UCX_RNDV_THRESH", value)
    with pytest.raises(ConfigError, match=f"UCX_RNDV_THRESH={value}: kvferry needs 8192 or more"):
        context_config(Options())


@pytest.mark.parametrize("value", ["auto", "inf", "8k", "8192", "intra:64k,inter:8KB", "1m"])
def test_others_are_kept(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("UCX_RNDV_THRESH", value)
    assert "RNDV_THRESH" not in context_config(Options())


def test_effective_settings_say_who_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", "128k")
    monkeypatch.setenv("UCX_MAX_RNDV_RAILS", "1")
    report = effective_settings("ucx://127.0.0.1:1?tls=tcp")
    found = {setting.name: (setting.value, setting.source) for setting in report.settings}
    assert found["UCX_TLS"] == ("tcp", "address")
    assert found["UCX_TCP_RX_SEG_SIZE"] == ("128k", "environment")
    assert found["UCX_TCP_TX_SEG_SIZE"] == ("256k", "kvferry")
    assert found["UCX_MAX_RNDV_RAILS"] == ("1", "environment")
    assert found["UCX_NET_DEVICES"] == ("all", "UCX")
    assert {name for name, _ in report.transports} == {"tcp"}
    assert Path(report.path).name.startswith("libucp.so")
    assert report.version.count(".") == 2


def test_the_status_of_a_process_says_what_took_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """C121: what workers report; with whose word each is."""
    monkeypatch.setattr(context, "_contexts", {})
    monkeypatch.setattr(choices, "_uses", {})
    assert uses() == {}
    get_context(parse_address("ucx://127.0.0.1:1?tls=posix,cma")[1])
    monkeypatch.setenv("UCX_TLS", "tcp")
    for _ in range(2):
        get_context(Options())
    first, second = uses().values()
    assert re.match(r"UCX [0-9.]+ over .*posix/.*; .*UCX_TLS=posix,cma \(address\)", first)
    assert "UCX_TLS=tcp (environment)" in second
    assert "UCX_TCP_TX_SEG_SIZE=256k (kvferry)" in second


def test_rdma_that_is_not_there_is_asked_found_and_how_to_fix() -> None:
    """C119."""
    if rdma.rdma_devices():
        pytest.skip("this machine has RDMA")
    for url in ("ucx://127.0.0.1:1?require=rdma", "ucx://127.0.0.1:1?require=rdma&tls=tcp"):
        with pytest.raises(ConfigError) as caught:
            UcxTransport().connect(url, deadline_in(20))
        assert "asked for rdma" in str(caught.value)
        assert "tcp/lo" in str(caught.value)
        assert "install the NIC's driver" in str(caught.value)
    with pytest.raises(ConfigError, match=r"asked for shm .* told TLS=tcp \(by address\)"):
        UcxTransport().listen("ucx://127.0.0.1:0?require=shm&tls=tcp")


def test_remedies_for_rdma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "class" / "mlx5_0").mkdir(parents=True)
    (tmp_path / "nodes").mkdir()
    monkeypatch.setattr(rdma, "_DEVICES", tmp_path / "class")
    monkeypatch.setattr(rdma, "_NODES", tmp_path / "nodes")
    path = str(tmp_path / "libucp.so")
    assert "--device=" in rdma_remedy("all", "all", path)
    (tmp_path / "nodes" / "uverbs0").touch()
    assert "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY" in rdma_remedy("all", "all", path)
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx" / "libuct_ib.so").touch()
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    assert "rdma-core" in rdma_remedy("all", "all", path)
    monkeypatch.setattr("ctypes.util.find_library", lambda _: "libibverbs.so.1")
    assert "TLS=tcp" in rdma_remedy("tcp", "all", path)
    assert "UCX_LOG_LEVEL" in rdma_remedy("all", "all", path)


def test_transports_that_are_not_there(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError) as caught:
        UcxTransport().listen("ucx://127.0.0.1:0?tls=warp")
    assert "TLS=warp" in str(caught.value)
    assert "tcp (lo)" in str(caught.value)
    logged = [record for record in caplog.records if record.name == "kvferry.transports.ucx.library"]
    assert any("'warp' is not available" in record.getMessage() for record in logged)
    assert "warp" not in "".join(capfd.readouterr()), "UCX printed by itself"


@pytest.mark.parametrize("asked", ["nope", "lo,nope", "lo:1"])
def test_a_device_that_does_not_exist_is_refused_by_name(asked: str) -> None:
    with pytest.raises(ConfigError, match=f"has no device '{asked.removeprefix('lo,')}' here; it has .*lo"):
        UcxTransport().listen(f"ucx://127.0.0.1:0?net_devices={asked}")
    UcxTransport().listen("ucx://127.0.0.1:0?net_devices=lo&tls=posix,cma").close()


def test_contexts_are_shared() -> None:
    assert get_context(Options()) is get_context(Options(spin_s=0.0))
    assert get_context(Options()) is not get_context(Options((("TLS", "tcp"),)))


def test_loading_leaves_the_environment_alone_and_warns_of_nothing() -> None:
    code = (
        "import os; before = dict(os.environ)\n"
        "from kvferry.transports.ucx import UcxTransport, effective_settings\n"
        "import sys; assert not [m for m in sys.modules if m.startswith('ucxx')], 'loaded too early'\n"
        "effective_settings(); UcxTransport().listen('ucx://127.0.0.1:0').close()\n"
        "assert dict(os.environ) == before, set(os.environ) ^ set(before)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_ucxx_the_error_has_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    library._load.cache_clear()
    try:
        with pytest.raises(PluginUnavailableError, match=r"pip install 'kvferry\[ucx\]'"):
            library.library()
    finally:
        library._load.cache_clear()


def test_registry_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str) -> object:
        return None if name == "ucxx" else real(name)

    monkeypatch.delitem(sys.modules, "kvferry.transports.ucx.plugin", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    with pytest.raises(PluginUnavailableError, match=r"needs ucxx: pip install 'kvferry\[ucx\]'"):
        registry.load("ucx")
