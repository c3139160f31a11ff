"""The short ways of one direction: a burst, or a receive, in one call of the native library (``ucx.h``).

For ends on one host, whose messages end up in shared memory. What is unusual is left to the long ways of
:mod:`kvferry.transports.ucx.outgoing` and :mod:`~kvferry.transports.ucx.incoming`, all in Python.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvferry.core.buffers import Buf
from kvferry.core.native import native

__all__ = ["ShortWay"]

_HAS_GIL: Final = getattr(sys, "_is_gil_enabled", lambda: True)()


class ShortWay:
    """Those of one worker, as long as it is there; one thread at a time.

    Attributes:
        send: ``(parts, position, deadline, skip)``: their bytes when all were received; ``None`` for the
            long way, which has not begun; else a status of UCX, the bytes that were posted, and the handles
            of what is under way, for :class:`~kvferry.transports.ucx.lane.Lane` to go on with and for another
            call with the posted bytes as ``skip`` to send the rest.
        receive: ``(views, position, least, deadline)``: bytes that came, ``least`` (0: all) or more; ``None``
            if nothing was done; else for the long way a status, the bytes that came, whether their sender may
            have given up, and a handle with the bytes of its message, or zeros.
    """

    __slots__ = ("receive", "send")

    def __init__(self, functions: tuple[Any, ...]) -> None:
        self.send: Callable[[Sequence[Buf], int, float, int], int | tuple[int, ...] | None] = functions[0]
        self.receive: Callable[
            [Sequence[memoryview], int, int, float], int | tuple[int, int, int, int, int] | None
        ] = functions[1]

    @classmethod
    def of(
        cls,
        calls: Sequence[int],
        worker: int,
        endpoint: int,
        control_fd: int,
        inline_nbytes: int,
        spin_s: float,
    ) -> ShortWay | None:
        """For a worker; ``None`` where there is no such library.

        Args:
            calls: Addresses of the functions that ``ucx.h`` names.
            worker: Its handle.
            endpoint: Where messages go; 0 for one that receives.
            control_fd: Descriptor of the connection's socket.
            inline_nbytes: Parts up to this size are no messages of their own.
            spin_s: How long to look for progress.
        """
        make = _maker()
        if make is None:
            return None
        functions = make((*calls, worker, endpoint, control_fd, inline_nbytes, round(spin_s * 1e9)))
        return None if functions is None else cls(functions)


@functools.lru_cache(1)
def _maker() -> Callable[[tuple[int, ...]], tuple[Any, ...] | None] | None:
    found = native()
    if found.library is None or not _HAS_GIL:
        return None
    make: Any = ctypes.PyDLL(str(found.path)).kvc_ucx_make
    make.argtypes, make.restype = (ctypes.py_object,), ctypes.py_object
    return make  # type: ignore[no-any-return]
