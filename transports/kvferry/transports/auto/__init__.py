"""The ``auto`` transport: ``auto://host:port?require=rdma&fallback=tcp&lanes=4&rate=1GB/s``.

A listener takes TCP on its port, and beside it what else it has: a ``unix`` socket for processes of the same
host, ``ucx`` where there is RDMA. Who dials asks on the port what there is, and takes the best of what both
have. A peer that dials the port with ``tcp`` is served as by a ``tcp`` listener.
"""

from __future__ import annotations

from kvferry.transports.auto.connection import AutoConnection, AutoSharedConnection
from kvferry.transports.auto.listener import AutoListener
from kvferry.transports.auto.transport import AutoTransport

__all__ = ["AutoConnection", "AutoListener", "AutoSharedConnection", "AutoTransport"]
