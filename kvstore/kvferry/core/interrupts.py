"""Exceptions that are not of the code that they end: a signal handler raised them."""

from __future__ import annotations

import functools
import signal
from types import CodeType, MethodType

__all__ = ["from_signal_handler"]


def from_signal_handler(error: BaseException) -> bool:
    """Whether a handler that is set for a signal now has raised ``error``, as its traceback tells.

    It belongs to the caller of whatever waited, and says nothing about what was waited for.
    """
    if not isinstance(error, Exception):
        return True  # KeyboardInterrupt, SystemExit: never the business of what was called
    codes = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number)))}
    at = error.__traceback__
    while codes and at is not None:
        if at.tb_frame.f_code in codes:
            return True
        at = at.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if isinstance(handler, MethodType):
        handler = handler.__func__
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        code = getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
