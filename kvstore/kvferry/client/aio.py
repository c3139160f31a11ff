"""The client for asyncio: the verbs of the blocking one as coroutines, by one rule and not written twice."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Final

from kvferry.client.client import Client
from kvferry.client.jobs import Job
from kvferry.client.leases import ClientReadLease, ClientWriteLease
from kvferry.client.link import GRACE_S, call_by
from kvferry.client.namespace import ClientNamespace
from kvferry.client.options import ClientOptions
from kvferry.client.registration import Registration
from kvferry.client.unbegun import unbegun
from kvferry.core.blockstore import Completion
from kvferry.core.clock import checked_deadline, deadline_in
from kvferry.core.errors import ConfigError, LeaseExpiredError, StoreError

__all__ = ["AsyncClient", "AsyncJob", "AsyncView"]

_OF_LEASES: Final = ("view", "layer", "check", "release", "writing", "mark_lossy")
_AT_ONCE: Final[dict[type, frozenset[str]]] = {
    Client: frozenset({"namespace"}),
    ClientNamespace: frozenset({"keys", "foreign_keys", "register"}),
    ClientReadLease: frozenset(_OF_LEASES),
    ClientWriteLease: frozenset(_OF_LEASES),
    Registration: frozenset({"load", "save"}),
    Job: frozenset({"layer", "all_layers", "failed_blocks"}),
}
"""Verbs that wait for nobody: called as they are, in the loop's thread."""
_ENDS: Final = frozenset({"abort", "close"})
"""Verbs that give something back: they are done in any case, and wait behind no call."""
_MOST_ENDS: Final = 2


class _Threads:
    """Where calls are made: one for each connection, and others for what ends something."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.calls = ThreadPoolExecutor(client.link.options.max_connections, "kvferry-async-client")
        self.ends = ThreadPoolExecutor(_MOST_ENDS, "kvferry-async-client-ends")

    def call(self, by: float, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        """Make a call that is over by ``by``.

        Raises:
            StoreError: If the client is closed.
        """
        try:
            return self.calls.submit(call_by, by, verb, *args, **kwargs)
        except RuntimeError:
            raise StoreError(f"the client of {self.client.link.url} is closed") from None

    def end(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        """Give something back; of a client that is closed that takes no time."""
        try:
            return self.ends.submit(verb, *args, **kwargs)
        except RuntimeError:
            done: Future[Any] = Future()
            done.set_result(verb(*args, **kwargs))
            return done

    def shutdown(self) -> None:
        """Wait for them."""
        self.calls.shutdown()
        self.ends.shutdown()


class AsyncView:
    """A client, a namespace, a lease or a registration whose verbs that may wait are coroutines.

    Names, arguments, results and errors are those of the blocking object; what it returns is wrapped the same
    way. What waits for nobody stays a plain call (``namespace``, ``keys``, ``foreign_keys``, ``register``;
    ``view``, ``layer``, ``check``, ``release``, ``writing``; ``load`` and ``save`` of a registration),
    attributes are passed on. Leases and registrations are asynchronous context managers. A lease that is
    still on its way when its task is cancelled is given back when it arrives.

    A call takes no longer than its deadline, or than ``GRACE_S`` where that is nearer (``call_timeout_s``
    where it takes none), also where others wait before it: one whose turn has not come by then is answered as
    if the daemon were away. One that is under way ends by itself: buffers of the caller are in use till then.
    """

    def __init__(self, target: Any, threads: _Threads) -> None:  # noqa: ANN401 - what _wrap wraps
        self._target = target
        self._threads = threads
        kinds = (names for kind, names in _AT_ONCE.items() if isinstance(target, kind))
        self._plain = next(kinds, frozenset[str]())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._target!r}>"

    def __len__(self) -> int:
        return len(self._target)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the blocking object has
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._target, name)
        if not callable(found):
            return found
        if name in self._plain:
            return partial(self._at_once, found)
        return partial(self._in_thread, name, found)

    def _at_once(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self._wrap(verb(*map(_bare, args), **kwargs))

    async def _in_thread(self, name: str, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if name in _ENDS:
            ended = asyncio.wrap_future(self._threads.end(verb, *args, **kwargs))
            return await asyncio.shield(ended)  # done also where this task is cancelled
        by = self._by(verb, args, kwargs)
        future = self._threads.call(by, verb, *args, **kwargs)
        asked = asyncio.wrap_future(future)
        try:
            await asyncio.wait([asked], timeout=max(0.0, by - time.monotonic()))
            if not asked.done() and future.cancel():  # its turn has not come
                if isinstance(self._target, ClientWriteLease) and name != "renew":
                    self._threads.end(self._target.abort)  # as after any commit without an answer
                arguments = _by_name(verb, args, kwargs)
                return self._wrap(unbegun(self._threads.client, self._target, name, arguments))
            return self._wrap(await asked)
        except asyncio.CancelledError:
            asked.cancel()  # else its error would be one that nobody took
            future.cancel()
            future.add_done_callback(_give_back)
            raise

    def _by(self, verb: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> float:
        """When a call is to be over."""
        given = kwargs.get("deadline")
        if given is None and args and isinstance(self._target, ClientWriteLease):
            given = _by_name(verb, args, kwargs).get("deadline")
        if given is None:
            return deadline_in(self._threads.client.link.options.call_timeout_s)
        return max(checked_deadline(given), deadline_in(GRACE_S))

    def _wrap(self, found: Any) -> Any:  # noqa: ANN401
        if isinstance(found, Job):
            return AsyncJob(found, self._threads)
        if isinstance(found, tuple(_AT_ONCE)):
            return AsyncView(found, self._threads)
        if isinstance(found, tuple):  # of publish(): a count and a lease
            return tuple([self._wrap(one) for one in found])
        return found

    async def __aenter__(self) -> AsyncView:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._target, ClientReadLease):
            self._target.__exit__(kind, error, trace)
        else:
            await (self.abort if isinstance(self._target, ClientWriteLease) else self.close)()


class AsyncJob(AsyncView):
    """A :class:`LoadJob` or :class:`SaveJob` whose waits are coroutines, and hold no thread."""

    _target: Job

    async def wait_layer(self, layer: int, *, deadline: float) -> bool:
        """As :meth:`Job.wait_layer`."""
        job = self._target
        await self._until(lambda: job.done or job.wait_layer(layer, deadline=0.0), checked_deadline(deadline))
        return job.wait_layer(layer, deadline=0.0)

    async def wait(self, *, deadline: float) -> bool:
        """As :meth:`Job.wait`."""
        return await self._until(lambda: self._target.done, checked_deadline(deadline))

    async def cancel(self) -> None:
        """As :meth:`Job.cancel`. The job is cancelled also where this task is while it waits here."""
        if self._target.stop():
            await self._until(lambda: self._target.done, float("inf"))

    async def _until(self, true: Callable[[], bool], deadline: float) -> bool:
        """Wait for the job to be as asked, until the deadline; whether it is."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(told.set)

        with self._target.watched(tell):
            while not true():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(told.wait(), None if left == float("inf") else left)
                told.clear()
        return True


def _by_name(verb: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return inspect.signature(verb).bind(*args, **kwargs).arguments


def _bare(given: Any) -> Any:  # noqa: ANN401
    return given._target if isinstance(given, AsyncView) else given


def _give_back(future: Future[Any]) -> None:
    """End a lease that nobody waits for any more."""
    if future.cancelled() or future.exception() is not None:
        return
    found = future.result()
    for one in found if isinstance(found, tuple) else (found,):
        if isinstance(one, ClientWriteLease):
            one.abort()
        elif isinstance(one, ClientReadLease):
            with contextlib.suppress(LeaseExpiredError):
                one.release()


class AsyncClient(AsyncView):
    """:class:`Client` for asyncio; see :class:`AsyncView` for how.

    Args:
        client: The blocking client, which is the caller's until :meth:`close`.

    Raises:
        ConfigError: If it is none, such as an address; see :meth:`connect`.
    """

    def __init__(self, client: Client) -> None:
        if not isinstance(client, Client):
            raise ConfigError(
                f"AsyncClient({client!r}) takes a Client; for an address: await AsyncClient.connect(URL), or "
                "async with await AsyncClient.connect(URL) as client"
            )
        super().__init__(client, _Threads(client))

    @classmethod
    async def connect(
        cls, url: str | None = None, options: ClientOptions | None = None, *, session: str = ""
    ) -> AsyncClient:
        """A client of its own; arguments and errors are those of :class:`Client`."""
        make = partial(Client, url, options or ClientOptions(), session=session)
        return cls(await asyncio.to_thread(make))

    async def poll(self) -> list[Completion]:
        """As :meth:`Client.poll`; waits for nobody unless there are prefetches."""
        client: Client = self._target
        if not client.prefetches:
            return client.poll()
        polled: list[Completion] = await self._in_thread("poll", client.poll)
        return polled

    async def close(self) -> None:
        """End its leases, connections and threads; calls that wait end with it."""
        await asyncio.shield(asyncio.to_thread(self._close))

    def _close(self) -> None:
        self._target.close()
        self._threads.shutdown()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
