"""Memory as the library takes it: addresses and sizes, and segments that have to be registered with it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from kvferry.core.buffers import Buf, address_of, as_bytes_view, page_aligned
from kvferry.core.errors import TierError
from kvferry.core.segments import is_segment
from kvferry.store.remote.mooncake.library import Library

__all__ = ["Registered", "Spans", "address_of", "gathered", "spans_of"]


class Spans(NamedTuple):
    """Pieces of memory, as one value is read from or written to them.

    Attributes:
        addresses: Of each.
        sizes: Of each, in bytes.
        held: What keeps them in place.
    """

    addresses: list[int]
    sizes: list[int]
    held: list[memoryview]


def spans_of(views: Iterable[memoryview]) -> Spans:
    """Views, those that continue each other as one piece."""
    found = Spans([], [], [])
    for view in views:
        if not len(view):
            continue
        address = address_of(view)
        found.held.append(view)
        if found.addresses and found.addresses[-1] + found.sizes[-1] == address:
            found.sizes[-1] += len(view)
        else:
            found.addresses.append(address)
            found.sizes.append(len(view))
    return found


def gathered(pieces: Sequence[memoryview | bytes]) -> Spans:
    """Pieces of a value; those that are ``bytes`` are put side by side first."""
    own = page_aligned(sum(len(piece) for piece in pieces if isinstance(piece, bytes)))
    views: list[memoryview] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, bytes):
            own[at : at + len(piece)] = piece
            views.append(own[at : at + len(piece)])
            at += len(piece)
        else:
            views.append(piece)
    return spans_of(views)


class Registered:
    """Memory that is registered with the library. Thread safe.

    A segment of an arena is from the first use of a byte of it until its memory goes, other memory while a
    call uses it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the end of a segment may come at any moment, also while it is held
        self._segments: dict[int, weakref.finalize[Any, Any]] = {}  # by address
        self._users: Counter[int] = Counter()  # calls by address

    @contextlib.contextmanager
    def during(self, library: Library, spans: Iterable[Spans]) -> Iterator[None]:
        """All memory in which these lie is registered meanwhile.

        Raises:
            TierError: If the library refuses it.
        """
        used: list[int] = []
        try:
            for owner in {id(view.obj): view.obj for each in spans for view in each.held}.values():
                self._take(library, cast("object", owner), used)
            yield
        finally:
            with self._lock:
                for address in used:
                    self._users[address] -= 1
                    if not self._users[address]:
                        del self._users[address]
                        library.unregister_buffer(address)

    def _take(self, library: Library, owner: object, used: list[int]) -> None:
        whole = as_bytes_view(cast("Buf", owner))
        address = address_of(whole)
        with self._lock:
            if address in self._segments:
                return
            if not self._users[address] and (refused := library.register_buffer(address, len(whole))):
                del self._users[address]
                raise TierError(
                    f"Mooncake does not register {len(whole)} bytes ({refused}); over rdma the limit is "
                    "ulimit -l"
                )
            if is_segment(owner):
                self._segments[address] = weakref.finalize(owner, self._gone, library, address)
                self._segments[address].atexit = False
            else:
                self._users[address] += 1
                used.append(address)

    def _gone(self, library: Library, address: int) -> None:
        """The memory of a segment goes; called by the interpreter, in any thread."""
        with self._lock:
            if self._segments.pop(address, None) is not None:
                library.unregister_buffer(address)

    def close(self) -> None:
        """Forget all of it: the library ends."""
        with self._lock:
            for end in self._segments.values():
                end.detach()
            self._segments.clear()
