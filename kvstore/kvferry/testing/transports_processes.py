"""The part of the transport suite with other processes: one is killed, stops, or is a fork of this one."""

# ruff: noqa: D102 - the names of the tests say what is required
from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Final

import pytest

from kvferry.core.errors import ConnectionClosedError
from kvferry.testing.blocks import stop_process
from kvferry.testing.transports_common import Ends, TransportFixtures, blocking_buffer
from kvferry.transports.base import Connection, Listener

__all__ = ["TransportProcesses"]

_PEER: Final = """
import sys, time
from kvferry.transports import connect
connection = connect(sys.argv[1], time.monotonic() + 30)
connection.send([bytes(100)], time.monotonic() + 30)
connection.recv_into([memoryview(bytearray(1 << 30))], time.monotonic() + 60)
"""

# Forks while another thread of it is inside the connection, as an engine does that forks its workers.
_FORKING: Final = """
import os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from kvferry.core.errors import KVFerryError
from kvferry.testing.threads import until_asleep
from kvferry.transports import get_transport
scheme, listen_url, dial_options = sys.argv[1:]
transport = get_transport(scheme)
soon = lambda: time.monotonic() + 20
listener = transport.listen(listen_url)
dial_url = listener.address + dial_options

def meet():
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, soon())
        one = transport.connect(dial_url, soon())
        return one, accepting.result(20)

def move(one, other, data):
    received = bytearray(len(data))
    one.send([data], soon())
    other.recv_into([memoryview(received)], soon())
    assert bytes(received) == data, "other bytes"

def use(name, call):
    started = time.monotonic()
    try:
        call(time.monotonic() + 2)
    except KVFerryError as error:
        assert type(error).__name__ != "TransferTimeoutError", (name, error)
        assert "fork" in str(error), (name, error)
    else:
        raise AssertionError(name + " of the parent's connection worked in the child")
    assert time.monotonic() - started < 1.5, name

one, other = meet()
move(one, other, b"before")
waiting = threading.Thread(target=other.wait_readable, args=(soon(),), daemon=True)
waiting.start()
until_asleep(waiting.native_id, soon())
pid = os.fork()
if pid == 0:
    code = 1
    try:
        use("send", lambda deadline: one.send([b"lost"], deadline))
        use("recv_into", lambda deadline: one.recv_into([memoryview(bytearray(1))], deadline))
        use("wait_readable", one.wait_readable)
        use("accept", listener.accept)
        one.close(), other.abort(), one.abort(), other.close(), listener.close()
        code = 0
    except BaseException as error:
        sys.stderr.write(f"child: {type(error).__name__}: {error}\\n")
    finally:
        os._exit(code)
limit = time.monotonic() + 20
while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < limit:
    time.sleep(0.01)
if ended[0] == 0:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
print("child", "hung" if ended[0] == 0 else os.waitstatus_to_exitcode(ended[1]), flush=True)
move(one, other, b"after" * 1000)
move(other, one, b"back")
again = meet()
move(*again, b"new")
print("parent good", flush=True)
for end in (one, other, *again, listener):
    end.close()
"""


class TransportProcesses(TransportFixtures):
    """What a peer's process, or a fork, does to a connection."""

    @contextlib.contextmanager
    def _connected_to_child(self, listener: Listener) -> Iterator[tuple[subprocess.Popen[str], Connection]]:
        if not self.crosses_processes:
            pytest.skip("this transport stays within a process")
        with (
            self.child(_PEER, self.dial_url(listener)) as child,
            contextlib.closing(self.accept(listener)) as connection,
        ):
            self.receive(connection, 40)
            yield child, connection

    @pytest.mark.parametrize("call", ["receive", "send"])
    def test_peer_process_is_killed(self, call: str) -> None:
        with self.listening() as listener, self._connected_to_child(listener) as (child, connection):
            child.kill()
            if call == "receive":  # whoever saw the end may still try to send
                with pytest.raises(ConnectionClosedError):
                    self.receive(connection, 200)
            with pytest.raises(ConnectionClosedError):  # noqa: PT012 - some may still be taken
                while True:
                    self.send(connection, bytes(100_000))

    def test_peer_process_stops_and_every_call_ends_in_time(self) -> None:
        """Half open: the peer's machine still acknowledges, but nobody reads or answers."""
        with self.listening() as listener, self._connected_to_child(listener) as (child, connection):
            self.receive(connection, 60)
            stop_process(child.pid)
            self.assert_in_time(lambda deadline: connection.recv_into([memoryview(bytearray(1))], deadline))
            self.assert_in_time(lambda deadline: connection.send([blocking_buffer()], deadline))
            connection.abort()
            ends: Ends = self.meet(listener)
            with contextlib.closing(ends[0]), contextlib.closing(ends[1]):
                self.assert_works(ends)

    def test_forked_child_gets_an_error_and_the_parent_goes_on(self) -> None:
        """In the child every call says that it was forked, at once; none of them touches the parent's."""
        args = (self.transport().scheme, self.listen_url(), self.dial_options)
        with self.child(_FORKING, *args) as process:
            out, _ = process.communicate(timeout=3 * self.patience_s)
        assert out.splitlines() == ["child 0", "parent good"]
        assert process.returncode == 0
