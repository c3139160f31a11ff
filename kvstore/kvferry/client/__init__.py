"""Clients of the cache daemon: :class:`Client` blocks, :class:`AsyncClient` is the same for asyncio."""

from kvferry.client.aio import AsyncClient, AsyncJob, AsyncView
from kvferry.client.client import Client, default_url
from kvferry.client.leases import ClientReadLease, ClientWriteLease
from kvferry.client.load_job import LoadJob
from kvferry.client.mover import BlockMover
from kvferry.client.namespace import ClientNamespace
from kvferry.client.options import ClientCounters, ClientOptions
from kvferry.client.raw import RawBlocks
from kvferry.client.registration import Registration
from kvferry.client.save_job import SaveJob

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncView",
    "BlockMover",
    "Client",
    "ClientCounters",
    "ClientNamespace",
    "ClientOptions",
    "ClientReadLease",
    "ClientWriteLease",
    "LoadJob",
    "RawBlocks",
    "Registration",
    "SaveJob",
    "default_url",
]
