from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.core.config_sources import load_config
from kvferry.daemon import Daemon

Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts daemons in this process, on ``d.sock`` in the test's folder unless told otherwise."""
    with ExitStack() as stack:

        def start(*settings: str) -> Daemon:
            own = [f"daemon.socket={tmp_path}/d.sock", "daemon.listen=none", "daemon.disk=none"]
            given = [*own, "store.dram_capacity=1MiB", *settings]
            daemon = Daemon(load_config(None, assignments=given).config)
            stack.callback(daemon.close)
            return daemon

        yield start
