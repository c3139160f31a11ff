"""Why this host has no RDMA, and what to do about it: for messages and for ``kvferry doctor``."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["kind_of", "kinds", "rdma_remedy"]

_RDMA_PREFIXES = ("rc", "dc", "ud", "srd", "gga")
_SHM_NAMES = frozenset({"posix", "sysv", "xpmem", "cma", "knem"})
_DEVICES = Path("/sys/class/infiniband")
_NODES = Path("/dev/infiniband")


def kind_of(transport: str) -> str:
    """``rdma``, ``shm`` or ``tcp`` for the name that UCX has for a transport, else that name.

    >>> kind_of("rc_mlx5"), kind_of("cma"), kind_of("tcp")
    ('rdma', 'shm', 'tcp')
    """
    if transport in _SHM_NAMES:
        return "shm"
    if transport.partition("_")[0] in _RDMA_PREFIXES:
        return "rdma"
    return transport


def kinds(transports: Iterable[str]) -> set[str]:
    """The kinds among the names of transports."""
    return {kind_of(name) for name in transports}


def rdma_devices() -> list[str]:
    """The RDMA devices that the kernel shows."""
    try:
        return sorted(entry.name for entry in _DEVICES.iterdir())
    except OSError:
        return []


def rdma_remedy(tls: str, net_devices: str, ucx_path: str) -> str:
    """What keeps UCX from RDMA here and how to change it, the most likely first.

    Args:
        tls: The transports that UCX was told to use, as in ``UCX_TLS``.
        net_devices: The same for devices.
        ucx_path: The file of libucp; its modules lie beside it.
    """
    devices = rdma_devices()
    if not devices:
        return (
            f"the kernel shows no RDMA device ({_DEVICES} is empty or missing): install the NIC's driver "
            "(rdma-core, or the vendor's), or use tcp"
        )
    found = f"the kernel shows {', '.join(devices)}"
    if not any(os.access(node, os.R_OK | os.W_OK) for node in _NODES.glob("uverbs*")):
        return (
            f"{found}, but no {_NODES}/uverbs* can be opened: in a container pass --device={_NODES} and "
            "--ulimit memlock=-1"
        )
    if ucx_path and not any(Path(ucx_path).parent.glob("ucx/libuct_ib*.so*")):
        return (
            f"{found}, but the UCX in {Path(ucx_path).parent} was built without RDMA (no ucx/libuct_ib.so), "
            "as that of the wheel is: install a UCX of the system that has it (1.19 or newer) and set "
            "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
        )
    if ctypes.util.find_library("ibverbs") is None:
        return f"{found}, but libibverbs is not installed: apt-get install rdma-core libibverbs1"
    if tls != "all" or net_devices != "all":
        return (
            f"{found}, but UCX is told to use TLS={tls} and NET_DEVICES={net_devices}: leave them away, or "
            "name an RDMA transport (rc, ud, dc) and its device"
        )
    return f"{found}, but UCX takes none: UCX_LOG_LEVEL=info says why (port down, memlock limit)"
