"""The HTTP port of a daemon with credentials: what the operator sees and may, and what a tenant's admin."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest

from kvferry.cli.app import main
from kvferry.cli.daemon_http import Port
from kvferry.core.errors import (
    RequestError,
)
from kvferry.daemon.admin import Clear, Drain, Evict, Pin, Reload
from kvferry.daemon.http import DaemonHttp
from kvferry.testing.blocks import save_blocks, small_spec

from .conftest import Site

SPEC = small_spec("tenants")


@pytest.fixture
def ports(site: Site) -> Iterator[Callable[[bytes | None], Port]]:
    """Ports as who shows a token sees them; the operator's is ``operator-s-own-token``."""
    site.tenant("a")
    site.tenant("b")
    own = site.folder / "operator"
    own.write_text("operator-s-own-token")
    own.chmod(0o600)
    daemon = site.start(f"daemon.token_file={own}")
    with closing(DaemonHttp(daemon, "http://127.0.0.1:0")) as http:
        http.start()

        def port(token: bytes | None) -> Port:
            if token is None:
                return Port(http.url)
            path = site.folder / f"shown-{token[:20].decode()}"
            path.write_bytes(token)
            path.chmod(0o600)
            daemon.tenants.reload()
            return Port(http.url, str(path))

        yield port


def _shown(capsys: pytest.CaptureFixture[str], port: Port) -> str:
    """What ``kvferry status`` shows people."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["status", "--url", port.url, "--token-file", port._token_file])
    assert not caught.value.code
    return capsys.readouterr().out


def test_the_port_shows_a_tenant_nothing_of_others(
    site: Site,
    ports: Callable[[bytes | None], Port],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    admin, plain = site.token("a", "read", "admin"), site.token("a")
    writers = {name: site.token(name) for name in ("a", "b")}
    operator = ports(b"operator-s-own-token")
    clients = {name: site.client(token, session=f"of-{name}") for name, token in writers.items()}
    for client in clients.values():
        save_blocks(client.namespace(SPEC), client.namespace(SPEC).keys(range(32)))
    logging.getLogger("kvferry.daemon").warning("something about tenant b")
    assert ports(None).ask("GET", "/live")
    for path in ("/status", "/metrics", "/events"):
        for nobody in (ports(None), ports(plain)):
            shown = {} if nobody is ports(None) else {"authorization": f"Bearer {plain.decode()}"}
            with pytest.raises(RequestError, match="401"):
                nobody.ask("GET", path, headers=shown)
    caplog.clear()
    assert {one.name for one in operator.status().tenants} == {"a", "b"}
    assert "shows no valid token" not in caplog.text, "the command asks without a token first"
    assert b"of-b" not in operator.ask("GET", "/metrics", headers=operator._authorization())
    assert _shown(capsys, ports(b"operator-s-own-token")).count("tenant") > 1
    own = ports(admin).status()
    assert [one.name for one in own.tenants] == ["a"]
    assert [one.session for one in own.clients] == ["of-a"]
    assert not own.faults
    assert not own.operations
    assert "of-b" not in str(own)
    his = _shown(capsys, ports(admin))
    assert not [word for word in ("resident", "of CPU", "under way", "were refused") if word in his], his
    header = {"authorization": f"Bearer {admin.decode()}"}
    with pytest.raises(RequestError, match="403"):
        ports(None).ask("GET", "/metrics", headers=header)
    with pytest.raises(RequestError, match="no tenant 'b'"):
        ports(None).ask("GET", "/events?tenant=b", headers=header)
    address = operator.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("GET", "/events", headers=header)
    answer = connection.getresponse()
    assert b'"tenant":"a"' in answer.readline()
    site.revoke(admin)
    ports(b"operator-s-own-token")  # reloads
    assert b"stored" not in answer.read(), "a stream ends with its token"
    connection.close()


def test_an_admin_changes_its_own_tenant_alone(site: Site, ports: Callable[[bytes | None], Port]) -> None:
    admin, writer = site.token("a", "admin"), site.token("b")
    port = ports(admin)
    his = site.client(writer).namespace(SPEC)
    keys = his.keys(range(32))
    save_blocks(his, keys)
    namespace, hexes = his.namespace_id.hex(), tuple(key.hex() for key in keys)
    for verb, request in (
        ("clear", Clear(tenant="b")),
        ("pin", Pin(tenant="b", namespace=namespace, keys=hexes)),
        ("evict", Evict(tenant="b", nbytes=1)),
    ):
        with pytest.raises(RequestError, match="no tenant 'b'"):
            port.admin(verb, request)
        with pytest.raises(RequestError, match="no tenant 'nobody'"):  # as one that is not there
            port.admin(verb, msgspec.structs.replace(request, tenant="nobody"))
    for verb, whole in (("drain", Drain()), ("reload", Reload())):
        with pytest.raises(RequestError, match="403"):
            port.admin(verb, whole)
    assert port.admin("clear", Clear()).blocks == 0
    assert his.lookup(keys).prefix == len(keys)
    operator = ports(b"operator-s-own-token")
    assert "credentials of 2 tenants" in operator.admin("reload", Reload()).text
    assert operator.admin("clear", Clear(tenant="b")).blocks == len(keys)
    with pytest.raises(RequestError, match=r"no tenant 'default'; name one with --tenant .*: a, b$"):
        operator.admin("clear", Clear())
    with pytest.raises(RequestError, match=r"no tenant 'c'; .*: a, b$"):
        operator.ask("GET", "/events?tenant=c", headers={"authorization": "Bearer operator-s-own-token"})
    with pytest.raises(RequestError, match=r"no tenant 'b'; this token is of a$"):
        port.admin("clear", Clear(tenant="b"))
