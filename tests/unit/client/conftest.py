from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import jobs
from kvferry.core.config_sources import load_config
from kvferry.daemon import Daemon
from kvferry.testing.paged_engine import FakeDevice, Setting

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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(jobs, "_TOGETHER_NBYTES", 0)  # each layer is a copy of its own
    return FakeDevice()


@pytest.fixture
def setting(start: Start) -> Iterator[Callable[..., Setting]]:
    made: list[Setting] = []

    def make(*settings: str, **more: Any) -> Setting:
        made.append(Setting(start, *settings, **more))
        return made[-1]

    yield make
    for one in made:
        one.client.close()
