"""Where the memory of an arena comes from: 2 MiB pages, and a NUMA node."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.values import require_bool, require_whole

__all__ = ["ANYWHERE", "HUGEPAGE_NBYTES", "Placement", "free_hugepages", "numa_nodes"]

HUGEPAGE_NBYTES = 2 << 20
_MFD_HUGETLB = 0x4  # <linux/memfd.h>; the os module names them only where the libc does
_MFD_HUGE_2MB = 21 << 26
_MPOL_BIND = 2  # <linux/mempolicy.h>
_MAX_NODES = 1024
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_NODES = Path("/sys/devices/system/node")


def free_hugepages() -> int | None:
    """Pages of 2 MiB that the kernel has set aside and not given away; ``None`` if it has no such pool."""
    try:
        free = int((_POOL / "free_hugepages").read_text(encoding="ascii"))
        return free - int((_POOL / "resv_hugepages").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def numa_nodes() -> list[int]:
    """Numbers of the NUMA nodes; node 0 alone where the kernel does not say."""
    found = [p.name[4:] for p in _NODES.glob("node[0-9]*")] if _NODES.is_dir() else []
    return sorted(int(number) for number in found if number.isdigit()) or [0]


@dataclass(frozen=True, slots=True)
class Placement:
    """How segments are placed.

    Attributes:
        hugepages: Take 2 MiB pages from the kernel's pool.
        numa_node: Node that the memory must lie on; ``None``: as the kernel likes.
    """

    hugepages: bool = False
    numa_node: int | None = None

    def __post_init__(self) -> None:
        require_bool("hugepages", self.hugepages)
        if self.numa_node is not None:
            require_whole("numa_node", self.numa_node, least=0)

    @property
    def granule_nbytes(self) -> int:
        """Sizes of segments are multiples of it."""
        return HUGEPAGE_NBYTES if self.hugepages else mmap.PAGESIZE

    @property
    def memfd_flags(self) -> int:
        """Flags for ``memfd_create`` besides the usual ones."""
        return _MFD_HUGETLB | _MFD_HUGE_2MB if self.hugepages else 0

    def check(self, capacity_nbytes: int) -> None:
        """See whether it can be had for an arena of that size.

        Raises:
            ConfigError: If not; the message has the figures and what to change.
        """
        if self.numa_node is not None:
            if self.numa_node not in numa_nodes():
                raise ConfigError(
                    f"numa_node is {self.numa_node}, this host has {numa_nodes()}; choose one or unset it"
                )
            self._try_bind()
        if not self.hugepages:
            return
        free = free_hugepages()
        if free is None:
            raise ConfigError("hugepages: this kernel has no pool of 2 MiB pages; turn hugepages off")
        if capacity_nbytes < HUGEPAGE_NBYTES or capacity_nbytes > free * HUGEPAGE_NBYTES:
            raise ConfigError(
                f"hugepages: an arena of {capacity_nbytes} bytes was asked, {free} free pages of 2 MiB are "
                f"{free * HUGEPAGE_NBYTES} bytes; raise vm.nr_hugepages, lower the capacity (at least one "
                "page), or turn hugepages off"
            )

    def bind(self, mapping: mmap.mmap, nbytes: int) -> None:
        """Bind the pages of a shared mapping to the node, before any of them is touched.

        Raises:
            OSError: If the kernel refuses.
        """
        if self.numa_node is None:
            return
        number = _MBIND.get(platform.machine())
        if number is None:
            raise OSError(0, f"mbind is not known on {platform.machine()}")
        mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
        mask[self.numa_node // 64] = 1 << (self.numa_node % 64)
        byte = ctypes.c_char.from_buffer(mapping)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            failed = libc.syscall(
                ctypes.c_long(number),
                ctypes.c_void_p(ctypes.addressof(byte)),
                ctypes.c_ulong(nbytes),
                ctypes.c_ulong(_MPOL_BIND),
                ctypes.byref(mask),
                ctypes.c_ulong(_MAX_NODES),
                ctypes.c_ulong(0),
            )
        finally:
            del byte  # else the mapping could not be closed
        if failed:
            code = ctypes.get_errno()
            raise OSError(code, f"mbind to node {self.numa_node}: {os.strerror(code)}")

    def _try_bind(self) -> None:
        with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as mapping:
            try:
                self.bind(mapping, mmap.PAGESIZE)
            except OSError as error:
                raise ConfigError(
                    f"numa_node {self.numa_node}: memory cannot be placed: {error.strerror}; unset it"
                ) from error


ANYWHERE = Placement()
