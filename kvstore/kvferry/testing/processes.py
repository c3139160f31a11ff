"""``kvferry`` commands as child processes of a test: started, waited for, ended by their process id."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from types import TracebackType

from kvferry.core.clock import deadline_in, is_past, time_left
from kvferry.core.errors import KVFerryError, TransferTimeoutError

__all__ = ["Command"]

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 30.0
_TAIL = 4000
_WHICH_CODE = frozenset(("KVFERRY_NATIVE", "KVFERRY_NATIVE_ISA"))


def _inherited() -> dict[str, str]:
    """This process's environment without settings of kvferry, which are the test's to make.

    What says which code runs stays: else a child would run without the native library that the process which
    tests it runs with, in a work tree and in the run of all tests without it.
    """
    return {k: v for k, v in os.environ.items() if k in _WHICH_CODE or not k.startswith("KVFERRY_")}


class Command:
    """One ``kvferry …`` process that prints a line ``ready key=value …``.

    As a context manager it is killed at the end, if it still runs. Its output is kept in memory; a
    thread an output reads it, so the process never waits for us.

    Args:
        words: The command line after ``kvferry``.
        environment: Variables on top of those of this process.
    """

    def __init__(self, *words: str, environment: dict[str, str] | None = None) -> None:
        self.words = words
        self._changed = threading.Condition()
        self._out: list[str] = []
        self._err: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**_inherited(), **(environment or {})},
            text=True,
            errors="replace",
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream, into), name="kvferry-test-output", daemon=True)
            for stream, into in ((self.process.stdout, self._out), (self.process.stderr, self._err))
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _read(self, stream: object, into: list[str]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            with self._changed:
                into.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def out(self) -> str:
        """Standard output so far."""
        with self._changed:
            return "".join(self._out)

    @property
    def err(self) -> str:
        """Standard error so far."""
        with self._changed:
            return "".join(self._err)

    def wait_ready(self, timeout_s: float = _START_TIMEOUT_S) -> dict[str, str]:
        """The fields of its ready line.

        Raises:
            KVFerryError: If it ended instead; with the end of its output.
            TransferTimeoutError: If there is no such line in time.
        """
        deadline = deadline_in(timeout_s)
        with self._changed:
            while True:
                line = next((text for text in self._out if text.startswith("ready ")), None)
                if line is not None:
                    return dict(word.split("=", 1) for word in shlex.split(line)[1:])
                if self.process.poll() is not None:
                    raise KVFerryError(f"{self} ended with {self.process.returncode}: {self._tail()}")
                if is_past(deadline):
                    raise TransferTimeoutError(f"{self} is not ready after {timeout_s:g} s: {self._tail()}")
                self._changed.wait(min(0.2, time_left(deadline)))

    def wait(self, timeout_s: float = _START_TIMEOUT_S) -> int:
        """Wait until it ends by itself; its exit code. All output has been read then."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(_STOP_TIMEOUT_S)
        return code

    def terminate(self, timeout_s: float = _STOP_TIMEOUT_S) -> int:
        """SIGTERM, then wait; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, if it still runs, and collect it; a second call does nothing."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_STOP_TIMEOUT_S)
        for reader in self._readers:
            reader.join(_STOP_TIMEOUT_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _tail(self) -> str:
        return ("".join(self._out) + "".join(self._err))[-_TAIL:]

    def __repr__(self) -> str:
        return f"kvferry {' '.join(self.words)}"
