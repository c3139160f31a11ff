"""Bytes of any kind to a port that should stand them."""

from __future__ import annotations

import errno
import socket

from kvferry.core.address import parse_url

__all__ = ["answer_to"]

_HUNG_UP = (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)


def answer_to(url: str, data: bytes) -> bytes:
    """Connect to ``url``, of a unix or TCP socket, send ``data`` and the end, and read until it hangs up.

    Returns:
        What came back.

    Raises:
        TimeoutError: If nothing moves for a minute.
    """
    came, address = bytearray(), parse_url(url, default_port=0)
    unix = url.startswith("unix:")
    with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as sock:
        sock.settimeout(60)
        sock.connect(url.removeprefix("unix://") if unix else (address.host, address.port))
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while got := sock.recv(1 << 18):
                came += got
        except OSError as error:
            if error.errno not in _HUNG_UP:
                raise
    return bytes(came)
