"""What systemd is told of the daemon (``sd_notify``); nothing where it did not start it."""

from __future__ import annotations

import logging
import os
import socket

__all__ = ["notify"]

log = logging.getLogger(__name__)


def notify(*lines: str) -> bool:
    """Send lines such as ``READY=1`` to the service manager; whether there is one that takes them."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), address)
    except OSError as error:
        log.warning("systemd could not be told %s: %s", lines[0], error.strerror)
        return False
    return True
