"""The cache daemon: one a node, shared by its engines and by peers."""

from kvferry.daemon.node import Daemon

__all__ = ["Daemon"]
