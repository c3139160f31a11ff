"""Clients of the cache daemon: :class:`Client` blocks, :class:`AsyncClient` is the same for asyncio."""

from kvferry.client.aio import AsyncClient, AsyncView
from kvferry.client.client import Client, default_url
from kvferry.client.leases import ClientReadLease, ClientWriteLease
from kvferry.client.namespace import ClientNamespace
from kvferry.client.options import ClientCounters, ClientOptions

__all__ = [
    "AsyncClient",
    "AsyncView",
    "Client",
    "ClientCounters",
    "ClientNamespace",
    "ClientOptions",
    "ClientReadLease",
    "ClientWriteLease",
    "default_url",
]
