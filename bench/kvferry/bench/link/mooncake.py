"""Mooncake's TransferEngine over tcp as a baseline: ``python -m kvferry.bench.link.mooncake``.

Two processes, each with memory of the size of the walk; the second writes into the first, or reads from it,
one part after the other or a batch in one call. Needs ``mooncake-transfer-engine-non-cuda`` beside kvferry.

Whoever calls the engine looks for as long as it waits. So on two CPUs the threads of both processes that move
bytes share the other CPU, as the scheduler has it, and no byte leaves its caches. Each process may be given a
CPU instead, as the ends of others are.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from kvferry.bench.results import Sample
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import KVFerryError, TransportError

__all__ = ["MooncakeTe"]

_WAIT_S = 60.0
_ENVIRONMENT = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}


class _Line:
    """A child process that answers a line of JSON with one."""

    def __init__(self, *args: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvferry.bench.link.mooncake", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | _ENVIRONMENT,
        )

    def read(self) -> dict[str, Any]:
        """The next line that is ours; the library writes to standard output as well."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise KVFerryError(f"Mooncake's process ended with code {self._child.wait(_WAIT_S)}")

    def ask(self, **request: object) -> dict[str, Any]:
        """One request and its answer."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End it; it does not end by itself while the library's threads run."""
        self._child.kill()
        self._child.communicate(timeout=_WAIT_S)


class MooncakeTe:
    """The baseline.

    Args:
        nbytes: Of a part.
        walk_nbytes: What each end walks through.
        cpus: The only one of the process that moves, and of the other; ``None``: anywhere.

    Attributes:
        failed: Operations that the library reported as failed; their time and bytes are left out.
    """

    def __init__(
        self, nbytes: int, walk_nbytes: int, cpus: tuple[int | None, int | None] = (None, None)
    ) -> None:
        self._nbytes = nbytes
        self.failed = 0
        here, there = ("" if cpu is None else str(cpu) for cpu in cpus)
        self._target = _Line("target", str(walk_nbytes), there)
        try:
            found = self._target.read()
            self._user = _Line("user", str(walk_nbytes), here, str(found["port"]), str(found["address"]))
            self._user.read()
        except BaseException:
            self.close()
            raise

    @staticmethod
    @functools.cache
    def problem() -> str:
        """Why it cannot be measured here; empty if it can."""
        if importlib.util.find_spec("mooncake") is None:
            return "mooncake-transfer-engine-non-cuda is not installed beside kvferry"
        command = [sys.executable, "-c", "import mooncake.engine"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"mooncake.engine cannot be loaded: {reason}" if done.returncode else ""

    def put(self, batch: int, count: int) -> Sample:
        """Writes into the other process."""
        return self._run("write", batch, count)

    def get(self, batch: int, count: int) -> Sample:
        """Reads from the other process."""
        return self._run("read", batch, count)

    def _run(self, operation: str, batch: int, count: int) -> Sample:
        answer = self._user.ask(operation=operation, nbytes=self._nbytes, batch=batch, count=count)
        self.failed += answer["failed"]
        good = count - answer["failed"]
        if not good:
            raise TransportError(f"Mooncake: all of {count} operations of {self._nbytes} bytes failed")
        return Sample(answer["seconds"], good * batch * self._nbytes)

    def close(self) -> None:
        """End both processes."""
        for line in (getattr(self, "_user", None), self._target):
            if line is not None:
                line.close()


class _Engine:
    """The library in this process, with its memory."""

    def __init__(self, walk_nbytes: int) -> None:
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        self._check(self._engine.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", ""), "initialize")
        self._memory = np.frombuffer(page_aligned(walk_nbytes), np.uint8)
        self._memory[:] = 1
        self.address = int(self._memory.ctypes.data)
        self.walk_nbytes = walk_nbytes
        self._check(self._engine.register_memory(self.address, walk_nbytes), "register_memory")
        self.port = int(self._engine.get_rpc_port())

    @staticmethod
    def _check(code: int, call: str) -> None:
        if code:
            raise TransportError(f"Mooncake: {call} failed with {code}")

    def move(self, operation: str, peer: str, there: int, offsets: list[int], nbytes: int) -> bool:
        """One operation; whether the library says that it was done."""
        mine = [self.address + offset for offset in offsets]
        theirs = [there + offset for offset in offsets]
        if len(offsets) == 1:
            call = getattr(self._engine, f"transfer_sync_{operation}")
            return bool(call(peer, mine[0], theirs[0], nbytes) == 0)
        call = getattr(self._engine, f"batch_transfer_sync_{operation}")
        return bool(call(peer, mine, theirs, [nbytes] * len(offsets)) == 0)


def _work(engine: _Engine, peer: str, there: int) -> None:
    position = 0
    for line in sys.stdin:
        request = json.loads(line)
        nbytes, batch = request["nbytes"], request["batch"]
        slots = max(1, engine.walk_nbytes // nbytes)
        seconds, failed = 0.0, 0
        for _ in range(request["count"]):
            offsets = [(position + n) % slots * nbytes for n in range(batch)]
            position = (position + batch) % slots
            start = time.perf_counter()
            done = engine.move(request["operation"], peer, there, offsets, nbytes)
            taken = time.perf_counter() - start
            if done:
                seconds += taken
            else:
                failed += 1
        _say(seconds=seconds, failed=failed)


def _say(**answer: object) -> None:
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Own the memory that is written into, or write into it, until standard input closes."""
    role, walk, cpu, *target = sys.argv[1:]
    if cpu:
        os.sched_setaffinity(0, {int(cpu)})  # before the library has threads
        # real-time, if the benchmark was: who looks would keep the CPU from those whom it waits for
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    engine = _Engine(int(walk))
    _say(port=engine.port, address=engine.address)
    if role == "target":
        sys.stdin.read()
    else:
        _work(engine, f"127.0.0.1:{target[0]}", int(target[1]))
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    main()
