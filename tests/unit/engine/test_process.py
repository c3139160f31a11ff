"""The ready line, and what is said of an address that cannot be listened on."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest

from kvferry.core.config import Config
from kvferry.core.errors import ConfigError
from kvferry.engine.process import print_ready
from kvferry.engine.workers.common import listen


def test_the_ready_line_is_read_by_shlex(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"listen": "tcp://[::1]:1?rate=5", "model": "my model's dir", "revision": ""}
    print_ready("decode", **fields)
    line = capsys.readouterr().out
    assert line.startswith("ready role=decode listen=tcp://[::1]:1?rate=5 ")
    assert dict(word.split("=", 1) for word in shlex.split(line)[1:]) == {"role": "decode", **fields}


def test_a_taken_port_is_said_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError) as raised:
            listen(url, "--listen (decode.listen)", Config(), "decode", lambda _: None, name="test")
    text = str(raised.value)
    assert text == (
        f"cannot listen on {url}: Address already in use; choose another address with "
        "--listen (decode.listen), or stop what listens there"
    )


def test_a_path_that_something_else_takes_is_said_with_one_remedy(tmp_path: Path) -> None:
    path = tmp_path / "no socket"
    path.touch()
    with pytest.raises(ConfigError) as raised:
        listen(f"unix://{path}", "--listen", Config(), "decode", lambda _: None, name="test")
    assert str(raised.value).endswith(
        "something that is no socket lies there; choose another path with --listen"
    )


def test_a_scheme_that_no_worker_speaks_is_said_with_the_option() -> None:
    with pytest.raises(ConfigError, match=r"^http://127\.0\.0\.1:1 \(--listen \(x\)\): .*\btcp\b") as raised:
        listen("http://127.0.0.1:1", "--listen (x)", Config(), "decode", lambda _: None, name="test")
    assert "plug-in" not in str(raised.value)
