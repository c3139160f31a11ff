from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest

from kvferry.core.clock import deadline_in
from kvferry.transports.ucx import UcxTransport
from kvferry.transports.ucx.connection import UcxConnection

Ends: TypeAlias = "tuple[UcxConnection, UcxConnection]"
Meet: TypeAlias = "Callable[[str], contextlib.AbstractContextManager[Ends]]"

if sys.platform != "linux":
    collect_ignore_glob = ["test_*"]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@contextlib.contextmanager
def _meet(options: str) -> Iterator[Ends]:
    transport = UcxTransport()
    with contextlib.closing(transport.listen(f"ucx://127.0.0.1:0?{options}")) as listener:
        one = transport.connect(listener.address, deadline_in(30))
        other = listener.accept(deadline_in(30))
    assert isinstance(one, UcxConnection)
    assert isinstance(other, UcxConnection)
    with contextlib.closing(one), contextlib.closing(other):
        yield one, other


@pytest.fixture
def meet() -> Meet:
    """Both ends of a connection, the one that dialled first."""
    return _meet
