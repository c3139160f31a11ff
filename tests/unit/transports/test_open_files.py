"""A process that may open no more files: every transport says so, and goes on when it may again."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, ConfigError, ConnectError
from kvferry.core.native import native
from kvferry.core.runtime_folder import runtime_folder_path
from kvferry.testing.few_files import few_more_files, no_more_files
from kvferry.transports import connect, explain, get_transport, listen, registry
from kvferry.transports.auto.listener import AutoListener
from kvferry.transports.peer_owner import AllowedUsers

from .conftest import Files

LONG_S = 30.0
SCHEMES = ["tcp", "lanes", "tls", "unix", "auto", "ucx"]


@pytest.fixture
def url(request: pytest.FixtureRequest, files: Files) -> Iterator[str]:
    scheme: str = request.param
    if scheme == "ucx":
        pytest.importorskip("ucxx")
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        yield {
            "lanes": "tcp://127.0.0.1:0?lanes=2",
            "tls": files.listen_url(),
            "unix": f"unix://{Path(folder) / 's'}",
        }.get(scheme, f"{scheme}://127.0.0.1:0")


@pytest.mark.parametrize("url", SCHEMES, indirect=True)
def test_no_more_files(url: str) -> None:
    with contextlib.closing(listen(url)) as listener:
        connect(listener.address, deadline_in(LONG_S)).close()  # loads what it needs
        listener.accept(deadline_in(LONG_S)).close()
        with no_more_files(), pytest.raises(ConnectError, match="ulimit -n"):
            connect(listener.address, deadline_in(LONG_S))
    with no_more_files(), pytest.raises(ConnectError, match="ulimit -n"):
        listen(url)
    with contextlib.closing(listen(url)) as listener:
        connect(listener.address, deadline_in(LONG_S)).close()


@pytest.mark.parametrize("few", range(8))
def test_auto_with_few_files_takes_the_best_or_says_so(few: int) -> None:
    """Never another transport, or an offer of less, for want of a descriptor."""
    auto = get_transport("auto")
    with contextlib.closing(auto.listen("auto://127.0.0.1:0")) as listener:
        connect(listener.address, deadline_in(LONG_S)).close()  # loads what it needs
        listener.accept(deadline_in(LONG_S)).close()
        with few_more_files(few):
            try:
                made = auto.listen("auto://127.0.0.1:0")
            except ConnectError as error:
                said = str(error)
            else:
                said = ""
                assert isinstance(made, AutoListener)
                assert made.offered == ["unix", "tcp"]
                made.close()
        assert not said or "ulimit -n" in said
        with few_more_files(few):
            try:
                one = auto.connect(listener.address, deadline_in(0.5))
            except ConnectError as error:
                said = str(error)
            else:
                said, choice = "", explain(one)
                one.abort()
                assert choice is not None
                assert choice.scheme == "unix"
        assert not said or "ulimit -n" in said or "deadline" in said  # the listener is short of them too


def test_the_owner_of_a_peer_is_not_unknown_for_want_of_files() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        no_more_files(),
        pytest.raises(OSError, match="Too many open files"),
    ):
        AllowedUsers().problem_with_peer(one)


@pytest.mark.parametrize("call", [listen, lambda url: connect(url, deadline_in(1))])
def test_what_is_no_text_is_no_address(call: Callable[[str], object]) -> None:
    for wrong in (None, 8410, b"tcp://127.0.0.1:0", Path("/tmp/s")):
        with pytest.raises(ConfigError, match="write one as text"):
            call(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [listen, lambda url: connect(url, deadline_in(1))])
def test_a_scheme_first_used_without_descriptors_can_be_used_later(
    call: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_points", None)
    with no_more_files(), pytest.raises(ConnectError, match="ulimit -n"):
        call("tcp://127.0.0.1:9")
    with contextlib.closing(listen("tcp://127.0.0.1:0")):
        pass


def test_the_native_library_is_not_missing_for_want_of_files() -> None:
    native.cache_clear()
    with no_more_files(), pytest.raises(CapacityError, match="ulimit -n"):
        native()
    assert native() is native()


_FEW_FOR_UCX = """
import os, resource, sys, threading
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectError, TransportError
from kvferry.testing.few_files import few_more_files
from kvferry.transports import connect, listen
free, large = int(sys.argv[1]), bytes(1 << 20)
with few_more_files(free):
    try:
        listener = listen("ucx://127.0.0.1:0")
        one = connect(listener.address, deadline_in(20))
        other = listener.accept(deadline_in(20))
        received = memoryview(bytearray(len(large)))
        receiving = threading.Thread(target=other.recv_into, args=([received], deadline_in(20)))
        receiving.start()
        try:
            one.send([large], deadline_in(20))
        finally:
            one.abort()
            receiving.join()
        print("done")
    except TransportError as error:
        print(error)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("free", [3, 20, 34])
def test_ucx_does_not_end_the_process_for_want_of_files(free: int) -> None:
    pytest.importorskip("ucxx")
    ran = subprocess.run(
        [sys.executable, "-c", _FEW_FOR_UCX, str(free)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert "ulimit -n" in ran.stdout


def test_folder_for_temporary_files_that_cannot_be_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file may be opened, Python finds every folder unusable."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        runtime_folder_path()
