"""The ``ucx`` transport: ``ucx://host:port?tls=rc,tcp&net_devices=mlx5_0:1&require=rdma``, through UCXX.

Needs the extra ``ucx``. Importing this package loads nothing of UCX; using an address does.
"""

from __future__ import annotations

from kvferry.transports.ucx.context import Setting, UcxReport, effective_settings
from kvferry.transports.ucx.rdma import rdma_remedy
from kvferry.transports.ucx.transport import UcxTransport

__all__ = ["Setting", "UcxReport", "UcxTransport", "effective_settings", "rdma_remedy"]
