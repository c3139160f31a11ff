"""The demo's child processes: started, watched until they are ready, and ended in every case.

They end with :meth:`Processes.close`, and by the kernel (:mod:`kvferry.engine.demo.tether`) if this
process is killed. Their logs go to files without a name, so that nothing is left of those either.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, BinaryIO, NoReturn

from kvferry.core.clock import deadline_in, is_past, time_left
from kvferry.core.errors import ConfigError, KVFerryError
from kvferry.engine.demo.tether import tethered

__all__ = ["LOG_VARIABLES", "Child", "ChildError", "Processes", "termination_raises"]

LOG_VARIABLES = ("KVFERRY_LOG__LEVEL", "KVFERRY_LOG__FORMAT")
"""Settings of the user's that reach the children."""

_READY = re.compile(rb"^ready\b(.*)\n", re.MULTILINE)
_POLL_S = 0.02
_PIPE_GRACE_S = 2.0
_TAIL_LINES = 15


class ChildError(KVFerryError):
    """A child process of the demo ended, or was not ready in time.

    Attributes:
        name: Which.
        tail: The last lines of its log.
    """

    code = "demo_process"

    def __init__(self, message: str, *, name: str = "", tail: str = "") -> None:
        super().__init__(message)
        self.name, self.tail = name, tail


class Child:
    """One child process and its log. Used by one thread.

    Attributes:
        stdin: Its standard input, if it was started with ``talks``.
        stdout: Its standard output, likewise; otherwise that goes to the log.
    """

    def __init__(self, name: str, command: Sequence[str], log: BinaryIO, *, talks: bool = False) -> None:
        self.name = name
        self._log = log
        pipe = subprocess.PIPE if talks else None
        # A session of its own: Ctrl-C reaches this process only, which then ends the others in order.
        self._process = subprocess.Popen(
            tethered(list(command)),
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or log,
            stderr=log,
            env=_environment(os.environ),
            start_new_session=True,
        )
        self.stdin: IO[bytes] | None = self._process.stdin
        self.stdout: IO[bytes] | None = self._process.stdout

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_ready(self, deadline: float) -> dict[str, str]:
        """Wait for the line ``ready key=value …`` and return its fields.

        Raises:
            ChildError: It ended instead, or is not ready by ``deadline``.
        """
        while True:
            found = _READY.search(self._read_log())
            if found:
                words = shlex.split(found.group(1).decode("utf-8", "replace"))
                return dict(word.split("=", 1) for word in words if "=" in word)
            self.check()
            if is_past(deadline):
                raise self._error("is not ready in time")
            time.sleep(min(_POLL_S, time_left(deadline)))

    def check(self) -> None:
        """Raise :class:`ChildError` if the process has ended."""
        status = self._process.poll()
        if status is not None:
            how = f"exit status {status}" if status >= 0 else f"signal {-status}"
            raise self._error(f"ended ({how})")

    def raise_broken(self, cause: Exception | None = None) -> NoReturn:
        """A pipe to the process has broken, so it is ending: say how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PIPE_GRACE_S)
        self.check()
        raise self._error("has closed its pipe") from cause

    def _error(self, what: str) -> ChildError:
        lines = self._read_log().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
        return ChildError(f"the {self.name} process {what}", name=self.name, tail="\n".join(lines))

    def terminate(self) -> None:
        """Ask it to end."""
        if self._process.poll() is None:
            self._process.terminate()

    def reap(self, deadline: float) -> None:
        """Wait until it has ended; kill it at ``deadline``."""
        try:
            self._process.wait(time_left(deadline))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._log.close()

    def _read_log(self) -> bytes:
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - (1 << 20))
        return os.pread(self._log.fileno(), size - start, start)  # the offset belongs to the child


class Processes:
    """All children; a context manager. Start them from the main thread (see :mod:`tether`).

    Args:
        log_folder: Where logs are kept as ``NAME.log``; ``None`` keeps none.
    """

    def __init__(self, log_folder: Path | None = None) -> None:
        self._log_folder = log_folder
        self._children: list[Child] = []
        if log_folder is not None:
            try:
                log_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot keep logs in {log_folder}: {error}") from error

    def start(self, name: str, command: Sequence[str], *, talks: bool = False) -> Child:
        """Start a child; with ``talks`` its standard input and output are pipes."""
        child = Child(name, command, self._open_log(name), talks=talks)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raise :class:`ChildError` if any child has ended."""
        for child in self._children:
            child.check()

    def close(self, timeout_s: float = 5.0) -> None:
        """End all children, the last started first; returns when they are gone."""
        deadline = deadline_in(timeout_s)
        for child in reversed(self._children):
            child.terminate()
        while self._children:
            self._children[-1].reap(deadline)
            self._children.pop()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _open_log(self, name: str) -> BinaryIO:
        if self._log_folder is None:
            return tempfile.TemporaryFile()
        try:
            return (self._log_folder / f"{name}.log").open("w+b")
        except OSError as error:
            raise ConfigError(f"cannot keep logs in {self._log_folder}: {error}") from error


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The children's environment: without the user's kvferry settings, which are for their own services."""
    kept = {"KVFERRY_CACHE_DIR", "KVFERRY_DEBUG", *LOG_VARIABLES}
    return {k: v for k, v in ours.items() if not k.upper().startswith("KVFERRY_") or k in kept}


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``SystemExit`` in the main thread, so that ``with`` blocks clean up.

    Elsewhere than in the main thread it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
