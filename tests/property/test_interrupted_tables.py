"""An exception of a signal handler on any line of the tables leaves a store whose later calls all work.

Room may be lost by it, as the documents say, but no call may raise what it never should, and no load may give
other bytes than were saved.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.core.memory import MemoryStore
from kvferry.testing.blocks import small_spec

_TABLES = ("chains.py", "leases.py", "block_table.py", "pool.py")
_SLOTS = 6


class Interrupted(BaseException):
    """What the handler raises."""


def _interrupt_at(line: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises at the ``line``-th line that is run in the tables."""
    left = line

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(_TABLES):
            return None if event == "call" else trace
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Interrupted
        return trace

    return trace


def _data(namespace: Namespace, key: bytes) -> bytes:
    return (key * (namespace.spec.block_nbytes // len(key) + 1))[: namespace.spec.block_nbytes]


def _pairs(namespace: Namespace, keys: list[Any]) -> list[tuple[Any, bytes]]:
    return [(key, _data(namespace, key)) for key in keys]


def _save(namespace: Namespace, keys: list[Any]) -> None:
    namespace.save(_pairs(namespace, keys), parent=None, deadline=deadline_in(0))


def _load(namespace: Namespace, keys: list[Any]) -> None:
    with namespace.load(keys, deadline=deadline_in(0)):
        pass


def _reserve(namespace: Namespace, keys: list[Any]) -> None:
    with namespace.reserve(keys, parent=None, deadline=deadline_in(0)) as lease:
        for index, key in enumerate(lease.keys):
            lease.view(index)[:] = _data(namespace, key)
        lease.commit()


def _pin(namespace: Namespace, keys: list[Any]) -> None:
    namespace.pin(keys, ttl=60)
    namespace.unpin(keys)


def _remove(namespace: Namespace, keys: list[Any]) -> None:
    namespace.remove(keys)


_VERBS = {"save": _save, "load": _load, "reserve": _reserve, "pin": _pin, "remove": _remove}


@pytest.mark.parametrize("verb", _VERBS)
@pytest.mark.parametrize("other", [False, True], ids=["again", "evicting"])
def test_whatever_line_is_interrupted_later_calls_work(verb: str, other: bool) -> None:
    spec = small_spec()
    for line in range(1, 600):
        slot = -(-spec.block_nbytes // 4096) * 4096
        store = MemoryStore(_SLOTS * slot, write_quota_nbytes=_SLOTS * slot)
        namespace = store.namespace(spec)
        held = namespace.keys(range(4 * spec.block_tokens))
        more = namespace.keys(range(7, 7 + 4 * spec.block_tokens))
        _save(namespace, held)
        before = sys.gettrace()
        sys.settrace(_interrupt_at(line))
        try:
            _VERBS[verb](namespace, more if other else held)
            whole = sys.gettrace() is not None
        except Interrupted:
            whole = False
        finally:
            sys.settrace(before)
        for act in (*_VERBS.values(), _save, _load):
            for keys in (held, more):
                with contextlib.suppress(KVFerryError):  # room may be missing for good
                    act(namespace, keys)
                with namespace.load(keys, deadline=deadline_in(0)) as lease:
                    for index in range(len(lease)):
                        assert bytes(lease.view(index)) == _data(namespace, keys[index]), line
        store.stats()
        namespace.clear()
        store.close()
        if whole:
            return
    pytest.fail("more lines than expected")
