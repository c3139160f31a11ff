from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The tests share two cores with others; the engine leaves the number of threads to its caller."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for checkpoints that several tests share."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def deadline() -> float:
    return time.monotonic() + 100
