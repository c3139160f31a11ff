"""The daemon as a process: open, listen, say so, serve until a signal comes, drain."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import threading
from typing import TYPE_CHECKING, Final

from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.core.process import StopSignal, print_ready
from kvferry.core.units import format_nbytes
from kvferry.daemon.node import Daemon
from kvferry.daemon.systemd import notify

if TYPE_CHECKING:
    from kvferry.core.config import Config
    from kvferry.daemon.http import DaemonHttp

__all__ = ["raise_open_files", "run_daemon"]

log = logging.getLogger(__name__)

_MOST_FILES: Final = 1 << 20
_YOUNG_OBJECTS: Final = 20_000  # each save makes more than the usual 700: a seventh of its time went there
_PR_SET_DUMPABLE: Final = 4  # <linux/prctl.h>


def run_daemon(config: Config) -> None:
    """Be a cache daemon until SIGTERM or SIGINT, then drain; a second signal ends it at once.

    Raises:
        ConfigError: If it cannot start; what is wrong is named.
    """
    stop = StopSignal()
    reload = ReloadSignal()
    raise_open_files()
    daemon = Daemon(config)
    http = None
    try:
        http = _open_http(daemon)
        stop.begin()
        if daemon.tenants.guarded:
            hide_memory()
        gc.set_threshold(_YOUNG_OBJECTS)
        gc.freeze()  # what there is by now stays to the end: it need not be looked through again
        gc.enable()  # off since the command began
        stats = [store.stats() for store in daemon.stores.values()]
        print_ready(
            "daemon",
            listen=" ".join(daemon.addresses),
            memory=format_nbytes(sum(one.capacity_nbytes for one in stats)).replace(" ", ""),
            tiers=",".join(dict.fromkeys(tier for one in stats for tier in one.per_tier)),
            **({"tenants": len(stats)} if daemon.tenants.guarded else {}),
            arena=config.daemon.arena,
            **({} if http is None else {"http": http.url}),
            pid=os.getpid(),
        )
        notify("READY=1", f"STATUS=serving on {' '.join(daemon.addresses)}", f"MAINPID={os.getpid()}")
        stop.wait(lambda: _alive(http) and _reloaded(reload, daemon, http))
        notify("STOPPING=1", "STATUS=draining")
        drained = daemon.drain(deadline_in(config.daemon.drain))
        if not drained.done:
            late = f"; time ran out: raise daemon.drain ({config.daemon.drain:g} s)" if drained.waits else ""
            log.warning("not all was done and written: %s%s", drained.text, late)
    finally:
        if http is not None:
            http.close()
        daemon.close()


def _open_http(daemon: Daemon) -> DaemonHttp | None:
    if daemon.config.daemon.http is None:
        return None
    from kvferry.daemon.http import DaemonHttp

    http = DaemonHttp(daemon, daemon.config.daemon.http)
    http.start()
    return http


def _alive(http: DaemonHttp | None) -> bool:
    """Called once a second, as what follows."""
    if "WATCHDOG_USEC" in os.environ:
        notify("WATCHDOG=1")
    return http is None or http.is_alive()


class ReloadSignal:
    """SIGHUP asks for tokens to be read again, also where it says that a terminal was closed.

    Made in the main thread.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        signal.signal(signal.SIGHUP, lambda _number, _frame: self._asked.set())

    def take(self) -> bool:
        """Whether it was asked for since the last call."""
        asked = self._asked.is_set()
        self._asked.clear()
        return asked


def _reloaded(signal_: ReloadSignal, daemon: Daemon, http: DaemonHttp | None) -> bool:
    if signal_.take():
        try:
            told = daemon.tenants.reload()
            if http is not None:
                http.reload_token()
            log.info("SIGHUP: %s", told)
        except KVFerryError as error:
            log.error("not all was read again: %s", error)  # noqa: TRY400 - its text says all
    return True


def hide_memory() -> None:
    """Keep other processes of the same user from this one's memory: it holds KV of several tenants.

    Without it they could map every tenant's segments through ``/proc``. There are no core dumps then either.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        log.warning("processes of this user can look into the daemon: %s", os.strerror(ctypes.get_errno()))


def raise_open_files() -> None:
    """Raise this process's limit of open files as far as it may: connections and segments take some each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)
