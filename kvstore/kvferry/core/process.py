"""What long-running processes share: signals, and the line that says they are ready."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import logging
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from kvferry.core.address import parse_url
from kvferry.core.errors import ConfigError, ConnectError, KVFerryError

__all__ = ["StopSignal", "is_loopback", "listening", "print_ready", "require_loopback", "trim_heap"]

log = logging.getLogger(__name__)

_TICK_S = 1.0
_EXIT_FORCED = 1
_NEEDS_QUOTES = re.compile(r"[\s'\"\\]")


class StopSignal:
    """SIGTERM and SIGINT end the process in good order; a second one ends it at once.

    Must be made in the main thread. Until :meth:`begin` or :meth:`wait` is called there is nothing to put in
    order, and the first signal exits with code 0.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._serving = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._asked.is_set():
            os._exit(_EXIT_FORCED)  # whatever hangs is what the second signal is for
        self._asked.set()
        if not self._serving:
            raise SystemExit(0)
        del number

    def begin(self) -> None:
        """From here on a first signal only makes :meth:`wait` return."""
        self._serving = True

    def wait(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Return when a signal has come.

        Args:
            alive: Asked every second whether what is served still runs.

        Raises:
            KVFerryError: If it does not.
        """
        self._serving = True
        while not self._asked.wait(_TICK_S):
            if not alive():
                raise KVFerryError("the server has ended by itself; its log says why")
        log.info("stopping; a second signal stops at once")


def print_ready(role: str, **fields: object) -> None:
    """One line on standard output for whoever started the process: ``ready role=… listen=…``.

    A value with spaces, quotes or backslashes is quoted as a shell would have it, so ``shlex.split`` gives
    the fields; a port that was asked as 0 is the real one. Where it cannot be written the process
    goes on, and says so in its log.
    """
    words = [f"role={role}", *(f"{k}={_quoted(str(v))}" for k, v in fields.items())]
    try:
        print("ready", *words, flush=True)
    except OSError as error:
        log.warning("the ready line cannot be written to standard output: %s", error.strerror or error)
        # else what waits to be written fails once more at the end, with an exit code of its own
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _quoted(value: str) -> str:
    return shlex.quote(value) if not value or _NEEDS_QUOTES.search(value) else value


def is_loopback(url: str) -> bool:
    """Whether an address can only be reached from this host."""
    address = parse_url(url, default_port=0)
    if address.scheme in ("unix", "inproc") or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def require_loopback(
    url: str, option: str, *, trusted_network: bool, credentials: bool | None = None
) -> None:
    """Refuse an address that other hosts can reach, unless who may use it is known there.

    Args:
        url: The address.
        option: What says so.
        trusted_network: Whether the configuration says that everyone who reaches it may.
        credentials: Whether those who come must show a token; ``None`` where nothing asks for any.

    Raises:
        ConfigError: With the address and the option to change.
    """
    if is_loopback(url):
        return
    if credentials and parse_url(url, default_port=0).scheme == "tls":
        return
    if not trusted_network:
        reached = f"{url} ({option}) can be reached from other hosts, and "
        if credentials is None:
            raise ConfigError(
                f"{reached}it asks for no credentials: choose a loopback address, or set "
                "wire.trusted_network=true if everyone who reaches it may use it"
            )
        if credentials:
            raise ConfigError(
                f"{reached}tokens and blocks would go there in the clear: choose a tls:// or a loopback "
                "address, or set wire.trusted_network=true if nobody on that network listens"
            )
        raise ConfigError(
            f"{reached}there are no credentials: set daemon.credentials and choose a tls:// address, take a "
            "loopback address, or set wire.trusted_network=true if everyone who reaches it may use it"
        )
    if credentials:
        log.warning("%s: tokens and blocks go there in the clear (wire.trusted_network)", url)
    else:
        log.warning("%s: whoever reaches it can use it, there are no credentials (wire.trusted_network)", url)


def listening(error: ConnectError, url: str, option: str) -> ConfigError:
    """A clear error for an address that cannot be listened on: which one, and which option moves it."""
    cause = error.__cause__
    if not isinstance(cause, OSError):
        remedy = "" if str(error).endswith("choose another path") else "; choose another address"
        return ConfigError(f"{error}{remedy} with {option}")
    free = ", or stop what listens there" if cause.errno == errno.EADDRINUSE else ""
    reason = cause.strerror or str(cause)
    return ConfigError(f"cannot listen on {url}: {reason}; choose another address with {option}{free}")


def trim_heap() -> None:
    """Give free pages of the C heap back to the system; takes about a millisecond.

    glibc keeps pages that have become free between others, so a process that answers many small requests of
    all sizes would seem to leak. With another C library it does nothing.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
