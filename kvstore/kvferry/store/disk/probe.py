"""Whether O_DIRECT works in a directory, and whether it pays there: measured once, at the start.

Compared is what a cache does: writes that reach the device, and reads of what is not in the page cache any
more. A file system in memory, or one that ignores hints, comes out better without. O_DIRECT leaves memory and
processors to others, so it is taken unless it is clearly slower: by the median of rounds in which both ways
take turns, of which there are more where the first do not agree.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from kvferry.core.buffers import page_aligned
from kvferry.store.disk.files import DIRECT, Files, read_parts, reason_of, write_parts
from kvferry.store.disk.names import PROBE_NAME

__all__ = ["PROBE_NBYTES", "Probe", "probe_direct", "probe_writes"]

PROBE_NBYTES: Final = 2 << 20
"""What the probe may take up for a moment."""

_NBYTES: Final = 1 << 20
_LEAST_ROUNDS: Final = 3
_MOST_ROUNDS: Final = 9
_WORTH_IT: Final = 0.75  # of the speed of the other way; virtual devices vary by more than a tenth
_WAYS: Final = ("read", "write")


class Probe(NamedTuple):
    """What was found.

    Attributes:
        read: Whether reads should go past the page cache.
        write: Whether writes should.
        text: For people: the figures, or why not.
    """

    read: bool
    write: bool
    text: str


def probe_direct(files: Files, root: int) -> Probe:
    """Measure both ways in the directory ``root``; takes 10 to 100 milliseconds and 1 MiB for a moment."""
    if not DIRECT:
        return Probe(False, False, "this system has no O_DIRECT")
    data = page_aligned(_NBYTES)
    try:
        with contextlib.suppress(FileNotFoundError):
            files.unlink(PROBE_NAME, root)
        seconds = _measure(files, root, data)
    except OSError as error:
        return Probe(False, False, f"not used: {reason_of(error)}")
    finally:
        with contextlib.suppress(OSError):
            files.unlink(PROBE_NAME, root)
    speed = {name: f"{_NBYTES / statistics.median(found) / 1e9:.2f} GB/s" for name, found in seconds.items()}
    reads = f"reads {speed['read']} direct, {speed['cached read']} cached"
    text = f"{reads}; writes {speed['write']} direct, {speed['cached write']} cached"
    read, write = (_pays(_gains(seconds, way)) for way in _WAYS)
    return Probe(read, write, text)


def _gains(seconds: Mapping[str, Sequence[float]], way: str) -> list[float]:
    """Speed of O_DIRECT over that of the page cache, round by round."""
    return [cached / direct for direct, cached in zip(seconds[way], seconds[f"cached {way}"], strict=True)]


def _pays(gains: Sequence[float]) -> bool:
    return statistics.median(gains) >= _WORTH_IT


def _agree(gains: Sequence[float]) -> bool:
    return len({gain >= _WORTH_IT for gain in gains}) == 1


def probe_writes(files: Files, root: int, nbytes: int, *, durable: bool) -> None:
    """Write a file of so many bytes in the directory ``root``, and remove it.

    Args:
        files: System calls.
        root: Descriptor of the directory.
        nbytes: Size of the file.
        durable: Whether it has to reach the device.

    Raises:
        OSError: If any of that fails.
    """
    with contextlib.suppress(FileNotFoundError):
        files.unlink(PROBE_NAME, root)
    fd = files.create(PROBE_NAME, root)
    try:
        chunk = page_aligned(min(nbytes, _NBYTES))
        whole, rest = divmod(nbytes, len(chunk)) if nbytes else (0, 0)
        write_parts(files, fd, [*[chunk] * whole, chunk[:rest]])
        if durable:
            files.sync_data(fd)
    finally:
        with contextlib.suppress(OSError):  # takes up nothing, should it have to stay
            os.ftruncate(fd, 0)
        files.close(fd)
        files.unlink(PROBE_NAME, root)


def _write_synced(files: Files, fd: int, data: memoryview) -> None:
    write_parts(files, fd, [data])
    files.sync_data(fd)


def _measure(files: Files, root: int, data: memoryview) -> dict[str, list[float]]:
    """Seconds of each way, round by round."""
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        seconds.setdefault(name, []).append(max(time.perf_counter() - start, 1e-9))

    cached = files.create(PROBE_NAME, root)
    try:
        direct, _ = files.open_read(PROBE_NAME, root, os.O_RDWR | DIRECT)
        try:
            write_parts(files, cached, [data])  # allocates: what follows rewrites in place, both ways alike
            files.sync_data(cached)
            for number in range(_MOST_ROUNDS):
                if number >= _LEAST_ROUNDS and all(_agree(_gains(seconds, way)) for way in _WAYS):
                    break
                timed("write", lambda: write_parts(files, direct, [data]))
                timed("cached write", lambda: _write_synced(files, cached, data))
                timed("read", lambda: read_parts(files, direct, [data]))
                os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_DONTNEED)
                timed("cached read", lambda: read_parts(files, cached, [data]))
        finally:
            files.close(direct)
    finally:
        files.close(cached)
    return seconds
