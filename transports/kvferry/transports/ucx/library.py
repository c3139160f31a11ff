"""The UCX library through ``ucxx``: imported once, without a trace in the environment of the process.

``ucxx`` sets ``UCX_*`` variables when it is imported; they are taken back here, so that the environment has
only what the user set. What UCX prints goes to the log of this module.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import logging
import os
import platform
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, cast

from kvferry.core.errors import CapacityError, PluginUnavailableError
from kvferry.core.install_hint import install_hint
from kvferry.core.open_files import caused_by_lack_of_files, require_descriptors
from kvferry.transports.ucx.calls import IN_PROGRESS, Calls, load_calls

__all__ = ["Endpoint", "Library", "UcxError", "Worker", "library", "library_path"]

_log = logging.getLogger(__name__)
_NOLOAD: Final = os.RTLD_NOLOAD | os.RTLD_NOW
_STOP: Final = 0  # UCS_LOG_FUNC_RC_STOP: no other handler prints it
_LEVELS: Final = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.INFO)
_OF_ENDED_WORKERS: Final = ("was not returned to mpool", "was not matched")  # with transfers in flight
_TEXT_NBYTES: Final = 4096
# A context opens 8, a worker with the way to a peer 12; where UCX gets fewer it may end the process (by an
# assertion), so there are to be plenty.
CONTEXT_DESCRIPTORS: Final = 24
WORKER_DESCRIPTORS: Final = 32
# a va_list is passed on as a pointer there
_VA_LIST_IS_POINTER: Final = frozenset({"x86_64", "aarch64"})

UcxError: TypeAlias = Exception
"""What ``ucxx`` raises; the class itself is :attr:`Library.error`."""


class Worker(Protocol):
    """A ``ucp_worker_h``."""

    @property
    def handle(self) -> int:
        """The C handle."""
        ...

    @property
    def epoll_file_descriptor(self) -> int:
        """Readable when there is something to do, once armed."""
        ...

    @property
    def address(self) -> Any:  # noqa: ANN401 - an opaque object of ucxx
        """Where other workers reach it; ``bytes()`` of it can be sent."""
        ...

    def init_blocking_progress_mode(self) -> None:
        """Make :attr:`epoll_file_descriptor`."""
        ...

    def arm(self) -> bool:
        """Arm the descriptor; ``False`` if there is something to do already."""
        ...

    def progress_once(self) -> bool:
        """Do what there is to do; whether there was something."""
        ...

    def tag_probe(self, tag: object, mask: object) -> Any:  # noqa: ANN401 - has matched and length
        """Look for a message that has come and was not asked for yet."""
        ...


class Endpoint(Protocol):
    """A ``ucp_ep_h``: the way to another worker."""

    @property
    def handle(self) -> int:
        """The C handle."""
        ...


def library_path(soname: str) -> str:
    """Where the loaded library called ``soname`` comes from; empty if it cannot be told."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if f"/{soname}" in line}
    return min(paths, default="")


def _load_ucxx() -> tuple[Any, Any]:
    """Import ``ucxx``; variables that it sets are taken back, those of the user stay as they are."""
    before = {name for name in os.environ if name.startswith("UCX_")}
    try:
        api = importlib.import_module("ucxx._lib.libucxx")
        array = importlib.import_module("ucxx._lib.arr").Array
    except (ImportError, OSError) as error:
        if caused_by_lack_of_files(error):
            raise CapacityError(
                "ucxx cannot be imported, this process has no descriptor left: raise its limit (ulimit -n)"
            ) from error
        raise PluginUnavailableError(
            f"the ucx transport needs ucxx, which cannot be imported ({error}): {install_hint('ucx')}"
        ) from error
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_")]:
            if name not in before:
                del os.environ[name]
    return api, array


@dataclass(frozen=True)
class Library:
    """What is used of ``ucxx``: all that is not done for each message.

    Attributes:
        api: The module ``ucxx._lib.libucxx``.
        array: What its calls take in place of memory.
        calls: What is done for each message, without ``ucxx``.
        error: The base class of what it raises.
        version: Of UCX itself.
        path: The file of ``libucp``.
    """

    api: Any
    array: Any
    calls: Calls
    error: type[Exception]
    version: str
    path: str

    def new_context(self, config: Mapping[str, str]) -> Any:  # noqa: ANN401
        """A context; never freed, as a forked child must not clean up what its parent uses.

        Raises:
            CapacityError: If there are too few descriptors left, for want of which UCX ends the process.
        """
        require_descriptors(CONTEXT_DESCRIPTORS, "UCX")
        features = (self.api.Feature.TAG, self.api.Feature.WAKEUP)
        return _immortal(self.api.UCXContext(dict(config), features))

    def new_worker(self, context: object) -> Worker:
        """A worker in blocking mode, to be ended with :meth:`destroy` only; raises as :meth:`new_context`."""
        with _making:  # what another one is about to open does not count as free
            require_descriptors(WORKER_DESCRIPTORS, "each direction of large messages of UCX")
            worker: Worker = _immortal(self.api.UCXWorker(context))
            worker.init_blocking_progress_mode()
            return worker

    def new_endpoint(self, worker: Worker, address: bytes, *, error_handling: bool) -> Endpoint:
        """The way from ``worker`` to the worker that has ``address``; it ends with ``worker``."""
        there = self.api.UCXAddress.create_from_buffer(address)
        created = self.api.UCXEndpoint.create_from_worker_address(worker, there, error_handling)
        return cast("Endpoint", _immortal(created))

    def tag(self, value: int) -> Any:  # noqa: ANN401
        """A tag as the calls of worker and endpoint take it."""
        return self.api.UCXXTag(value)

    def tag_mask(self, value: int) -> Any:  # noqa: ANN401
        """The bits of a tag that are compared, likewise."""
        return self.api.UCXXTagMask(value)

    def default_options(self) -> dict[str, str]:
        """The options that a new context would have."""
        return dict(self.api.get_current_options())

    def flushed(self, pending: int) -> bool:
        """Whether a flush, as ``Calls.flush`` starts it, is over; its value is of no use then."""
        if self.calls.status(pending) == IN_PROGRESS:
            return False
        self.calls.free(pending)
        return True

    def destroy(self, worker: Worker) -> None:
        """End ``worker`` with its endpoints at once, whatever is in flight; the peer has no say in it.

        When it returns, nothing reads or writes the buffers of its operations any more. The destructors of
        ``ucxx`` are not used: they wait, without a limit, for a peer that may be gone.

        Args:
            worker: Not used by anybody any more, nor are its operations.
        """
        descriptor = worker.epoll_file_descriptor
        self.calls.destroy(worker.handle)
        os.close(descriptor)


def _immortal(thing: Any) -> Any:  # noqa: ANN401
    """Keep ``thing`` for ever: a few hundred bytes, whose destructor must not run."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


@functools.cache
def _load() -> Library:
    require_descriptors(CONTEXT_DESCRIPTORS, "UCX")
    api, array = _load_ucxx()
    try:
        calls = load_calls()
    except OSError as error:
        raise PluginUnavailableError(
            f"the ucx transport cannot find the libucp that ucxx loaded ({error}): {install_hint('ucx')}"
        ) from error
    _take_log()
    version = ".".join(str(number) for number in api.get_ucx_version())
    return Library(api, array, calls, api.UCXError, version, library_path("libucp.so"))


_lock: Final = threading.Lock()
_making: Final = threading.Lock()


def library() -> Library:
    """The library, loaded by the first call.

    Raises:
        PluginUnavailableError: If it is not installed; the message has the pip command.
    """
    with _lock:
        return _load()


# -- the log ---------------------------------------------------------------------------------------------

_HANDLER: Final = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_void_p,
)


def _take_log() -> None:
    """Let UCX log through this module, unless that cannot be had or a file was asked for."""
    if platform.machine() not in _VA_LIST_IS_POINTER or "UCX_LOG_FILE" in os.environ:
        return
    try:
        ucs = ctypes.CDLL("libucs.so.0", mode=_NOLOAD)
        push, pop = ucs.ucs_log_push_handler, ucs.ucs_log_pop_handler
        format_text = ctypes.CDLL(None).vsnprintf
    except (OSError, AttributeError) as error:
        _log.debug("messages of UCX stay on standard error: %s", error)
        return
    format_text.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p]

    def handle(
        file: bytes, line: int, _function: bytes, level: int, _component: int, message: bytes, args: int
    ) -> int:
        text = ctypes.create_string_buffer(_TEXT_NBYTES)
        format_text(text, _TEXT_NBYTES, message, args)
        words = text.value.decode(errors="replace")
        ours = any(expected in words for expected in _OF_ENDED_WORKERS)
        severity = _LEVELS[level] if level < len(_LEVELS) and not ours else logging.DEBUG
        where = f"{os.path.basename(file).decode(errors='replace')}:{line}"  # noqa: PTH119 - bytes
        _log.log(severity, "UCX: %s (%s)", words, where)
        return _STOP

    callback = _immortal(_HANDLER(handle))
    push.argtypes = [_HANDLER]
    push(callback)
    atexit.register(pop)  # nothing may call into an interpreter that is gone
