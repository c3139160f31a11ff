"""A proxy that ends TLS before a server that has none, as an operator's would."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.transports import connect, listen
from kvferry.transports.base import Connection

__all__ = ["TlsProxy"]

_FAR_S: Final = 3600.0
_CONNECT_S: Final = 5.0
_JOIN_S: Final = 5.0
_CHUNK_NBYTES: Final = 256 << 10


class TlsProxy:
    """Listens on TLS on a free loopback port and forwards the bytes of each connection to ``target``.

    Two threads a connection. All end with :meth:`close`.

    Args:
        target: URL of the server behind it.
        options: Of the ``tls`` listener, as in its URL: ``cert=…&key=…&client_ca=…``.
    """

    def __init__(self, target: str, options: str) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._listener = listen(f"tls://127.0.0.1:0?{options}")
        self.address = self._listener.address.partition("?")[0]
        self._start(self._accept)

    def __enter__(self) -> TlsProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, name="kvferry-tls-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client = self._listener.accept(deadline_in(_FAR_S))
            except KVFerryError:
                continue  # closed, or a handshake that failed
            try:
                server = connect(self._target, deadline_in(_CONNECT_S))
            except KVFerryError:
                client.abort()
                continue
            with self._lock:
                if self._closed:
                    client.abort()
                    server.abort()
                    return
                self._connections += [client, server]
                self._start(self._pump, client, server)
                self._start(self._pump, server, client)

    def _pump(self, source: Connection, sink: Connection) -> None:
        chunk = memoryview(bytearray(_CHUNK_NBYTES))
        with contextlib.suppress(KVFerryError):
            while True:
                nbytes = source.recv_at_least(chunk, 1, deadline_in(_FAR_S))
                sink.send([chunk[:nbytes]], deadline_in(_FAR_S))
        source.abort()
        sink.abort()

    def close(self) -> None:
        """End everything."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                connection.abort()
        self._listener.close()
        for thread in self._threads:
            thread.join(_JOIN_S)
