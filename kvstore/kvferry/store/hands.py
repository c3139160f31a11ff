"""Whose hand may still be on a buffer: what is known of it when a tier's call did not end as it should.

A tier says by ``in_flight`` when it could not take its hand off a buffer. A call that ends by an exception,
the tier's own or one that a signal handler raised in the waiting thread, says nothing: threads of the tier
may go on writing into the buffer, or reading from it. Whoever does has a reference to the buffer; so the
buffer is lent through an object whose end can be seen, and is used for something else only after that.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np

__all__ = ["UNKNOWN", "drop_frames", "lend", "over_when", "trace_of"]

UNKNOWN: Final = threading.Event()
"""As ``in_flight`` of a result: the tier did not say whether its hand is off the buffer. Never set."""


def lend(view: memoryview) -> tuple[memoryview, Callable[[], object]]:
    """The same bytes, and a function that returns ``None`` when nobody has a reference to them any more."""
    lent = np.frombuffer(view, np.uint8)
    return lent.data, weakref.ref(lent)


def over_when(
    in_flight: threading.Event | None, reference: Callable[[], object] | None
) -> Callable[[], bool] | None:
    """When the buffer may be used for something else; ``None``: now."""
    if in_flight is None:
        return None
    if in_flight is not UNKNOWN:
        return None if in_flight.is_set() else in_flight.is_set
    if reference is None or reference() is None:
        return None
    return lambda: reference() is None


def drop_frames(error: BaseException) -> None:
    """Forget the variables of the calls that an exception ended, which may refer to lent buffers."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


def trace_of(error: BaseException) -> str:
    """Its traceback as text: a log record that held the exception would hold the buffers too."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
