"""A directory that goes down while somebody uses it: the descriptor stays until he is done."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.keys import BlockKey
from kvferry.store.disk import root as module
from kvferry.store.disk.files import Files
from kvferry.store.disk.options import DiskOptions
from kvferry.store.disk.root import Root
from kvferry.store.problems import Problems

KEY = BlockKey(bytes(32))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    path = str(tmp_path / "d")
    problems = Problems("disk", logging.getLogger(__name__))
    made = Root(0, path, Files(), problems, lambda _: None, DiskOptions((path,), capacity_nbytes=1 << 20))
    made.start(make=True)
    yield made
    made.stop()


USES: dict[str, tuple[Callable[[Root], tuple[Any, str]], int, Callable[[Root], object]]] = {
    "free_nbytes": (lambda root: (root._files, "free_nbytes"), 0, lambda root: root.free_nbytes()),
    "size_nbytes": (lambda _: (os, "fstatvfs"), 0, lambda root: root.size_nbytes()),
    "probe": (lambda _: (module, "probe_direct"), 1, lambda root: root.probe()),
    "clear_way": (
        lambda root: (root._obstacles, "clear"),
        0,
        lambda root: root.clear_way("t", bytes(32), KEY),
    ),
}  # where the descriptor is used, as which argument, and the call that does


@pytest.mark.parametrize("use", USES)
def test_a_descriptor_in_use_is_not_closed(root: Root, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    where, argument, call = USES[use]
    seen: list[int] = []

    def late(*args: Any) -> object:
        root.stop()
        seen.append(os.fstat(args[argument]).st_ino)
        return SimpleNamespace(
            f_blocks=1, f_bfree=1, f_bavail=1, f_frsize=1, read=False, write=False, text=""
        )

    monkeypatch.setattr(*where(root), late)
    inode = Path(root.path).stat().st_ino
    call(root)
    assert seen == [inode]
    assert not root.is_up
