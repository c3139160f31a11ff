"""Admin requests: who may, what they do, and what the log has of them."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import msgspec
import pytest

from kvferry.cli.app import main
from kvferry.cli.daemon_http import Port
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, RequestError, UnavailableError
from kvferry.core.keys import BlockKey
from kvferry.daemon.admin import VERBS, Clear, Drain, Evict, Pin, Reload
from kvferry.daemon.token import AdminToken, read_token, token_path
from kvferry.testing.blocks import save_blocks, small_spec, wait_until

from .conftest import Running

SPEC = small_spec("admin")


@pytest.fixture
def admin(running: Running, tmp_path: Path) -> Port:
    return Port(running.http.url, str(tmp_path / "token"))


def saved(running: Running, token: int = 1, blocks: int = 8) -> list[BlockKey]:
    ns = running.client.namespace(SPEC)
    keys = ns.keys([token] * blocks * SPEC.block_tokens)
    save_blocks(ns, keys)
    return keys


@pytest.mark.parametrize(
    "header", [None, "Bearer ", "Bearer wrong", "Basic correct-horse-battery", "Bearer correct-horse-batterY"]
)
def test_nobody_changes_anything_without_the_token(
    running: Running, header: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    saved(running)
    with pytest.raises(RequestError, match="401"):
        running.port.ask("POST", "/admin/clear", b"{}", {} if header is None else {"authorization": header})
    assert running.port.status().tenants[0].entries == 8
    assert not any(word in caplog.text for word in ("correct-horse", "Bearer", "wrong"))


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_is_done_without_the_token(running: Running, verb: str) -> None:
    for given in ({}, {"authorization": "Bearer wrong"}):
        with pytest.raises(RequestError, match="401"):
            running.port.ask("POST", f"/admin/{verb}", b"{}", given)


def test_the_port_has_these_paths_and_no_others(running: Running) -> None:
    """C128."""
    routes = running.http.routes()
    posts = {route.path for route in routes if route.methods == {"POST"}}
    assert {route.path for route in routes} - posts == {
        "/", "/live", "/ready", "/status", "/metrics", "/events"
    }  # fmt: skip
    assert posts == {f"/admin/{verb}" for verb in ("clear", "pin", "evict", "drain", "reload")}


@pytest.mark.parametrize("verb", VERBS)
def test_c128_no_verb_evaluates_what_is_posted(running: Running, verb: str, tmp_path: Path) -> None:
    saved(running)
    shown = {"authorization": f"Bearer {running.token}"}
    code = f"__import__('pathlib').Path('{tmp_path}/marker').touch()"
    for body in (
        code.encode(),
        msgspec.json.encode(code),
        msgspec.json.encode({"script": code, "model": code}),
    ):
        with pytest.raises(RequestError, match="400"):
            running.port.ask("POST", f"/admin/{verb}", body, shown)
    with pytest.raises(RequestError, match="404"):
        running.port.ask("POST", "/admin/run_script", code.encode(), shown)
    assert not (tmp_path / "marker").exists()
    assert running.port.status().tenants[0].entries == 8
    assert not running.daemon.draining


def test_clear_forgets_in_all_tiers(running: Running, admin: Port) -> None:
    keys = saved(running)
    assert running.client.flush(deadline=deadline_in(20))
    namespace = running.port.status().tenants[0].namespaces[0].namespace
    assert admin.admin("clear", Clear(namespace=namespace)).blocks == 8
    assert not running.client.namespace(SPEC).lookup(keys).prefix
    saved(running, 2)
    assert admin.admin("clear", Clear()).blocks == 8
    with pytest.raises(RequestError, match=r"no namespace 0000.*there are:.*\(admin\)"):
        admin.admin("clear", Clear(namespace="0" * 64))
    with pytest.raises(RequestError, match="no tenant 'other'"):
        admin.admin("clear", Clear(tenant="other"))
    saved(running, 3)
    with pytest.raises(RequestError, match="no tenant ''"):  # a variable of a shell that is not set
        admin.admin("clear", Clear(tenant=""))
    assert running.port.status().tenants[0].entries == 8


def test_pinned_blocks_outlive_an_eviction_of_all(running: Running, admin: Port) -> None:
    pinned, others = saved(running), saved(running, 2)
    assert running.client.flush(deadline=deadline_in(20))
    namespace = running.port.status().tenants[0].namespaces[0].namespace
    done = admin.admin("pin", Pin(namespace=namespace, keys=tuple(key.hex() for key in pinned)))
    assert (done.done, done.blocks) == (True, 8)
    assert not admin.admin("evict", Evict(nbytes=1 << 40)).done
    ns = running.client.namespace(SPEC)
    assert set(ns.lookup(pinned).tiers) == {"dram"}
    assert set(ns.lookup(others).tiers) == {"disk"}


def test_drain_and_back(running: Running, admin: Port) -> None:
    assert admin.admin("drain", Drain()).done
    with pytest.raises(UnavailableError, match="draining"):
        saved(running)
    assert admin.admin("drain", Drain(resume=True)).done
    saved(running)


def test_reload_takes_another_token_and_keeps_the_old_one_if_it_is_wrong(
    running: Running, admin: Port, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.write_text(running.token)
    old.chmod(0o600)
    (tmp_path / "token").write_text("short")
    with pytest.raises(RequestError, match="16 to"):
        Port(running.http.url, str(old)).admin("reload", Reload())
    (tmp_path / "token").write_text("another-token-of-mine")
    assert Port(running.http.url, str(old)).admin("reload", Reload()).done
    assert admin.admin("evict", Evict(nbytes=1)).blocks == 0
    with pytest.raises(RequestError, match="401"):
        Port(running.http.url, str(old)).admin("reload", Reload())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"nbytes": 0}', b'{"nbytes": 1, "x": 2}', b"\xff" * 100]
)
def test_wrong_bodies_are_refused(running: Running, body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    headers = {"authorization": f"Bearer {running.token}"}
    with pytest.raises(RequestError, match="400"):
        running.port.ask("POST", "/admin/evict", body, headers)
    with pytest.raises(RequestError, match="413"):
        running.port.ask("POST", "/admin/evict", b" " * (2 << 20), headers)
    assert not caplog.records


def test_tokens_that_others_may_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("x" * 20)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token(path)
    path.chmod(0o600)
    assert AdminToken(str(path)).matches("x" * 20)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="must be a file"):
        read_token(tmp_path / "pipe")


def test_a_token_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert AdminToken("auto").given
    path = token_path("auto")
    assert path is not None
    token = read_token(path)
    assert AdminToken("auto").matches(token)
    assert not AdminToken("none").given
    assert not AdminToken("none").matches("")


def test_the_admin_log_names_verb_and_peer(
    running: Running, admin: Port, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    admin.admin("evict", Evict(nbytes=1))
    wait_until(lambda: "admin: evict is asked for by 127.0.0.1" in caplog.text)
    assert running.token not in caplog.text
    assert running.token not in json.dumps(running.port.ask("GET", "/status").decode())


def test_the_commands_do_it_and_say_so(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = saved(running)
    assert running.client.flush(deadline=deadline_in(20))
    namespace = running.port.status().tenants[0].namespaces[0].namespace
    where = ["--url", running.http.url, "--token-file", str(tmp_path / "token")]

    def kvferry(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, *where])
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().out

    assert kvferry("pin", keys[0].hex(), "--namespace", namespace, "--ttl", "2h") == (
        0,
        "1 of 1 blocks are pinned\n",
    )
    code, out = kvferry("pin", "0" * 64, "--namespace", namespace, "--json")
    assert (code, json.loads(out)["blocks"]) == (1, 0)
    code, out = kvferry("evict", "1KiB", "--json")
    assert (code, json.loads(out)["done"]) == (0, True)
    assert kvferry("clear", "--namespace", namespace) == (0, "8 blocks of 1 namespace were removed\n")
    assert kvferry("drain", "--timeout", "1s")[0] == 0
    assert kvferry("drain", "--resume") == (0, "it takes new work again\n")
    assert kvferry("reload") == (0, "the token was read again\n")


def test_a_token_file_of_the_command_line_is_from_the_folder_it_is_given_in(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["reload", "--url", running.http.url, "--token-file", "token"])
    assert ended.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "body", "told"),
    [
        ("clear", b"", "clear has no body: send a JSON object"),
        ("clear", b'{"namespace": "zz"}', "namespace of clear must be an id of 64 digits"),
        ("pin", b'{"namespace": "00000000", "keys": ["zz"]}', "keys of pin must be at most 4096 keys of 64"),
        ("pin", b'{"ttl_s": 0}', "ttl_s of pin must be seconds, above 0 and at most 604800"),
        ("evict", b'{"nbytes": "1MiB"}', "nbytes of evict must be a number of bytes"),
        ("drain", b'{"timeout_s": 60}', "timeout_s of drain must be seconds, from 0 to 10"),
        ("drain", b'{"resume": 1}', "resume of drain must be true or false"),
        ("clear", b'{"tenant": 1}', "tenant of clear must be a tenant's name"),
        ("clear", b'{"model": ""}', "model of clear must be MODEL"),
        ("clear", b'{"x": 1}', "unknown field `x`"),
    ],
)
def test_a_body_that_is_not_taken_is_told_what_it_must_be(
    running: Running, verb: str, body: bytes, told: str
) -> None:
    shown = {"authorization": f"Bearer {running.token}"}
    with pytest.raises(RequestError, match=told):
        running.port.ask("POST", f"/admin/{verb}", body, shown)


def test_evict_says_why_it_evicts_less(running: Running, admin: Port) -> None:
    keys = saved(running)
    assert running.client.flush(deadline=deadline_in(20))
    with running.client.namespace(SPEC).load(keys, deadline=deadline_in(20)):
        done = admin.admin("evict", Evict(nbytes=1))
    assert not done.done
    assert done.text == (
        "0 bytes go from memory, of 1 asked for: nothing else is there that is neither leased nor pinned"
    )
