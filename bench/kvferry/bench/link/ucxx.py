"""Bare UCXX in the pattern of the channels beside it: messages of parts, each answered with one byte.

A TCP connection carries the addresses of the two workers and what is to be done next; it is idle while bytes
move. Both ends progress without sleep then.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvferry.bench.bare_ucxx import BareUcxx
from kvferry.bench.link.memory import LinkMemory, MemoryPool, timed
from kvferry.bench.results import Sample
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, KVFerryError

__all__ = ["UcxxLink", "UcxxServer"]

_WAIT_S = 60.0


class _Control:
    """Lines of JSON over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._file = sock.makefile("rwb")

    def say(self, **what: object) -> None:
        self._file.write(json.dumps(what).encode() + b"\n")
        self._file.flush()

    def hear(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise ConnectionClosedError("the bare UCXX process has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._file.close()
        self.sock.close()


class UcxxLink:
    """The end that measures. One thread at a time.

    Args:
        address: Of the :class:`UcxxServer`.
        config: Options of UCX by name without ``UCX_``.
        window: Messages that are posted at once.
        memory: Of this end; others may use it in turn with this.
        server_cpu_s: Processor seconds of the other end so far.
    """

    def __init__(
        self,
        address: tuple[str, int],
        config: Mapping[str, str],
        window: int,
        memory: LinkMemory,
        *,
        server_cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._memory = memory
        self._nbytes = memory.nbytes
        self._server_cpu_s = server_cpu_s
        self._end = BareUcxx(config, window)
        self._control = _Control(socket.create_connection(address, _WAIT_S))
        self._control.say(
            config=dict(config),
            window=window,
            nbytes=memory.nbytes,
            walk_nbytes=memory.walk_nbytes,
            address=self._end.address.hex(),
        )
        self._end.join(bytes.fromhex(self._control.hear()["address"]))

    def put(self, batch: int, count: int) -> Sample:
        """Messages of ``batch`` parts, each answered with one byte."""
        return self._timed("put", batch, count)

    def get(self, batch: int, count: int) -> Sample:
        """Messages of ``batch`` parts from the other end."""
        return self._timed("get", batch, count)

    def close(self) -> None:
        """End the connection."""
        self._control.close()
        self._end.close()

    def _timed(self, operation: str, batch: int, count: int) -> Sample:
        def failed(error: KVFerryError) -> None:
            raise error

        self._control.say(operation=operation, batch=batch, count=count)
        one = partial(self._put if operation == "put" else self._get, batch)
        calls = (one for _ in range(count))
        sample = timed(calls, failed, lambda: time.process_time() + self._server_cpu_s())
        self._control.hear()
        return sample

    def _put(self, batch: int) -> int:
        self._end.put(self._memory.parts(batch)[1], deadline_in(_WAIT_S))
        return batch * self._nbytes

    def _get(self, batch: int) -> int:
        self._end.take(self._memory.places(batch), deadline_in(_WAIT_S))
        return batch * self._nbytes


class UcxxServer:
    """The other end: serves one connection after the other in a thread. Ends with its process.

    Args:
        host: Where.
        pool: Memory that others use in turn with this.
    """

    def __init__(self, host: str, pool: MemoryPool) -> None:
        self._pool = pool
        self._listener = socket.create_server((host, 0))
        threading.Thread(target=self._accept, name="kvferry-bench-ucxx", daemon=True).start()

    @property
    def port(self) -> int:
        """Of the control connection."""
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            control = _Control(sock)
            with contextlib.suppress(OSError, KVFerryError, ValueError):
                self._serve(control)
            control.close()

    def _serve(self, control: _Control) -> None:
        hello = control.hear()
        end = BareUcxx(hello["config"], hello["window"])
        try:
            end.join(bytes.fromhex(hello["address"]))
            control.say(address=end.address.hex())
            shared = self._pool.of(hello["nbytes"], hello["walk_nbytes"])
            while True:
                request = control.hear()
                memory = shared.take()
                try:
                    _answer(end, request, memory)
                finally:
                    shared.give_back(memory)
                control.say(done=True)
        finally:
            end.close()


def _answer(end: BareUcxx, request: Mapping[str, Any], memory: LinkMemory) -> None:
    for _ in range(request["count"]):
        if request["operation"] == "put":
            end.take(memory.places(request["batch"]), deadline_in(_WAIT_S))
        else:
            end.put(memory.parts(request["batch"])[1], deadline_in(_WAIT_S))
