"""Windows of a region transport as a subject: ``python -m kvferry.bench.link.windows`` owns the memory."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

from kvferry.bench.results import Sample
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import TransportError
from kvferry.transports.mooncake import MooncakeRegions, shared_memory
from kvferry.transports.region import RegionPart

__all__ = ["MooncakeWindows"]

_WAIT_S = 60.0
_PEERS = ("127.0.0.1",)


class MooncakeWindows:
    """Writes into a window of another process, or reads from one, a batch at a time.

    Args:
        nbytes: Of a part.
        walk_nbytes: What each end walks through.
    """

    def __init__(self, nbytes: int, walk_nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory = page_aligned(walk_nbytes)
        self._position = 0
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvferry.bench.link.windows", str(walk_nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._child.stdout is not None
        self._to_write, self._to_read = (bytes.fromhex(self._child.stdout.readline()) for _ in range(2))
        if not self._to_read:
            raise TransportError(f"the owner of the windows ended with code {self._child.wait(_WAIT_S)}")
        self._regions = MooncakeRegions(trusted_peers=_PEERS)

    def run(self, operation: str, batch: int, count: int) -> Sample:
        """``count`` batches of ``batch`` parts, one after the other; ``operation`` is write or read."""
        start = time.perf_counter()
        for _ in range(count):
            self._move(operation, self._next(batch))
        return Sample(time.perf_counter() - start, count * batch * self._nbytes)

    def verify(self) -> bool:
        """Write random bytes everywhere, read them back, and compare."""
        whole = np.frombuffer(self._memory, np.uint8)
        whole[:] = np.random.default_rng(1).integers(0, 256, len(whole), np.uint8)
        expected = whole.copy()
        offsets = list(range(0, len(whole) - self._nbytes + 1, self._nbytes))
        self._move("write", offsets)
        whole[:] = 0
        self._move("read", offsets)
        end = len(offsets) * self._nbytes
        return bool(np.array_equal(whole[:end], expected[:end]))

    def _next(self, batch: int) -> list[int]:
        slots = max(1, len(self._memory) // self._nbytes)
        found = [(self._position + n) % slots * self._nbytes for n in range(batch)]
        self._position = (self._position + batch) % slots
        return found

    def _move(self, operation: str, offsets: list[int]) -> None:
        parts = [RegionPart(self._memory[at : at + self._nbytes], at) for at in offsets]
        if operation == "write":
            transfer = self._regions.write(self._to_write, parts)
        else:
            transfer = self._regions.read(self._to_read, parts)
        transfer.wait(deadline_in(_WAIT_S))

    def close(self) -> None:
        """End the owner."""
        self._regions.close()
        self._child.kill()
        self._child.communicate(timeout=_WAIT_S)


def main() -> None:
    """Own memory with a window to write and one to read, until standard input closes."""
    memory = shared_memory(int(sys.argv[1]))
    regions = MooncakeRegions(trusted_peers=_PEERS)
    windows = [regions.open_window(memory, access) for access in ("write", "read")]
    sys.stdout.write("".join(f"{window.grant.hex()}\n" for window in windows))
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
