"""The credentials file, what it refuses, and the commands that change it."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path

import msgspec
import pytest

from kvferry.cli.app import main
from kvferry.core.config import StoreConfig
from kvferry.core.errors import AuthError, ConfigError, KVFerryError, OverloadedError
from kvferry.core.token_file import token_source
from kvferry.daemon.credentials import (
    CredentialFile,
    Credentials,
    Limits,
    edited,
    new_credential,
    read_credentials,
)
from kvferry.daemon.quotas import Quota, quotas, tenant_store
from kvferry.daemon.rates import Meter

GIB, MIB = 1 << 30, 1 << 20


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    """What a command prints as JSON."""
    capsys.readouterr()
    assert run("credentials", *words, "--json") == 0, capsys.readouterr().err
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_token_is_known_by_its_hash_alone(tmp_path: Path) -> None:
    credential, token = new_credential("acme", ("read",))
    table = Credentials(CredentialFile(tenants={"acme": Limits()}, credentials=(credential,)))
    assert table.find(token.encode()) is credential
    other = new_credential("acme", ("read",))[1]
    secret = token[18:]
    wrong = [
        *(token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :] for at in range(len(token))),
        token[:-1] + ("A" if token[-1] != "A" else "B"),
        token[:18] + other[18:],
        other,
        token + "=",
        token.upper(),
        secret,
        "",
        "x" * 5000,
        credential.hash,
    ]
    for shown in wrong:
        with pytest.raises(AuthError) as caught:
            table.find(shown.encode())
        assert not shown or shown not in str(caught.value)
    with pytest.raises(AuthError, match="KVFERRY_TOKEN_FILE"):
        table.find(None)
    path = tmp_path / "c.json"
    with edited(path) as box:
        box[0] = CredentialFile(tenants={"acme": Limits()}, credentials=(credential,))
    assert secret not in path.read_text()
    assert credential.hash not in repr(credential)
    assert credential.salt not in repr(credential)


def test_an_end_is_kept() -> None:
    credential, token = new_credential("a", ("read",), expires_at=time.time() - 1)
    with pytest.raises(AuthError, match="not valid"):
        Credentials(CredentialFile(tenants={"a": Limits()}, credentials=(credential,))).find(token.encode())


def good() -> dict[str, object]:
    credential, _ = new_credential("a", ("read", "write"))
    file = CredentialFile(tenants={"a": Limits()}, credentials=(credential,))
    found: dict[str, object] = msgspec.to_builtins(file)
    return found


def one(**changes: object) -> dict[str, object]:
    found = good()
    credentials = found["credentials"]
    assert isinstance(credentials, tuple)
    return found | {"credentials": [credentials[0] | changes]}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (good() | {"version": 2}, "version"),
        (good() | {"tenant": {}}, "tenant"),
        (good() | {"tenants": {}}, "'a', which is not in tenants"),
        (good() | {"tenants": {"a": {"dram": 5}}}, "dram"),
        (good() | {"tenants": {"a": {}, "x" * 200: {}}}, "120 bytes"),
        (good() | {"tenants": {"a": {}, "b\n": {}}}, "printed"),
        (good() | {"tenants": {"a": {}} | {f"t{n}": {} for n in range(64)}}, "at most 64"),
        (one(rights=[]), "needs rights"),
        (one(rights=["read", "read"]), "needs rights"),
        (one(rights=["root"]), "root"),
        (one(hash="00"), "hash"),
        (one(token="kvf1"), "token"),
        ([], "object"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: object, named: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(content))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=named) as caught:
        read_credentials(path)
    assert str(path) in str(caught.value)


def test_a_file_that_others_may_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(good()))
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_credentials(path)
    with pytest.raises(ConfigError, match="kvferry credentials add"):
        read_credentials(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="only its owner"):
        read_credentials(tmp_path)


def test_it_is_whole_whoever_writes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.json"

    def add(number: int) -> None:
        for step in range(5):
            with edited(path) as box:
                tenants = {**box[0].tenants, f"t{number}-{step}": Limits()}
                box[0] = msgspec.structs.replace(box[0], tenants=tenants)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(read_credentials(path).tenants) == 20
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def fail() -> None:
        with edited(path) as box:
            box[0] = CredentialFile()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert len(read_credentials(path).tenants) == 20
    assert sorted(os.listdir(tmp_path)) == [".c.json.lock", "c.json"]  # noqa: PTH208


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "c.json")
    made = told(
        capsys, "add", "acme", "--dram", "2GiB", "--rate", "500MB/s", "--note", "engine", "--file", path
    )
    token = str(made["token"])
    assert made["rights"] == ["read", "write"]
    out = tmp_path / "reader.token"
    reader = told(capsys, "add", "acme", "--right", "read", "--out", str(out), "--file", path)
    assert "token" not in reader
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    file = read_credentials(Path(path))
    assert run("credentials", "add", "acme", "--out", str(out), "--file", path) == 2
    assert read_credentials(Path(path)) == file, "nothing is written over, and no token made for nobody"
    assert file.tenants["acme"] == Limits(dram=2 * GIB, rate=5e8)
    table = Credentials(file)
    assert table.find(token.encode()).rights == ("read", "write")
    assert table.find(out.read_text().strip().encode()).rights == ("read",)

    old = str(made["id"])
    new = told(capsys, "rotate", old, "--keep", "1h", "--file", path)
    table = Credentials(read_credentials(Path(path)))
    assert table.find(token.encode()).id == old
    assert table.find(str(new["token"]).encode()).note == "engine"
    told(capsys, "rotate", str(new["id"]), "--file", path)
    told(capsys, "remove", old, "--file", path)
    table = Credentials(read_credentials(Path(path)))
    for gone in (token, str(new["token"])):
        with pytest.raises(AuthError):
            table.find(gone.encode())

    limits = told(
        capsys, "limit", "acme", "--dram", "none", "--requests", "200", "--connections", "9", "--file", path
    )
    wanted = {"dram": None, "disk": None, "rate": 5e8, "requests": 200.0, "connections": 9}
    assert limits == {"tenant": "acme", **wanted}
    assert run("credentials", "list", "--file", path) == 0
    shown = capsys.readouterr().out
    assert "acme" in shown
    assert "kvf1" not in shown
    listed = told(capsys, "list", "--file", path)
    assert not {"hash", "salt", "token"} & set(str(listed).replace("'", " ").split())
    told(capsys, "remove", "--tenant", "acme", "--file", path)
    assert read_credentials(Path(path)) == CredentialFile()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["add", "x", "--right", "root"], "read, write, admin"),
        (["add", "x" * 200], "120 bytes"),
        (["add", "x", "--dram", "1KiB"], r"--dram 1KiB: expected `int` >= 1048576"),
        (["add", "x", "--connections", "0"], r"--connections 0: expected `int` >= 1"),
        (["add", "x", "--requests", "many"], "many"),
        (["rotate", "0" * 12], "there is no credential"),
        (["remove", "--tenant", "x"], "there is no tenant"),
        (["remove"], "--tenant NAME"),
        (["limit", "x"], "there is no tenant"),
        (["list"], "cannot be read"),
    ],
)
def test_commands_refuse_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert run("credentials", *words, "--file", str(tmp_path / "c.json")) == 2
    assert named in capsys.readouterr().err


def test_a_token_is_written_over_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "there"
    out.touch()
    assert run("credentials", "add", "x", "--out", str(out), "--file", str(tmp_path / "c.json")) == 2
    assert "remove it, or name another file" in capsys.readouterr().err
    assert not out.read_bytes()


def test_without_a_file_the_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("credentials", "list") == 2
    assert "daemon.credentials" in capsys.readouterr().err


# ---- shares and rates --------------------------------------------------------------------------------------


def store(**changes: object) -> StoreConfig:
    tiers = ["disk:/cache?capacity=3GiB", "disk:/slow?capacity=1GiB&name=slow"]
    return StoreConfig.model_validate({"dram_capacity": "1GiB", "tiers": tiers, **changes})


def test_quotas_are_kept_and_the_rest_is_shared() -> None:
    found = quotas(store(), {"a": Limits(dram=512 * MIB), "b": Limits(), "c": Limits(disk=2 * GIB)})
    assert found == {
        "a": Quota(512 * MIB, GIB), "b": Quota(256 * MIB, GIB), "c": Quota(256 * MIB, 2 * GIB)
    }  # fmt: skip
    own = tenant_store(store(write_quota="600MiB"), "Ä", found["c"])
    assert (own.dram_capacity, own.write_quota) == (256 * MIB, 256 * MIB)
    assert [tier.options for tier in own.tiers] == [
        {"directories": ["/cache/tenants.d/=c384"], "capacity": 3 * GIB // 2},
        {"directories": ["/slow/tenants.d/=c384"], "capacity": GIB // 2},
    ]


def test_more_than_there_is_is_refused_with_figures() -> None:
    with pytest.raises(ConfigError, match=r"2 GiB.*store\.dram_capacity.*1 GiB"):
        quotas(store(), {"a": Limits(dram=GIB), "b": Limits(dram=GIB)})
    with pytest.raises(ConfigError, match="'b': no quota of memory"):
        quotas(store(), {"a": Limits(dram=GIB), "b": Limits()})
    with pytest.raises(ConfigError, match="disk"):
        quotas(store(), {"a": Limits(disk=5 * GIB)})


def test_a_meter_lets_a_seconds_worth_through_and_then_the_rate() -> None:
    now = [0.0]
    meter = Meter(None, 10, clock=lambda: now[0])
    for _ in range(10):
        meter.admit()
    with pytest.raises(OverloadedError, match="10 requests a second"):
        meter.admit()
    now[0] += 0.1
    meter.admit()
    with pytest.raises(OverloadedError):
        meter.admit()
    now[0] += 100
    for _ in range(10):
        meter.admit()
    with pytest.raises(OverloadedError):
        meter.admit()


def test_bytes_beyond_the_rate_are_made_good() -> None:
    now = [0.0]
    meter = Meter(1000, None, clock=lambda: now[0])
    meter.admit()
    meter.spend(3000)
    now[0] += 1.9
    with pytest.raises(OverloadedError, match="1000 bytes a second"):
        meter.admit()
    now[0] += 0.2
    meter.admit()
    meter.set(None, None)
    meter.spend(1 << 40)
    meter.admit()


# ---- what a client shows -----------------------------------------------------------------------------------


def test_a_token_comes_from_its_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVFERRY_TOKEN", "KVFERRY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert token_source(None) is None
    monkeypatch.setenv("KVFERRY_TOKEN", "kvf1_in_the_environment")
    shown = token_source(None)
    assert shown is not None
    assert shown() == b"kvf1_in_the_environment"
    path = tmp_path / "token"
    path.write_text("kvf1_in_a_file_of_its_own\n")
    path.chmod(0o600)
    monkeypatch.setenv("KVFERRY_TOKEN_FILE", str(path))
    shown = token_source(None)
    assert shown is not None
    assert shown() == b"kvf1_in_a_file_of_its_own"
    path.write_text("kvf1_in_a_file_that_changed\n")
    assert shown() == b"kvf1_in_a_file_that_changed"
    path.chmod(0o644)
    with pytest.raises(KVFerryError, match="chmod 600"):
        shown()
