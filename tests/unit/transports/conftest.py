"""Certificates, the two ends of a TLS connection, and of one over TCP that hashes."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.transports import connect, listen
from kvferry.transports.base import Connection, Listener
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.tls_connection import TlsConnection

LONG_S = 30.0
DAY = dt.timedelta(days=1)


class Files(NamedTuple):
    folder: Path

    def query(self, cert: str = "good", ca: str = "ca", **more: str) -> str:
        options = {"ca": f"{ca}.pem"} | ({"cert": f"{cert}.pem", "key": f"{cert}.key"} if cert else {}) | more
        paths = {n: v if n == "server_name" else str(self.folder / v) for n, v in options.items() if v}
        return "&".join(f"{name}={value}" for name, value in paths.items())

    def listen_url(self, cert: str = "good", **more: str) -> str:
        return f"tls://127.0.0.1:0?{self.query(cert, **more)}"

    def dial_url(self, listener: Listener, **options: str) -> str:
        host_port = parse_url(listener.address).host_port
        return f"tls://{host_port}?{self.query(**{'cert': '', **options})}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    kind = trustme.KeyType.ECDSA
    ca, other_ca = trustme.CA(key_type=kind), trustme.CA(key_type=kind)
    ca.cert_pem.write_to_path(folder / "ca.pem")
    other_ca.cert_pem.write_to_path(folder / "other_ca.pem")
    now = dt.datetime.now(dt.timezone.utc)

    def issue(name: str, by: trustme.CA, *identities: str, valid: tuple[int, int] = (-1, 9)) -> None:
        first, last = (now + DAY * days for days in valid)
        made = by.issue_cert(*identities, key_type=kind, not_before=first, not_after=last)
        (folder / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(folder / f"{name}.key")

    issue("good", ca, "127.0.0.1", "localhost")
    issue("client", ca, "client.example")
    issue("stranger", other_ca, "127.0.0.1")
    issue("elsewhere", ca, "elsewhere.example")
    issue("expired", ca, "127.0.0.1", valid=(-9, -1))
    issue("early", ca, "127.0.0.1", valid=(1, 9))
    key = load_pem_private_key((folder / "good.key").read_bytes(), None)
    (folder / "locked.key").write_bytes(
        key.private_bytes(
            Encoding.PEM, PrivateFormat.TraditionalOpenSSL, BestAvailableEncryption(b"a password")
        )
    )
    (folder / "empty.pem").write_text("nothing here\n")
    return Files(folder)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture
def listener(files: Files) -> Iterator[Listener]:
    with contextlib.closing(listen(files.listen_url())) as made:
        yield made


def soon() -> float:
    return deadline_in(LONG_S)


def received(end: Connection, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    end.recv_into([memoryview(data)], soon())
    return bytes(data)


def host_port(listener: Listener) -> tuple[str, int]:
    address = parse_url(listener.address)
    assert address.port is not None
    return address.host, address.port


@contextlib.contextmanager
def ends(listener: Listener, url: str = "") -> Iterator[tuple[TlsConnection, TlsConnection]]:
    with (
        contextlib.closing(connect(url or listener.address, soon())) as one,
        contextlib.closing(listener.accept(soon())) as other,
    ):
        assert isinstance(one, TlsConnection)
        assert isinstance(other, TlsConnection)
        yield one, other


@pytest.fixture
def hashed_tcp() -> Iterator[tuple[HashedSocketConnection, HashedSocketConnection]]:
    """Two ends over TCP, which hash what they move."""
    with contextlib.ExitStack() as stack:
        listener = listen("tcp://127.0.0.1:0")
        one = connect(listener.address, deadline_in(20))
        stack.callback(one.abort)
        other = listener.accept(deadline_in(20))
        stack.callback(other.abort)
        listener.close()
        assert isinstance(one, HashedSocketConnection)
        assert isinstance(other, HashedSocketConnection)
        yield one, other
