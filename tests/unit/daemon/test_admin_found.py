"""``clear`` and ``pin`` of namespaces that lie on disk from before the start, as inspect names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from kvferry.cli.app import main
from kvferry.cli.daemon_http import Port
from kvferry.core.clock import deadline_in
from kvferry.core.errors import RequestError
from kvferry.core.keys import BlockKey
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.daemon.admin import Clear, Evict, Pin
from kvferry.daemon.http import DaemonHttp
from kvferry.daemon.tenants import Tenants
from kvferry.store.disk.options import DiskOptions
from kvferry.store.disk.tier import DiskTier
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import save_blocks, small_spec

from .conftest import Running, Site

PLAIN, SALTED, OTHER = small_spec("plain"), small_spec("salted"), small_spec("other")
SCOPES = {PLAIN: KeyScope(), SALTED: KeyScope(adapter="style", salt=b"secret"), OTHER: KeyScope()}


class Before(NamedTuple):
    """What lay on disk at the start: ids and keys by model."""

    ids: dict[str, str]
    keys: dict[str, list[BlockKey]]


def store_before(folder: Path, tenant: str = "default") -> Before:
    tier = DiskTier("disk", DiskOptions(directories=(str(folder),), capacity_nbytes=16 << 20))
    store, ids, keys = TieredStore(1 << 20, [tier], tenant=tenant), dict[str, str](), {}
    for spec, scope in SCOPES.items():
        ns = store.namespace(spec, scope)
        ids[spec.model], keys[spec.model] = ns.namespace_id.hex(), ns.keys([7] * 6 * spec.block_tokens)
        save_blocks(ns, keys[spec.model])
    assert store.flush(deadline=deadline_in(20))
    store.close()
    return Before(ids, keys)


@pytest.fixture
def before(tmp_path: Path) -> Before:
    return store_before(tmp_path / "disk")


@pytest.fixture
def admin(before: Before, running: Running, tmp_path: Path) -> Port:
    del before  # first
    return Port(running.http.url, str(tmp_path / "token"))


def entries(running: Running) -> int:
    return int(running.daemon.store_of("default").stats().per_tier["disk"]["entries"])


@pytest.mark.parametrize("spec", [PLAIN, SALTED], ids=["plain", "salted"])
def test_clear_of_one_by_the_start_of_its_id(
    before: Before, running: Running, admin: Port, spec: KVSpec
) -> None:
    model = spec.model
    assert admin.admin("clear", Clear(namespace=before.ids[model][:12])).blocks == 6
    assert entries(running) == 12
    assert admin.admin("clear", Clear(namespace=before.ids[model])).blocks == 0
    for one, scope in SCOPES.items():  # used only now: the salt, and what was not cleared, are as they were
        ns = running.client.namespace(one, scope)
        assert ns.lookup(before.keys[one.model]).prefix == (0 if one.model == model else 6)
        save_blocks(ns, before.keys[one.model])
        with ns.load(before.keys[one.model], deadline=deadline_in(20)) as lease:
            assert len(lease) == 6


def test_clear_by_model_and_of_all(before: Before, running: Running, admin: Port) -> None:
    for wrong in (Clear(model="plain@r2"), Clear(model="pla"), Clear(namespace="0" * 64)):
        with pytest.raises(
            RequestError,
            match=rf"no namespace (of model pla|0000).*there are: .*{before.ids['salted'][:12]} \(salted\)",
        ):
            admin.admin("clear", wrong)
    with pytest.raises(RequestError, match="400"):
        admin.admin("clear", Clear(namespace="0" * 7))
    assert entries(running) == 18
    assert admin.admin("clear", Clear(model="plain@r")).blocks == 6
    done = admin.admin("clear", Clear())
    assert (done.blocks, done.text) == (12, "12 blocks of 3 namespaces were removed")
    assert entries(running) == 0


def test_pins_hold_on_disk(before: Before, running: Running, admin: Port) -> None:
    first = tuple(key.hex() for key in before.keys["plain"][:2])
    assert admin.admin("pin", Pin(namespace=before.ids["plain"][:8], keys=first)).blocks == 2
    done = admin.admin("pin", Pin(model="salted"))
    assert (done.done, done.blocks) == (True, 6)
    with pytest.raises(RequestError, match="namespace or a model"):
        admin.admin("pin", Pin())
    disk = running.daemon.store_of("default").levels[0].tier
    assert isinstance(disk, DiskTier)
    while victims := disk._state.index.evict(1):
        for victim in victims:
            disk._state.remove(victim)
    assert entries(running) == 8
    admin.admin("evict", Evict(nbytes=1 << 30))
    assert running.client.namespace(PLAIN).lookup(before.keys["plain"]).prefix == 2
    assert running.client.namespace(SALTED, SCOPES[SALTED]).lookup(before.keys["salted"]).prefix == 6


def test_only_those_of_the_tenant(site: Site) -> None:
    """Two tenants with the same namespaces on disk: one's admin names only his own."""
    disk = site.folder / "disk"
    ids = store_before(disk / "tenants.d" / "a", "a").ids
    store_before(disk / "tenants.d" / "b", "b")
    token = site.token("a", "admin")
    site.tenant("b")
    own = site.folder / "operator"
    own.write_text("operator-s-own-token")
    shown = site.folder / "shown"
    shown.write_bytes(token)
    for path in (own, shown):
        path.chmod(0o600)
    daemon = site.start(f"daemon.token_file={own}", f"daemon.disk={disk}", "daemon.disk_capacity=32MiB")
    http = DaemonHttp(daemon, "http://127.0.0.1:0")
    http.start()
    site.stack.callback(http.close)
    tenants: Tenants = daemon.tenants
    port = Port(http.url, str(shown))
    with pytest.raises(RequestError, match="no tenant 'b'"):
        port.admin("clear", Clear(tenant="b", namespace=ids["plain"]))
    assert port.admin("clear", Clear(namespace=ids["plain"])).blocks == 6
    left = {name: one.store.stats().per_tier["disk"]["entries"] for name, one in tenants.all.items()}
    assert left == {"a": 12, "b": 18}
    before = tenants.all["a"].store.stats().per_tier["disk"]["used_nbytes"]
    assert port.admin("clear", Clear()).blocks == 12
    assert tenants.all["a"].store.stats().per_tier["disk"]["used_nbytes"] < before


def test_the_commands(
    before: Before, running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--url", running.http.url, "--token-file", str(tmp_path / "token"), "--json"]

    def kvferry(*words: str) -> dict[str, object]:
        with pytest.raises(SystemExit) as ended:
            main([*words, *where])
        assert not ended.value.code
        found = json.loads(capsys.readouterr().out)
        assert isinstance(found, dict)
        return found

    assert kvferry("pin", "--namespace", before.ids["salted"][:12])["blocks"] == 6
    assert kvferry("clear", "--model", "other")["blocks"] == 6
    assert kvferry("clear")["blocks"] == 12
