"""What a daemon takes of its machine: memory beside its blocks, and the processor while nobody asks."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.client import Client, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.testing.blocks import small_spec
from kvferry.testing.processes import Command

MIB = 1 << 20
SPEC = small_spec("footprint", pages=256)  # 1 MiB a block


def serve(folder: Path, *more: str) -> Command:
    words = ("serve", "--socket", f"{folder}/d.sock", "--listen", "none", "--http", "http://127.0.0.1:0")
    return Command(*words, *more)


def rss_nbytes(pid: int) -> int:
    """Of a process, shared pages and all, each once."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def cpu_s(pid: int) -> float:
    """Time of processors that the threads of a process have used, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


@pytest.mark.parametrize(
    ("cap", "taken", "shared", "seconds", "share"),
    [
        pytest.param(16 * MIB, 64 * MIB, True, 1.5, 0.1, id="small"),
        pytest.param(64 * MIB, 1024 * MIB, True, 60.0, 0.005, id="mapped", marks=pytest.mark.soak),
        pytest.param(64 * MIB, 1024 * MIB, False, 60.0, 0.005, id="sent", marks=pytest.mark.soak),
    ],
)
def test_it_grows_by_its_blocks_and_rests_when_nobody_asks(
    tmp_path: Path, cap: int, taken: int, shared: bool, seconds: float, share: float
) -> None:
    """C043: blocks of many times the cap come in, go to disk, and are read again; then nothing happens."""
    words = ("--capacity", f"{cap}", "--disk", f"{tmp_path}/disk", "--disk-capacity", f"{2 * cap}")
    with serve(tmp_path, *words) as daemon:
        daemon.wait_ready()
        pid = daemon.process.pid
        before, most, stored = rss_nbytes(pid), 0, 0
        with Client(f"unix://{tmp_path}/d.sock", ClientOptions(share_memory=shared)) as client:
            ns = client.namespace(SPEC)
            first = keys = ns.keys([0] * 4 * SPEC.block_tokens)
            block = np.full(SPEC.block_nbytes, 7, np.uint8)
            for chain in range(taken // (4 * MIB)):
                keys = ns.keys([chain] * 4 * SPEC.block_tokens)
                stored += ns.save([(key, block) for key in keys], parent=None, deadline=deadline_in(60))
                ns.load(keys, deadline=deadline_in(60)).release()
                most = max(most, rss_nbytes(pid) - before)
            assert client.flush(deadline=deadline_in(60))
            most = max(most, rss_nbytes(pid) - before)
            print(f"cap {cap / MIB:.0f} MiB, {taken / MIB:.0f} MiB taken: {most / MIB:.1f} MiB grown")
            assert stored == taken // MIB
            assert (ns.lookup(keys).prefix, ns.lookup(first).prefix) == (4, 0)
            assert cap // 2 <= most <= cap + 40 * MIB
            at_rest = cpu_s(pid)
            time.sleep(seconds)  # what is measured is that nothing happens meanwhile
            used = cpu_s(pid) - at_rest  # of processors, so that load beside it does not count
            print(f"idle, with a client: {100 * used / seconds:.3f} % of a core")
            assert used <= share * seconds
