"""The connections of a client to its daemon: made when needed, again by themselves, never of two epochs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from kvferry.client.line import Line
from kvferry.client.memory import RecycledMemory
from kvferry.client.options import ClientCounters, ClientOptions
from kvferry.client.staging import Staging
from kvferry.client.taken import Taken
from kvferry.client.token import shown_token
from kvferry.core.cause import Cause
from kvferry.core.clock import deadline_in, is_past, time_left
from kvferry.core.errors import (
    CapacityError,
    KVFerryError,
    OverloadedError,
    StoreError,
    TransferTimeoutError,
    TransportError,
    UnavailableError,
)
from kvferry.wire import daemon_messages as d
from kvferry.wire.channel import Channel
from kvferry.wire.messages import Ping, Pong
from kvferry.wire.options import ChannelOptions
from kvferry.wire.shared_arena import SHARED_ARENA, SharedArena, can_share_arena

__all__ = ["GRACE_S", "Link", "call_by"]

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

GRACE_S: Final = 0.1
"""What a call may take whose deadline is past, or nearer than that: one question and its answer."""
_TICK_S: Final = 1.0
_BUSY_TICK_S: Final = 0.1
_FLUSH_S: Final = 1.0
_TIMEOUTS_TO_LEAVE: Final = 2
_IDLE_CONNECTION_S: Final = 10.0
_GROW_PAUSE_S: Final = 1.0


_by: Final[ContextVar[float]] = ContextVar("kvferry_call_by", default=float("inf"))


def call_by(by: float, verb: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a verb that is to be over by then, also where it takes no deadline: it has waited for its turn."""
    token = _by.set(by)
    try:
        return verb(*args, **kwargs)
    finally:
        _by.reset(token)


class Ending(Protocol):
    """A lease that the link ends when it is closed."""

    number: int


class Link:
    """All connections of one client. Thread safe.

    A call takes a connection for itself. Only one is being made at a time; while the daemon is away nobody
    waits for it but the link's own thread, which tries again, ends leases in the background and forgets the
    memory of a daemon that has ended.

    Args:
        url: Where the daemon is.
        options: See :class:`ClientOptions`.
        label: What the log calls it; its URL if empty.
    """

    def __init__(self, url: str, options: ClientOptions, label: str = "") -> None:
        self.url = url
        self.label = label or url
        self._cause: Cause | None = None
        self.options = options
        self.counters = ClientCounters()
        self.session = options.session or f"client-{secrets.token_hex(12)}"
        self.arena = SharedArena(options.max_mapped_nbytes)
        self.memory = RecycledMemory(options.kept_nbytes)
        self.staging = Staging(options.staging_nbytes if options.share_memory else 0)
        self.leases: weakref.WeakValueDictionary[int, Ending] = weakref.WeakValueDictionary()
        self.closed = False
        self._token = shown_token(url, options)
        self._channel_options = ChannelOptions(
            role=options.role, session=self.session, checksum=options.checksum,
            hello_timeout_s=options.connect_timeout_s, capabilities=(SHARED_ARENA,),
        )  # fmt: skip
        self._numbers = itertools.count((secrets.randbits(31) << 32) + 1)
        self._lock = threading.RLock()  # a lease that is dropped anywhere tells of its end
        self._cond = threading.Condition(self._lock)
        self._sleeping = 0  # in it
        self._idle: list[Line] = []
        self._open = 0
        self._connecting = False
        self._lost = False
        self._epoch = ""
        self._away_until = 0.0
        self._grow_after = 0.0
        self._away_reason = ""
        self._pause_s = 0.0
        self._timeouts = 0
        self._busy = False
        self._holds_lines = False  # until a new client is made, or not
        self._said: deque[tuple[Any, ...]] = deque()  # lines of the log that are due: level, text, arguments
        self._ended: list[int] = []
        self._telling: tuple[int, ...] = ()  # the same, of which it is being told
        self._abandoned: list[int] = []
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-client", daemon=True)
        self._thread.start()

    # ---- what others ask -------------------------------------------------------------------------

    @property
    def epoch(self) -> str:
        """Run of the daemon that was reached last; empty before the first."""
        return self._epoch

    @property
    def connections(self) -> int:
        """Connections there are now."""
        return self._open

    @property
    def away(self) -> str:
        """Why the daemon cannot be reached; empty if it can."""
        return self._away_reason

    def new_number(self) -> int:
        """A number for a lease."""
        return next(self._numbers)

    def call_deadline(self) -> float:
        """By when a call is over that takes no deadline."""
        return min(deadline_in(self.options.call_timeout_s), _by.get())

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            setattr(self.counters, name, getattr(self.counters, name) + number)

    def connect(self, deadline: float) -> None:
        """Reach the daemon now.

        Raises:
            UnavailableError: If it cannot be; with the reason as its cause.
        """
        try:
            with self.line(deadline) as line:
                line.call(Ping(), Pong, deadline)  # it may take connections that it cannot serve
        except UnavailableError:
            raise
        except (TransportError, CapacityError, OverloadedError) as error:
            raise UnavailableError(f"{self.url}: the daemon does not answer: {error}") from error

    def connect_first(self, deadline: float) -> None:
        """Reach the daemon for a new client; one that is away is no error.

        Raises:
            KVFerryError: If it will never work so: a wrong address, token or daemon. The link is closed, and
                the log has nothing of it: the daemon is not away.
        """
        self._holds_lines = True
        try:
            self.connect(deadline)
        except UnavailableError as error:
            cause = error.__cause__
            if isinstance(cause, KVFerryError) and not cause.retryable:
                self.close()
                raise cause from None
        self._holds_lines = False
        self._tell()

    # ---- connections -----------------------------------------------------------------------------

    def line(self, deadline: float, *, epoch: str = "", spare: bool = False) -> Taken:
        """A connection for the caller alone.

        Args:
            deadline: By when there is one.
            epoch: The run of the daemon that it must lead to; any, if empty.
            spare: Whether it may be one more than ``max_connections``, for ends of leases: calls that have
                all of them may wait for just what these give back.

        Raises:
            UnavailableError: If the daemon is away, or all connections are in use until the deadline.
            LeaseExpiredError: If it is another run than ``epoch``.
            StoreError: If the client is closed.
        """
        return Taken(self, deadline, epoch, spare)

    def _acquire(self, deadline: float, spare: bool = False) -> Line:
        with self._lock:
            self._busy = True
            while True:
                if self.closed:
                    raise StoreError(f"the client of {self.url} is closed")
                while self._idle:
                    line = self._idle.pop()
                    if line.epoch == self._epoch and not line.channel.closed and line.is_quiet():
                        return line
                    self._lose(line)
                    self._turned_away(line, f"{line.channel.address} ended before it had answered anything")
                now = time.monotonic()
                if now < self._away_until:
                    raise self._unavailable()
                if not self._connecting and self._may_grow(now, spare):
                    self._connecting = True
                    break
                if now >= deadline:
                    raise UnavailableError(
                        f"{self.url}: all {self._open} connections were in use until the deadline "
                        "(max_connections)"
                    )
                until = min(deadline, self._grow_after) if now < self._grow_after else deadline
                self._sleeping += 1
                try:
                    self._cond.wait(time_left(until))
                finally:
                    self._sleeping -= 1
        return self._connect(deadline) or self._acquire(deadline, spare)

    def _may_grow(self, now: float, spare: bool) -> bool:
        """Whether a connection may be made beside those that there are; the first always may."""
        most = self.options.max_connections + spare
        return not self._open or (self._open < most and now >= self._grow_after)

    def _connect(self, deadline: float) -> Line | None:
        """A new connection; ``None`` if the daemon gives no further one, but others are there."""
        limit = min(deadline, deadline_in(self.options.connect_timeout_s))
        try:
            shown = replace(self._channel_options, credential=self._token())
            channel = Channel.connect(self.url, shown, limit)
        except BaseException as error:
            with self._lock:
                self._connecting = False
                others = self._open > 0
                if isinstance(error, KVFerryError):
                    self._not_taken(str(error))
                self._cond.notify_all()
            if not isinstance(error, KVFerryError):
                raise
            if others:
                log.info("%s: %d connections have to do: %s", self.url, self._open, error)
                return None
            raise self._unavailable() from error
        line = Line(self, channel, self.options.share_memory and can_share_arena(channel))
        with self._lock:
            self._connecting = False
            self._open += 1
            self._arrived(line)
            self._cond.notify_all()
        return line

    def _arrived(self, line: Line) -> None:
        self.counters.connects += 1
        self._away_until = 0.0  # it may be asked; whether it is back is known when it has answered
        if self._lost:
            self.counters.reconnects += 1
            self._lost = False
        if line.epoch == self._epoch:
            return
        if self._epoch:
            self.counters.restarts += 1
        self._epoch = line.epoch
        self._ended.clear()  # numbers of another run mean nothing
        self._abandoned.clear()
        idle, self._idle = self._idle, []
        for old in idle:
            self._lose(old)
        self._lost = False

    def _healed(self) -> None:
        """A call was answered: the daemon is there, and the next pause is a short one again."""
        with self._lock:
            if self._away_reason:
                self._said.append((logging.INFO, "%s: the daemon is back", self.label))
            self._away_reason, self._away_until, self._pause_s, self._timeouts = "", 0.0, 0.0, 0
        self._tell()

    def _turned_away(self, line: Line, reason: str) -> None:
        """A connection was lost: the next attempt waits if nothing was ever answered on it."""
        if line.epoch == self._epoch and not (line.answered or self.closed):
            self._not_taken(reason)

    def _not_taken(self, reason: str) -> None:
        """The daemon gave no connection that works; if others are there, these have to do for a while."""
        if self._open:
            self._grow_after = time.monotonic() + _GROW_PAUSE_S
        else:
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        """The daemon was not reached: nobody tries for a while."""
        if not self._away_reason:
            self._cause = Cause(reason)
            self._said.append((
                logging.WARNING, "%s: the daemon is away, nothing is found or stored meanwhile: %s",
                self.label, reason,
            ))  # fmt: skip
        elif self._cause is not None and self._cause.now(reason):
            self._said.append((
                logging.WARNING, "%s: the daemon is still away, and the reason is another now: %s",
                self.label, reason,
            ))  # fmt: skip
        self._away_reason = reason
        self._lost = self._lost or bool(self._epoch)
        first, last = self.options.first_pause_s, self.options.last_pause_s
        self._pause_s = min(last, 2 * self._pause_s or first)
        self._away_until = time.monotonic() + self._pause_s
        self._wake.set()
        self._cond.notify_all()  # those who wait for a connection do not get one

    def _tell(self) -> None:
        """Log what is due, without the lock: a slow handler holds up nobody who asks."""
        while self._said and not self._holds_lines:
            with contextlib.suppress(IndexError):  # another thread has taken the last
                log.log(*self._said.popleft())

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(f"{self.url}: the daemon is away: {self._away_reason}")

    def _lose(self, line: Line) -> None:
        line.channel.abort()
        self._open -= 1
        self._lost = True

    def _release(self, line: Line) -> None:
        line.ended = line.abandoned = ()
        surplus = False
        with self._lock:
            if line.epoch != self._epoch or line.channel.closed or self.closed:
                self._lose(line)
            elif self._open > self.options.max_connections:
                self._open, surplus = self._open - 1, True
            else:
                line.idle_since = time.monotonic()
                self._idle.append(line)
            if self._sleeping:
                self._cond.notify()
        if surplus:
            line.channel.close()

    def _failed(self, line: Line, error: BaseException) -> None:
        if isinstance(error, KVFerryError) and not line.channel.closed:
            self._release(line)  # the daemon's own answer, or nothing was sent
            return
        with self._lock:
            self._lose(line)
            if line.epoch == self._epoch:
                self._ended += line.ended
                self._abandoned += line.abandoned
            if isinstance(error, TransferTimeoutError):
                self.counters.timeouts += 1
                self._timeouts += 1
                if self._timeouts >= _TIMEOUTS_TO_LEAVE:
                    self._leave(str(error))
            elif isinstance(error, KVFerryError):
                self._turned_away(line, str(error))
            self._cond.notify()
        self._tell()

    # ---- ends of leases --------------------------------------------------------------------------

    def end(self, number: int, epoch: str) -> None:
        """Tell the daemon with the next request that a lease is done with."""
        with self._lock:
            if epoch != self._epoch:
                return
            self._ended.append(number)
            waiting = self._open > len(self._idle)
        if waiting:  # maybe for just what is given back here
            self._wake.set()

    def abandon(self, number: int) -> None:
        """Tell it that a lease is not wanted whose answer never came."""
        with self._lock:
            self._abandoned.append(number)
        self._wake.set()

    @property
    def has_ends(self) -> bool:
        """Whether the daemon is to be told of the end of a lease."""
        return bool(self._ended or self._abandoned or self._telling)

    def take_ended(self) -> tuple[int, ...]:
        """The leases that it is to be told of; the caller does.

        With those of which it is being told on another connection, which this request may overtake.
        """
        with self._lock:
            taken, self._ended = (*self._telling, *self._ended), []
        return taken

    def take_abandoned(self) -> tuple[int, ...]:
        """The same of those whose answer never came."""
        with self._lock:
            taken, self._abandoned = tuple(self._abandoned), []
        return taken

    def _flush_ends(self) -> None:
        if not self.has_ends:
            return
        deadline = deadline_in(_FLUSH_S)
        with contextlib.suppress(KVFerryError), self.line(deadline, spare=True) as line:
            with self._lock:
                self._telling, self._ended = tuple(self._ended), []
            try:
                request = d.EndLeases(ended=line.take_ended(), abandoned=line.take_abandoned())
                if request.ended or request.abandoned:
                    line.call(request, d.Done, deadline)
            finally:
                self._telling = ()

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.closed:
            self._wake.wait(self._until_next())
            self._wake.clear()
            if self.closed:
                return
            try:
                self._tick()
            except KVFerryError as error:
                log.debug("%s: %s", self.url, error)
            except Exception:
                log.exception("the thread of the client of %s", self.url)

    def _until_next(self) -> float:
        if self._away_reason:
            return max(0.01, self._away_until - time.monotonic())
        busy, self._busy = self._busy, False
        return _BUSY_TICK_S if busy or self._ended else _TICK_S

    def _tick(self) -> None:
        self.arena.forget_gone()
        if self._away_reason:
            if is_past(self._away_until):
                self.connect(deadline_in(self.options.connect_timeout_s))
            return
        self._flush_ends()
        self._look_at_idle()

    def _look_at_idle(self) -> None:
        """Notice a daemon that has gone before the next call does; close connections that are not needed."""
        oldest = time.monotonic() - _IDLE_CONNECTION_S
        surplus: list[Line] = []
        with self._lock:
            while len(self._idle) > 1 and self._idle[0].idle_since < oldest:
                surplus.append(self._idle.pop(0))
                self._open -= 1
            gone = any(line.channel.readable() for line in self._idle)
        for line in surplus:
            line.channel.close()
        if gone or (self._epoch and not self._open):
            self.connect(deadline_in(self.options.connect_timeout_s))

    def close(self) -> None:
        """End all leases, connections and the thread; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self._ended += list(self.leases)
        if self._idle:
            self._flush_ends()
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
            self._cond.notify_all()
        self._wake.set()
        for line in idle:
            line.channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(self.options.connect_timeout_s + _FLUSH_S + 1)
        self.arena.close()
        self.staging.close()
        self.memory.clear()
