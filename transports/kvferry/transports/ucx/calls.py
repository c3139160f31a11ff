"""The calls of ``libucp`` that move bytes: a tag message costs a third of what it costs through ``ucxx``.

An operation that was started is a handle, 0 if it is over already. ``status`` says of a handle how it stands;
once it is over ``free`` gives it back. Handles end with their worker too.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = ["IN_PROGRESS", "Calls", "address_of", "is_gone", "load_calls"]

IN_PROGRESS: Final = 1
"""``UCS_INPROGRESS``; 0 is success, and errors are negative."""
_NOLOAD: Final = os.RTLD_NOLOAD | os.RTLD_NOW
_PARAM_NBYTES: Final = 256  # a ucp_request_param_t is shorter
_NO_OPTIONS: Final = ctypes.create_string_buffer(_PARAM_NBYTES)
# the mask (UCP_OP_ATTR_FIELD_DATATYPE), flags, request, callback, and as the datatype UCP_DATATYPE_IOV
_SCATTERED: Final = ctypes.create_string_buffer(struct.pack("=IIQQQ", 1 << 3, 0, 0, 0, 2), _PARAM_NBYTES)
_WHOLE_TAG: Final = 2**64 - 1
_SHORT: Final = (
    *("ucp_tag_send_nbx", "ucp_tag_recv_nbx", "ucp_tag_probe_nb", "ucp_worker_progress"),
    *("ucp_request_check_status", "ucp_request_free", "ucp_worker_flush_nbx"),
)
_PAST_POINTERS: Final = 1 << 64
_FIRST_ERROR: Final = _PAST_POINTERS - 100  # of the values of a pointer that are errors; UCS_ERR_LAST
# statuses that mean that the other end, or the way to it, is gone: unreachable, cancelled, timed out,
# rejected, not connected, reset, and the ranges of failed links and endpoints
_GONE: Final = frozenset((-6, -16, -20, -23, -24, -25, *range(-59, -39), *range(-89, -59)))

_addressof, _byte = ctypes.addressof, ctypes.c_char


def address_of(view: memoryview) -> int:
    """Where the bytes of ``view``, flat and not empty, are; they stay there as long as it is referred to."""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return _addressof(_byte.from_buffer(view))


def is_gone(status: int) -> bool:
    """Whether an error says that the other end, or the way to it, is gone."""
    return status in _GONE


@dataclass(frozen=True)
class Calls:
    """Functions of the library that is loaded. A worker, with its endpoints, serves one thread at a time.

    Attributes:
        send: ``(endpoint, address, nbytes, tag)``: start to send a message, whose memory stays as it is until
            it is over. A handle, 0, or a negative error.
        receive: ``(worker, address, nbytes, tag)``: start to receive the message with ``tag``; likewise.
        scatter: ``(worker, places, count, tag)``: the same into several places, each an address and a size
            (u64), which stay as they are too.
        status: Of a handle.
        free: Gives back a handle; one that is in progress ends by itself.
        cancel: ``(worker, handle)``: end a receive for which nothing has come.
        flush: ``(worker)``: start to hand over what it holds back: a handle, 0, or a negative error.
        destroy: Ends a worker.
        text: What an error is called.
        addresses: Of the functions that the native library calls, in the order of ``ucx.h``.
    """

    send: Callable[[int, int, int, int], int]
    receive: Callable[[int, int, int, int], int]
    scatter: Callable[[int, int, int, int], int]
    status: Callable[[int], int]
    free: Callable[[int], None]
    cancel: Callable[[int, int], None]
    flush: Callable[[int], int]
    destroy: Callable[[int], None]
    text: Callable[[int], bytes]
    addresses: tuple[int, ...]


def load_calls() -> Calls:
    """Of the ``libucp`` that is loaded.

    Raises:
        OSError: If there is none.
    """
    ucp, quick = (kind("libucp.so.0", mode=_NOLOAD) for kind in (ctypes.CDLL, ctypes.PyDLL))
    ucs = ctypes.PyDLL("libucs.so.0", mode=_NOLOAD)
    pointer, size, tag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64

    def of(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:  # noqa: ANN401 - of ctypes
        call = getattr(library, name)
        call.argtypes, call.restype = arguments, result
        return call

    send_nbx = of(ucp, "ucp_tag_send_nbx", pointer, pointer, pointer, size, tag, pointer)
    recv_nbx = of(ucp, "ucp_tag_recv_nbx", pointer, pointer, pointer, size, tag, tag, pointer)
    flush_nbx = of(ucp, "ucp_worker_flush_nbx", pointer, pointer, pointer)
    options, scattered = ctypes.addressof(_NO_OPTIONS), ctypes.addressof(_SCATTERED)

    def send(endpoint: int, address: int, nbytes: int, tag: int) -> int:
        found: int | None = send_nbx(endpoint, address, nbytes, tag, options)
        return 0 if found is None else found if found < _FIRST_ERROR else found - _PAST_POINTERS

    def receive(worker: int, address: int, nbytes: int, tag: int) -> int:
        found: int | None = recv_nbx(worker, address, nbytes, tag, _WHOLE_TAG, options)
        return 0 if found is None else found if found < _FIRST_ERROR else found - _PAST_POINTERS

    def scatter(worker: int, places: int, count: int, tag: int) -> int:
        found: int | None = recv_nbx(worker, places, count, tag, _WHOLE_TAG, scattered)
        return 0 if found is None else found if found < _FIRST_ERROR else found - _PAST_POINTERS

    def flush(worker: int) -> int:
        found: int | None = flush_nbx(worker, options)
        return 0 if found is None else found if found < _FIRST_ERROR else found - _PAST_POINTERS

    return Calls(
        send,
        receive,
        scatter,
        # which do next to nothing keep the interpreter's lock, the others give it away
        status=of(quick, "ucp_request_check_status", ctypes.c_int8, pointer),
        free=of(quick, "ucp_request_free", None, pointer),
        cancel=of(ucp, "ucp_request_cancel", None, pointer, pointer),
        flush=flush,
        destroy=of(ucp, "ucp_worker_destroy", None, pointer),
        text=of(ucs, "ucs_status_string", ctypes.c_char_p, ctypes.c_int8),
        addresses=tuple(ctypes.cast(getattr(ucp, name), pointer).value or 0 for name in _SHORT),
    )
