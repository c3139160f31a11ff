"""A fork by the application while other threads are at work: kvferry itself never forks.

What is loaded the first time that it is used (plug-ins, modules, the native library) takes locks, of ours and
of the import system, and a child of a fork in between finds them taken for ever. So a fork waits until no
other thread loads anything; locks that are held only briefly are renewed in the child.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["loading", "renewed_in_child"]

_WAIT_S: Final = 30.0
"""How long a fork waits at most: a load may itself wait for what that thread holds, as a module's lock."""


class _Loads:
    """The threads that load something. A condition whose lock is held while a thread forks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.threads = Counter[int]()

    def others(self) -> bool:
        return bool(self.threads.keys() - {threading.get_ident()})


_loads = _Loads()
_owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


@contextmanager
def loading() -> Iterator[None]:
    """No thread forks meanwhile, unless this takes very long; threads do not wait for each other. Nests."""
    loads, thread = _loads, threading.get_ident()
    with loads.changed:
        loads.threads[thread] += 1
    try:
        yield
    finally:
        with loads.changed:
            loads.threads[thread] -= 1
            if not loads.threads[thread]:
                del loads.threads[thread]
                loads.changed.notify_all()


def renewed_in_child(owner: object, attribute: str) -> None:
    """The ``attribute`` of ``owner`` becomes a new lock in a child of a fork."""
    _owners[owner] = attribute


def _before() -> None:
    _loads.changed.acquire()
    _loads.changed.wait_for(lambda: not _loads.others(), _WAIT_S)


def _in_parent() -> None:
    _loads.changed.release()


def _in_child() -> None:
    _loads.changed = threading.Condition()
    thread = threading.get_ident()
    _loads.threads = Counter({thread: _loads.threads[thread]}) if thread in _loads.threads else Counter()
    for owner, attribute in list(_owners.items()):
        setattr(owner, attribute, threading.Lock())


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
