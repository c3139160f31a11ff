"""What the operating system gives this process: versions, limits, memory, and the native kernels."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from kvferry.core.arena import available_memory
from kvferry.core.diagnosis import Finding, Probe
from kvferry.core.errors import ConfigError, StoreError
from kvferry.core.native import native
from kvferry.core.placement import HUGEPAGE_NBYTES, Placement, free_hugepages, numa_nodes
from kvferry.core.units import format_nbytes

__all__ = ["host_probes", "memory_limit"]

_MIN_FILES: Final = 4096
_PIN_NBYTES: Final = 1 << 20
_SMALL_SHM_NBYTES: Final = 1 << 30
_UNLIMITED: Final = 1 << 60
_V1_ROOT: Final = Path("/sys/fs/cgroup/memory")
_V2_ROOT: Final = Path("/sys/fs/cgroup")
_CGROUP: Final = Path("/proc/self/cgroup")
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")
_POOL: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_RDMA: Final = Path("/sys/class/infiniband")
_SHM: Final = Path("/dev/shm")  # noqa: S108 - only looked at
_CLOCK: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_GOOD_CLOCKS: Final = frozenset({"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"})


def host_probes(
    *, dram_nbytes: int, hugepages: bool, numa_node: int | None, other_nbytes: int = 0
) -> list[tuple[str, str, Probe]]:
    """Probes of the host.

    Args:
        dram_nbytes: Memory for blocks that the configuration asks for.
        hugepages: Whether it asks for 2 MiB pages.
        numa_node: The node that it asks for.
        other_nbytes: Memory that it asks for beside.
    """
    return [
        ("versions", "versions", _versions),
        ("cpu", "native kernels", _kernels),
        ("limits", "open files", _open_files),
        ("limits", "locked memory", _locked),
        ("memory", "memory", lambda: _memory(0 if hugepages else dram_nbytes, other_nbytes)),
        ("memory", "shared memory", _shared),
        ("memory", "2 MiB pages", lambda: _hugepages(dram_nbytes if hugepages else 0)),
        ("memory", "NUMA", lambda: _numa(numa_node)),
        ("cpu", "clock", _clock),
    ]


def _read(path: Path) -> str:
    """The text of a file of the kernel; empty if there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "kvferry", _version("kvferry") or "not installed, run from its source")
    yield Finding("versions", "Python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield Finding("versions", "kernel", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Finding(
        "versions", "torch", _version("torch") or "not installed",
        why="the reference engine and device memory need it, the daemon does not",
    )  # fmt: skip


def _kernels() -> Iterator[Finding]:
    why = "codecs and copies past the caches run several times as fast in it as in numpy"
    try:
        found = native()
    except ConfigError as error:
        yield Finding("cpu", "native kernels", str(error), "fail", why, "unset KVFERRY_NATIVE")
        return
    if found.library is None:
        yield Finding("cpu", "native kernels", "none, numpy instead", "warn", why, found.reason)
    else:
        yield Finding("cpu", "native kernels", f"{found.instructions} ({found.path})", why=why)
    flags = set(_read(Path("/proc/cpuinfo")).replace(":", " ").split())
    named = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512bw": "AVX-512BW", "asimd": "NEON", "sve": "SVE"}
    sets = [name for flag, name in named.items() if flag in flags]
    yield Finding("cpu", "cores", f"{len(os.sched_getaffinity(0))} usable, {', '.join(sets) or 'no vectors'}")


def _clock() -> Iterator[Finding]:
    source = _read(_CLOCK)
    why = "every deadline and measurement reads the clock; a slow source costs a system call each time"
    if source and source not in _GOOD_CLOCKS:
        yield Finding(
            "cpu", "clock source", source, "warn", why,
            f"if the kernel lists tsc as available: echo tsc | sudo tee {_CLOCK}",
        )  # fmt: skip
    else:
        yield Finding("cpu", "clock source", source or "not known", why=why)


def _limit(kind: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(kind)
    return tuple(_UNLIMITED if v == resource.RLIM_INFINITY else v for v in (soft, hard))  # type: ignore[return-value]


def _size(nbytes: int) -> str:
    return "unlimited" if nbytes >= _UNLIMITED else format_nbytes(nbytes)


def _open_files() -> Iterator[Finding]:
    soft, hard = _limit(resource.RLIMIT_NOFILE)
    why = "each connection, lane, segment and shard of a disk tier holds a file open"
    text = (
        f"{'unlimited' if soft >= _UNLIMITED else soft} (hard {'unlimited' if hard >= _UNLIMITED else hard})"
    )
    if soft < _MIN_FILES:
        remedy = f"ulimit -n {min(hard, 65536)}"
        if hard < _MIN_FILES:
            remedy = "raise the hard limit: LimitNOFILE=65536 (systemd), --ulimit nofile=65536 (container)"
        yield Finding("limits", "open files", text, "warn", why, remedy)
    else:
        yield Finding("limits", "open files", text, why=why)


def _locked() -> Iterator[Finding]:
    soft, hard = _limit(resource.RLIMIT_MEMLOCK)
    why = "RDMA and copies to devices need memory that is pinned; registering it fails beyond this limit"
    remedy = "ulimit -l unlimited (container: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
    text = f"{_size(soft)} (hard {_size(hard)})"
    if soft >= _UNLIMITED:
        yield Finding("limits", "locked memory", text, why=why)
    else:  # nothing needs it where there is no RDMA
        used = _RDMA.is_dir() and any(_RDMA.iterdir())
        yield Finding("limits", "locked memory", text, "warn" if used else "ok", why, remedy)
    problem = _try_pinning()
    if problem:
        yield Finding("limits", "pinning", problem, "warn", why, remedy)
    else:
        yield Finding("limits", "pinning", f"{_size(_PIN_NBYTES)} were pinned in a trial", why=why)


def _try_pinning() -> str:
    """Pin a little; why that fails, empty if it works."""
    with mmap.mmap(-1, _PIN_NBYTES) as memory:
        byte = ctypes.c_char.from_buffer(memory)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            address = ctypes.c_void_p(ctypes.addressof(byte))
            if libc.mlock(address, ctypes.c_size_t(_PIN_NBYTES)):
                code = ctypes.get_errno()
                return f"{_size(_PIN_NBYTES)} could not be pinned: {os.strerror(code)}"
            libc.munlock(address, ctypes.c_size_t(_PIN_NBYTES))
        finally:
            del byte  # else the mapping could not be closed
    return ""


# -- memory ------------------------------------------------------------------------------------------------


def memory_limit() -> tuple[int, int] | None:
    """(limit, used) of the control group of this process that has the least room; ``None`` without any."""
    rooms: list[tuple[int, int, int]] = []
    for line in _read(_CGROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _V1_ROOT if controllers else _V2_ROOT
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            limit, used = (_read(place / f"memory.{name}") for name in names)
            if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
                rooms.append((int(limit) - int(used), int(limit), int(used)))
    return min(rooms)[1:] if rooms else None


def _memory(dram_nbytes: int, other_nbytes: int) -> Iterator[Finding]:
    try:
        free = available_memory()
    except (StoreError, OSError) as error:
        yield Finding("memory", "available", str(error), "warn", "nothing is known about it", "mount /proc")
        return
    group = memory_limit()
    yield Finding("memory", "available", format_nbytes(free), why="an arena larger than this is refused")
    if group is not None:
        limit, used = group
        yield Finding(
            "memory", "control group", f"{format_nbytes(used)} of {format_nbytes(limit)} used",
            why="beyond it the kernel ends processes; page cache counts, and goes first",
        )  # fmt: skip
        free = min(free, limit)
    asked = dram_nbytes + other_nbytes
    text = f"{format_nbytes(asked)} for blocks and paged KV"
    why = "the configuration asks for it (store.dram_capacity, kv.memory)"
    if dram_nbytes > free or asked > free:
        yield Finding(
            "memory", "asked for", f"{text}, {format_nbytes(free)} can be had", "fail", why,
            "lower store.dram_capacity or kv.memory, or give this process more memory",
        )  # fmt: skip
    else:
        yield Finding("memory", "asked for", text, why=why)


def _shared() -> Iterator[Finding]:
    why = "segments of an arena are memfds, which clients of this machine map"
    try:
        fd = os.memfd_create("kvferry-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, mmap.PAGESIZE)
        os.close(fd)
    except (OSError, AttributeError) as error:
        remedy = "use a kernel of 4.14 or newer, and a seccomp profile that allows memfd_create"
        yield Finding("memory", "memfd", f"cannot be made: {error}", "fail", why, remedy)
    else:
        limit = _limit(resource.RLIMIT_FSIZE)[0]
        if limit < _UNLIMITED:
            text = f"works, up to {format_nbytes(limit)} each, the limit of the size of files"
            remedy = "ulimit -f unlimited (systemd: LimitFSIZE=infinity)"
            yield Finding("memory", "memfd", text, "warn", why, remedy)
        else:
            yield Finding("memory", "memfd", "works; its size is limited by memory alone", why=why)
    why, remedy = (
        "UCX and torch keep shared memory in it; kvferry's own needs none",
        "container: --shm-size=8g",
    )
    try:
        shm = os.statvfs(_SHM)
    except OSError as error:
        yield Finding("memory", str(_SHM), f"not there: {error.strerror}", "warn", why, remedy)
        return
    size, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    text = f"{format_nbytes(free)} of {format_nbytes(size)} free"
    if size < _SMALL_SHM_NBYTES:
        yield Finding("memory", str(_SHM), text, "warn", why, remedy)
    else:
        yield Finding("memory", str(_SHM), text, why=why)


def _hugepages(asked_nbytes: int) -> Iterator[Finding]:
    why = "fewer translations: faster copies, and faster registering with a NIC"
    free, total = free_hugepages(), _read(_POOL / "nr_hugepages")
    reserved = _read(_POOL / "resv_hugepages")
    text = "no such pool" if free is None else f"{total} in the pool, {free} free, {reserved} promised"
    if asked_nbytes:
        try:
            Placement(hugepages=True).check(asked_nbytes)
        except ConfigError as error:
            pages = -(-asked_nbytes // HUGEPAGE_NBYTES)
            remedy = f"sudo sysctl vm.nr_hugepages={pages}, or store.hugepages=false"
            yield Finding("memory", "2 MiB pages", f"{text}: {error}", "fail", why, remedy)
            return
    yield Finding("memory", "2 MiB pages", text, why=why)
    chosen = _read(_THP / "shmem_enabled").partition("[")[2].partition("]")[0]
    yield Finding(
        "memory", "transparent pages of shared memory", chosen or "not there",
        why="with advise or always an arena gets 2 MiB pages without a pool",
    )  # fmt: skip


def _numa(asked: int | None) -> Iterator[Finding]:
    nodes = numa_nodes()
    why = "memory on the node of the NIC and the device is read and written at full speed"
    text = f"{len(nodes)} ({', '.join(map(str, nodes))})"
    if asked is not None:
        try:
            Placement(numa_node=asked).check(0)
        except ConfigError as error:
            yield Finding("memory", "NUMA nodes", f"{text}: {error}", "fail", why, "unset store.numa_node")
            return
    yield Finding("memory", "NUMA nodes", text, why=why)
