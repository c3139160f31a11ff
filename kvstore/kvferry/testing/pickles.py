"""A pickle that tells whether anybody unpickled it: nothing that listens may (case C125)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

__all__ = ["telling_pickle"]


class _Marker:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def telling_pickle(path: Path) -> bytes:
    """Bytes that make the file ``path``, which is not there, of anyone who unpickles them."""
    data = pickle.dumps(_Marker(path))
    assert pickle.loads(data) is None  # noqa: S301 - it is ours
    path.unlink()
    return data
