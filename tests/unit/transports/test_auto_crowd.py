"""Those who sit silent on the port of ``auto`` do not keep out those who speak."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.transports import get_transport
from kvferry.transports.auto import AutoListener, listener, port, side
from kvferry.transports.auto.connection import AutoConnection

LONG_S = 30.0
PLACES = 4


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(listener, "_MAX_READY", PLACES)
    monkeypatch.setattr(port, "_SAY_S", 0.01)
    monkeypatch.setattr(side, "_MAX_SILENT", PLACES)


def _until(condition: Callable[[], bool]) -> None:
    limit = deadline_in(LONG_S)
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def _listen(stack: contextlib.ExitStack) -> AutoListener:
    made = get_transport("auto").listen("auto://127.0.0.1:0")
    assert isinstance(made, AutoListener)
    return stack.enter_context(contextlib.closing(made))


def test_who_asked_is_not_turned_away_for_silent_ones(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        listening = _listen(stack)
        number = int(listening.address.rpartition(":")[2])
        for _ in range(PLACES):
            stack.enter_context(socket.create_connection(("127.0.0.1", number)))
        _until(lambda: len(listening._ready) == PLACES)
        with caplog.at_level(logging.WARNING):
            honest = get_transport("auto").connect(listening.address, deadline_in(LONG_S))
            stack.enter_context(contextlib.closing(honest))
            assert isinstance(honest, AutoConnection)
            assert honest.choice.scheme == "unix"
            _until(lambda: "was dropped" in caplog.text)
        accepted = [listening.accept(deadline_in(LONG_S)) for _ in range(PLACES)]
        for one in accepted:
            stack.enter_context(contextlib.closing(one))
        honest.send([b"x"], deadline_in(LONG_S))
        assert accepted[-1].wait_readable(deadline_in(LONG_S))


def test_the_oldest_silent_one_of_the_host_with_most_goes() -> None:
    with contextlib.ExitStack() as stack:
        listening = _listen(stack)
        number = int(listening.address.rpartition(":")[2])
        made: list[socket.socket] = []
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.3"):
            sock = stack.enter_context(
                socket.create_connection(("127.0.0.1", number), source_address=(host, 0))
            )
            if len(made) == 1:
                sock.sendall(b"these are no words of auto")
            made.append(sock)
            _until(lambda: len(listening._ready) == len(made))
        stack.enter_context(socket.create_connection(("127.0.0.1", number)))
        made[2].settimeout(LONG_S)
        with contextlib.suppress(ConnectionResetError):
            assert made[2].recv(1) == b"", "of those of .3 the first has spoken"
        assert len(listening._ready) == PLACES


def test_those_without_a_ticket_are_closed_when_there_are_too_many(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        listening = _listen(stack)
        (path,) = tmp_path.rglob("auto-*")
        made: list[socket.socket] = []
        for _ in range(PLACES + 1):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(str(path))
            made.append(sock)
        made[0].settimeout(LONG_S)
        with contextlib.suppress(ConnectionResetError):
            while made[0].recv(64):  # the word of unix that it is let in
                pass
        assert listening.offered
