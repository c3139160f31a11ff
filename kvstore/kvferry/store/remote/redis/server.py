"""One server: its connections, bounded in number and in time, and whether it is asked at all."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from kvferry.core.address import Address
from kvferry.core.cause import LEFT_ALONE
from kvferry.core.clock import checked_deadline, is_past, time_left
from kvferry.core.errors import (
    AuthError,
    ConnectError,
    KVFerryError,
    ProtocolError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.store.breaker import Breaker
from kvferry.store.remote.redis.lent import StillRead
from kvferry.store.remote.redis.options import RedisOptions
from kvferry.store.remote.redis.resp import Reply, ReplyError, ReplyReader, command
from kvferry.transports import connect
from kvferry.transports.base import Connection
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.sockets import SocketConnection
from kvferry.transports.ways import Ways

__all__ = ["Lane", "Server", "ServerFacts"]

_log = logging.getLogger(__name__)

_AUTH_WORDS: Final = frozenset({"NOAUTH", "WRONGPASS"})
_SMALL_NBYTES: Final = 64 << 10


class ServerFacts(NamedTuple):
    """What a server says of itself.

    Attributes:
        product: Name and version.
        mode: ``standalone``, ``cluster`` or ``sentinel``.
        role: ``master`` or ``replica``.
        max_value_nbytes: The largest value it takes; 0: it does not say.
        max_memory_nbytes: The most memory it uses; 0: no bound, or it does not say.
        policy: What it does when that is used up; empty: it does not say.
    """

    product: str = "unknown"
    mode: str = "standalone"
    role: str = "master"
    max_value_nbytes: int = 0
    max_memory_nbytes: int = 0
    policy: str = ""


class Lane:
    """One connection to a server, used by one thread at a time.

    Attributes:
        reader: Of its replies.
        used: Whether it has served a call before.
        lent: Whether the server may still be reading memory of callers; set before it is lent.
        values: The connection, if it can send values with their checksums.
        facts: What the server said when it was made.
    """

    def __init__(self, connection: Connection, deadline: float, options: RedisOptions) -> None:
        self.connection = connection
        # one over TLS looks by itself
        spin_s = connection.spin_s if isinstance(connection, HashedSocketConnection) else 0.0
        self.reader = ReplyReader(connection, spin_s)
        self.used = self.lent = False
        self.values: HashedSocketConnection | None = None
        if isinstance(connection, HashedSocketConnection) and connection.sends_values:
            self.values = connection
        self._still_read: StillRead | None = None
        self._ways: dict[int, Ways] = {}
        self.facts = self._greet(deadline, options)

    def call(self, deadline: float, *words: bytes) -> Reply:
        """One command whose reply is small.

        Raises:
            ReplyError: If the reply is an error.
            TransportError: As of the connection.
        """
        self.connection.send([command(*words)], deadline)
        return self.reader.read(deadline)

    def ways(self, nbytes: int) -> Ways:
        """Whether to lend a batch of about that size, or to copy it: what is faster changes with the host."""
        return self._ways.setdefault(nbytes.bit_length(), Ways())

    def abort(self) -> StillRead | None:
        """End it; what it returns says until when the server may read what it was lent."""
        if self.lent and self._still_read is None and self.values is not None:
            self._still_read = StillRead(self.values)
        self.connection.abort()
        return self._still_read

    def _greet(self, deadline: float, options: RedisOptions) -> ServerFacts:
        password = options.secret()
        try:
            if password is not None:
                user = [] if options.username is None else [options.username.encode()]
                self.call(deadline, b"AUTH", *user, password)
            facts = _facts_of(self.call(deadline, b"HELLO", b"2"))
        except ReplyError as error:
            # what the server says may repeat the command, and so the password
            who = "the default user" if options.username is None else f"user {options.username!r}"
            if error.word in _AUTH_WORDS:
                given = "refused the password of" if password is not None else "wants a password for"
                raise AuthError(f"the server {given} {who}; see username and password_file") from None
            raise AuthError(f"the server refused {who} with {error.word}") from None
        return self._more_facts(deadline, facts)

    def _more_facts(self, deadline: float, facts: ServerFacts) -> ServerFacts:
        """What a user may be forbidden to ask."""
        with suppress(ReplyError):
            for line in _text(self.call(deadline, b"INFO", b"memory")).splitlines():
                name, _, value = line.partition(":")
                if name == "maxmemory" and value.isdigit():
                    facts = facts._replace(max_memory_nbytes=int(value))
                elif name == "maxmemory_policy":
                    facts = facts._replace(policy=value[:64])
        with suppress(ReplyError):
            reply = self.call(deadline, b"CONFIG", b"GET", b"proto-max-bulk-len")
            if isinstance(reply, list) and len(reply) == 2 and _text(reply[1]).isdigit():
                facts = facts._replace(max_value_nbytes=int(_text(reply[1])))
        return facts


class Server:
    """The connections to one server. Thread safe.

    At most ``options.connections`` are open at any time; who needs one waits for it until its deadline. After
    ``server_errors`` failures in a row nobody asks for a while, and then one call tries.

    Args:
        tier: Name of the tier.
        address: Of the server.
        options: Of the tier.
        met: Called with what a server says of itself, when a connection is made.

    Attributes:
        connects: Connections made so far.
        failures: Calls that failed so far.
    """

    def __init__(
        self, tier: str, address: Address, options: RedisOptions, met: Callable[[Address, ServerFacts], None]
    ) -> None:
        self.address = address
        self.connects = 0
        self.failures = 0
        self._options = options
        self._met = met
        self._condition = threading.Condition()
        self._idle: list[Lane] = []
        self._open = 0
        self._in_use: set[Lane] = set()
        self._closed = False
        self._still_read: list[StillRead] = []
        self._breaker = Breaker(
            f"{tier}, server {address.host_port or address.path}",
            work="requests",
            errors=options.server_errors,
            pause_s=options.server_pause_s,
            max_pause_s=20 * options.server_pause_s,
        )

    @property
    def problem(self) -> str:
        """Why it is left alone now, or empty."""
        return self._breaker.reason

    def request_deadline(self, deadline: float) -> float:
        """By when a request that begins now has to be done; ``deadline`` is one that :meth:`lease` took."""
        return min(deadline, time.monotonic() + self._options.timeout_s)

    @property
    def lends(self) -> bool:
        """Whether it is lent memory: not while it still holds some of a call that failed."""
        if self._still_read:
            self._still_read = [one for one in self._still_read if not one.is_set()]
        return not self._still_read

    def lease(self, deadline: float, *, fresh: bool = False) -> Lane:
        """A connection for this thread; ends with :meth:`give_back` or :meth:`drop`.

        Raises:
            ConnectError: If there is none by the deadline, or the server is left alone now.
            AuthError: If the server refuses the password.
        """
        deadline = checked_deadline(deadline)
        if not self._breaker.enter():
            raise ConnectError(f"{self.address} {LEFT_ALONE}{self._breaker.reason}")
        try:
            return self._lease(self.request_deadline(deadline), fresh=fresh)
        except TransferTimeoutError:
            self._breaker.leave(failures=0, successes=0)  # all are in use: it is not to blame
            raise
        except KVFerryError as error:
            self._failed(error)
            raise
        except BaseException:
            self._breaker.leave(failures=0, successes=0)
            raise

    def _lease(self, deadline: float, *, fresh: bool) -> Lane:
        with self._condition:
            if fresh:
                self._drop_idle()
            while not self._closed and not self._idle and self._open >= self._options.connections:
                if not self._condition.wait(time_left(deadline)) and is_past(deadline):
                    raise TransferTimeoutError(
                        f"{self.address}: all {self._options.connections} connections are in use; raise "
                        "connections"
                    )
            if self._closed:
                raise ConnectError(f"{self.address}: the tier is closed")
            if self._idle:
                lane = self._idle.pop()
                self._in_use.add(lane)
                return lane
            self._open += 1
        try:
            lane = self._connect(deadline)
        except BaseException:
            with self._condition:
                self._open -= 1
                self._condition.notify()
            raise
        with self._condition:
            self._in_use.add(lane)
            closed = self._closed
        if closed:
            self.drop(lane)
            raise ConnectError(f"{self.address}: the tier is closed")
        self._met(self.address, lane.facts)
        return lane

    def _connect(self, deadline: float) -> Lane:
        connection = _dial(self.address, deadline)
        try:
            lane = Lane(connection, deadline, self._options)
        except (TransportError, ProtocolError) as error:
            connection.abort()
            raise ConnectError(f"{self.address} does not answer as a Redis server: {error}") from error
        except BaseException:
            connection.abort()
            raise
        with self._condition:
            self.connects += 1
        return lane

    def give_back(self, lane: Lane, *, works: bool = True) -> None:
        """The call is over, and so are all its replies."""
        lane.used = True
        with self._condition:
            self._in_use.discard(lane)
            if self._closed:
                self._open -= 1
                lane.abort()
            else:
                self._idle.append(lane)
            self._condition.notify()
        self._breaker.leave(failures=0, successes=1 if works else 0)

    def drop(self, lane: Lane, error: BaseException | None = None) -> StillRead | None:
        """The connection is of no use any more, for what ``error`` says.

        Returns:
            Until when the server may read memory that it was lent, if it may now.
        """
        with self._condition:
            still_read = lane.abort()
            if still_read is not None and not still_read.is_set():
                self._still_read.append(still_read)
            else:
                still_read = None
            self._in_use.discard(lane)
            self._open -= 1
            self._condition.notify()
        if error is None:
            self._breaker.leave(failures=0, successes=0)
        else:
            self._failed(error)
        return still_read

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        self._breaker.leave(failures=1, successes=0, reason=str(error) or type(error).__name__)

    def _drop_idle(self) -> None:
        for lane in self._idle:
            lane.connection.abort()
        self._open -= len(self._idle)
        self._idle.clear()

    def close(self) -> None:
        """End all connections; threads that wait in one are woken."""
        with self._condition:
            self._closed = True
            self._drop_idle()
            for lane in self._in_use:
                lane.abort()
            self._condition.notify_all()


def _dial(address: Address, deadline: float) -> Connection:
    if address.scheme != "unix":
        return connect(address.url, deadline)
    # not by the unix transport, which wants a listener of the own user
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(1e-3, time_left(deadline)))
        sock.connect(address.path)
        return SocketConnection(sock, local_address="unix://", peer_address=address.url)
    except OSError as error:
        sock.close()
        raise ConnectError(f"cannot connect to {address}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise


def _text(reply: Reply) -> str:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""


def _facts_of(reply: Reply) -> ServerFacts:
    if not isinstance(reply, list):
        raise ProtocolError("HELLO was not answered by a list", remote=True)
    found = {_text(name): _text(value) for name, value in zip(reply[::2], reply[1::2], strict=False)}
    product = f"{found.get('server', 'redis')} {found.get('version', '?')}"[:64]
    return ServerFacts(product, found.get("mode", "standalone"), found.get("role", "master"))
