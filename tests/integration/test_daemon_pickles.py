"""A pickle for each port of a daemon: it is no frame and no request, and nobody unpickles it (case C125)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cli.daemon_http import Port
from kvferry.client import Client
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.pickles import telling_pickle
from kvferry.testing.processes import Command
from kvferry.testing.raw_sockets import answer_to

SPEC = small_spec("pickles")


POST = b"POST /admin/clear HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize("before", [b"", POST])
def test_no_port_of_a_daemon_unpickles(tmp_path: Path, before: bytes) -> None:
    bad = telling_pickle(tmp_path / "marker")
    bad = (before % len(bad) if before else before) + bad
    own = ["serve", "--socket", f"{tmp_path}/d.sock", "--disk", "none", "--capacity", "4MiB"]
    with Command(*own, "--listen", "tcp://127.0.0.1:0", "--http", "http://127.0.0.1:0") as daemon:
        ready = daemon.wait_ready()
        with Client(f"unix://{tmp_path}/d.sock") as client:
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * 3 * SPEC.block_tokens)
            save_blocks(ns, keys)
            for url in (*ready["listen"].split(), ready["http"]):
                answer_to(url, bad)
            assert ns.lookup(keys).prefix == 3
        assert not (tmp_path / "marker").exists()
        assert Port(ready["http"]).status().tenants[0].entries == 3
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.err
