"""``transport.unix.arena``: a block of another process, seen through its shared arena.

Two figures. *available*: from the request for a lease to the view of a block, whose size must not matter; it
stands beside the same for a small block, and beside a bare unix socket that carries as many bytes both ways.
*first read*: every byte of a block that was filled after its segment was mapped, read for the first time
through a map of its own, beside memory of this process.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from itertools import count

import msgspec
import numpy as np
import xxhash

from kvferry import transports
from kvferry.bench.arena_peer import FILL, LEASE, RELEASE, ArenaPeer, arena_options, fill_block, read_ticket
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.registry import Options
from kvferry.bench.results import Param, Result, Sample, percentile, summarise
from kvferry.core.arena import available_memory
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, CorruptBlockError
from kvferry.core.leases import MappedReadLease
from kvferry.core.units import format_nbytes, parse_nbytes
from kvferry.wire import Channel, SharedArena

__all__ = ["SCENARIO", "parse_block", "run"]

SCENARIO = "transport.unix.arena"
_SMALL_NBYTES = 64 << 10
_LARGE = "256MiB"
_COPIES = 3  # in the arena, as what is expected, and as memory of one's own
_REQUESTS = 200
_WAIT_S = 60.0


def run(options: Options, progress: Progress) -> Iterator[Result]:
    """Both figures; parameters ``block`` (its size), ``requests`` (a run)."""
    nbytes = parse_block(options.param("block", _LARGE))
    params: dict[str, Param] = {"transport": "unix", "nbytes": nbytes, "cpus": os.cpu_count() or 1}
    peer = ArenaPeer([_SMALL_NBYTES, nbytes])
    try:
        reader = _Reader(peer, nbytes)
        try:
            yield _available(options, progress, reader, params)
            yield _first_read(options, progress, reader, params)
        finally:
            reader.close()
    finally:
        peer.close()


def parse_block(text: str | float) -> int:
    """Bytes of the block.

    Raises:
        ConfigError: If it is malformed, not above the one it stands beside, or more than memory holds.
    """
    nbytes, most = parse_nbytes(text), available_memory() // _COPIES
    if nbytes <= _SMALL_NBYTES:
        raise ConfigError(
            f"--block {nbytes}: it stands beside one of {_SMALL_NBYTES} bytes, take a larger one"
        )
    if nbytes > most:
        raise ConfigError(
            f"--block {nbytes}: it is held {_COPIES} times, for which {most} bytes are available; take "
            "a smaller one"
        )
    return nbytes


class _Reader:
    """A client of the owner."""

    def __init__(self, peer: ArenaPeer, nbytes: int) -> None:
        self.nbytes = nbytes
        self._peer = peer
        deadline = deadline_in(_WAIT_S)
        self._channel = Channel.connect(peer.url("arena"), arena_options("reader"), deadline)
        self._leases = transports.connect(peer.url("lease"), deadline)
        self._raw = socket.socket(socket.AF_UNIX)
        self._raw.settimeout(_WAIT_S)
        self._raw.connect(str(peer.folder / "raw"))
        self._seeds = count(1)
        self.arena = SharedArena()
        self.attach()
        self.answer_nbytes = 0

    def attach(self) -> None:
        """A new map of the arena."""
        self.arena = SharedArena()
        self.arena.attach(self._channel, deadline_in(_WAIT_S))

    def lease(self, number: int) -> MappedReadLease:
        """Ask for a block."""
        self._leases.send([LEASE + bytes([number])], deadline_in(_WAIT_S))
        return MappedReadLease(self.arena.map, read_ticket(self._leases))

    def release(self, number: int) -> None:
        """Give it back."""
        self._leases.send([RELEASE + bytes([number])], deadline_in(_WAIT_S))

    def available(self, number: int, requests: int) -> Sample:
        """From the request to the view of a block, again and again."""
        taken = []
        for _ in range(requests):
            started = time.perf_counter()
            lease = self.lease(number)
            view = lease.view(0)
            taken.append(time.perf_counter() - started)
            assert len(view) in (_SMALL_NBYTES, self.nbytes)
            lease.check()
            self.release(number)
        return Sample(sum(taken), latencies=tuple(taken))

    def bare(self, requests: int) -> Sample:
        """As many bytes both ways over a bare socket."""
        nbytes = self.answer_nbytes
        taken = []
        for _ in range(requests):
            started = time.perf_counter()
            self._raw.sendall(nbytes.to_bytes(2, "little"))
            left = nbytes
            while left:
                left -= len(self._raw.recv(left))
            taken.append(time.perf_counter() - started)
        return Sample(sum(taken), latencies=tuple(taken))

    def first_read(self) -> Sample:
        """Map, then have the block filled, then read it for the first time."""
        self.attach()
        seed = next(self._seeds) % 256
        self._leases.send([FILL + bytes([1, seed])], deadline_in(_WAIT_S))
        self._leases.recv_into([memoryview(bytearray(1))], deadline_in(_WAIT_S))
        lease = self.lease(1)
        sample = _read(lease.view(0))
        expected = page_aligned(self.nbytes)
        fill_block(expected, seed)
        if xxhash.xxh3_64_intdigest(lease.view(0)) != xxhash.xxh3_64_intdigest(expected):
            raise CorruptBlockError(f"{SCENARIO}: the block has other bytes than its owner wrote")
        lease.check()
        self.release(1)
        return sample

    def close(self) -> None:
        self._raw.close()
        self._leases.close()
        self._channel.close()


def _read(view: memoryview) -> Sample:
    """Every byte of ``view``."""
    words = np.frombuffer(view, np.uint64)
    started = time.perf_counter()
    np.bitwise_xor.reduce(words)
    return Sample(time.perf_counter() - started, len(view))


def _available(options: Options, progress: Progress, reader: _Reader, params: dict[str, Param]) -> Result:
    requests = int(options.param("requests", _REQUESTS))
    lease = reader.lease(1)
    reader.answer_nbytes = 2 + len(msgspec.msgpack.encode(lease.ticket))
    reader.release(1)
    small = f"block_{format_nbytes(_SMALL_NBYTES).replace(' ', '')}"
    samples = run_paired(
        {
            "subject": lambda: reader.available(1, requests),
            small: lambda: reader.available(0, requests),
            "raw_unix": lambda: reader.bare(requests),
        },
        runs=options.runs,
        warmup=options.warmup,
        progress=progress,
        label=f"{SCENARIO} available",
    )
    values = {name: [percentile(s.latencies, 0.5) * 1e6 for s in found] for name, found in samples.items()}
    return summarise(
        SCENARIO,
        {"figure": "available", **params, "requests": requests},
        "us",
        values,
        samples=samples["subject"],
        verified=False,
    )


def _first_read(options: Options, progress: Progress, reader: _Reader, params: dict[str, Param]) -> Result:
    own = page_aligned(reader.nbytes)
    fill_block(own, 0)
    samples = run_paired(
        {"subject": reader.first_read, "own_memory": lambda: _read(own)},
        runs=options.runs,
        warmup=options.warmup,
        progress=progress,
        label=f"{SCENARIO} first read",
    )
    values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
    return summarise(
        SCENARIO,
        {"figure": "first_read", **params},
        "GB/s",
        values,
        samples=samples["subject"],
        verified=True,
    )
