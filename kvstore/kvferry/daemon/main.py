"""The daemon as a process: open, listen, say so, serve until a signal comes, drain."""

from __future__ import annotations

import logging
import os
import resource
from typing import TYPE_CHECKING, Final

from kvferry.core.clock import deadline_in
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


def run_daemon(config: Config) -> None:
    """Be a cache daemon until SIGTERM or SIGINT, then drain; a second signal ends it at once.

    Raises:
        ConfigError: If it cannot start; what is wrong is named.
    """
    stop = StopSignal()
    raise_open_files()
    daemon = Daemon(config)
    http = None
    try:
        http = _open_http(daemon)
        stop.begin()
        stats = daemon.store_of("default").stats()
        print_ready(
            "daemon",
            listen=" ".join(daemon.addresses),
            memory=format_nbytes(stats.capacity_nbytes).replace(" ", ""),
            tiers=",".join(stats.per_tier),
            arena=config.daemon.arena,
            **({} if http is None else {"http": http.url}),
            pid=os.getpid(),
        )
        notify("READY=1", f"STATUS=serving on {' '.join(daemon.addresses)}", f"MAINPID={os.getpid()}")
        stop.wait(lambda: _alive(http))
        notify("STOPPING=1", "STATUS=draining")
        if not daemon.drain(deadline_in(config.daemon.drain)):
            log.warning("not all was done and written within daemon.drain (%g s)", config.daemon.drain)
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
    """Called once a second."""
    if "WATCHDOG_USEC" in os.environ:
        notify("WATCHDOG=1")
    return http is None or http.is_alive()


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
