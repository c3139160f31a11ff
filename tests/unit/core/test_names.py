"""Names are looked up by a deadline, whatever the system takes over it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.core import http_port, names
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, ConnectError, TierError, TransportError
from kvferry.core.http_port import HttpServer
from kvferry.core.names import MOST_LOOKUPS, connect_by, resolve
from kvferry.store.remote.mooncake.client import StoreClient
from kvferry.store.remote.mooncake.options import MooncakeOptions
from kvferry.transports import connect, diagnosis
from kvferry.transports.mooncake import engine

LONG_S = 30.0
SHORT_S = 0.05


class Hanging:
    """A name server that does not answer until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answered = threading.Event()
        self.asked: list[str] = []
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, port: int, **options: int) -> Any:
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            return self._real(host, port, **options)
        self.asked.append(host)
        assert self.answered.wait(LONG_S)
        return self._real("127.0.0.1", port, **options)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    one = Hanging(monkeypatch)
    yield one
    one.answered.set()
    until = deadline_in(LONG_S)
    while names._lookups.under_way and time.monotonic() < until:
        time.sleep(0.001)
    assert not names._lookups.under_way


@pytest.mark.parametrize("scheme", ["tcp", "tls", "auto", "ucx"])
def test_connect_keeps_its_deadline_where_a_name_server_does_not(hanging: Hanging, scheme: str) -> None:
    if scheme == "ucx":
        pytest.importorskip("ucxx")
        with pytest.raises(ConnectError):
            connect("ucx://127.0.0.1:1", deadline_in(LONG_S))  # loads it, which may take longer than SHORT_S
    with pytest.raises(ConnectError, match=r"by the deadline; check /etc/resolv.conf|the deadline passed"):
        connect(f"{scheme}://decode-1.cluster.internal:9", deadline_in(SHORT_S))


@pytest.mark.parametrize("scheme", ["http", "tcp"])
def test_doctor_keeps_it_too(hanging: Hanging, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "LISTEN_S", SHORT_S)
    _, _, probe = diagnosis.address_probe("x.listen", f"{scheme}://own-name.internal:9", listens=True)
    (found,) = probe()
    assert found.level == "fail"
    assert "'own-name.internal' could not be looked up: no name server answered" in found.value


def test_listening_for_http_keeps_it_too(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "_LOOKUP_S", SHORT_S)
    with pytest.raises(ConfigError, match=r"own-name\.internal:9: no name server answered"):
        HttpServer(
            "http://own-name.internal:9", "--x", name="test-http", default_port=0, trusted_network=True
        )


def test_mooncake_keeps_it_too(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither library is started: nobody knows then whom to let in."""
    monkeypatch.setattr(engine, "_LOOKUP_S", SHORT_S)
    with pytest.raises(TransportError, match=r"'own-name\.internal' could not be looked up: .*numeric"):
        engine.engine_of(engine.EngineSettings("own-name.internal", "tcp"))
    with socket.create_server(("127.0.0.1", 0)) as master:

        def answer() -> None:
            master.accept()[0].close()

        answering = threading.Thread(target=answer)
        answering.start()
        place = f"127.0.0.1:{master.getsockname()[1]}"
        client = StoreClient(MooncakeOptions(master=place, host="own-name.internal"))
        with pytest.raises(TierError, match=r"'own-name\.internal' of the tier could not .*numeric"):
            client.library(deadline_in(10 * SHORT_S))
        answering.join(LONG_S)


def test_who_asks_for_the_same_name_waits_for_the_same_answer(hanging: Hanging) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError):
            resolve("same", 9, deadline_in(SHORT_S))
    assert hanging.asked == ["same"]
    hanging.answered.set()
    assert resolve("same", 9, deadline_in(LONG_S)) == [(socket.AF_INET, ("127.0.0.1", 9))]


def test_no_more_names_are_looked_up_than_threads_may_hang(hanging: Hanging) -> None:
    for number in range(MOST_LOOKUPS):
        with pytest.raises(TimeoutError, match="by the deadline"):
            resolve(f"host-{number}", 9, deadline_in(0))
    with pytest.raises(TimeoutError, match=f"{MOST_LOOKUPS} names are being looked up"):
        resolve("one-more", 9, deadline_in(LONG_S))
    assert resolve("127.0.0.1", 9, deadline_in(0)) == [(socket.AF_INET, ("127.0.0.1", 9))]


def test_a_name_is_looked_up_again_where_no_thread_could_be_started(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    hanging.answered.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TimeoutError, match=r"can't start new thread; .*ulimit -u"):
            resolve("store.cluster.internal", 9, deadline_in(LONG_S))
    assert resolve("store.cluster.internal", 9, deadline_in(LONG_S))[0][1] == ("127.0.0.1", 9)


def test_what_the_system_says_of_a_name_comes_to_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(socket.gaierror, match="not known"):
        resolve("x", 9, deadline_in(LONG_S))


def test_connecting_by_a_deadline_closes_what_failed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with contextlib.closing(connect_by("localhost", port, deadline_in(LONG_S))) as sock:
            assert sock.getpeername()[1] == port
    with pytest.raises(ConnectionRefusedError):
        connect_by("127.0.0.1", port, deadline_in(LONG_S))
