"""The client for asyncio: the verbs of the blocking one as coroutines, by one rule and not written twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Final

from kvferry.client.client import Client
from kvferry.client.leases import ClientReadLease, ClientWriteLease
from kvferry.client.namespace import ClientNamespace
from kvferry.client.options import ClientOptions
from kvferry.core.errors import ConfigError, LeaseExpiredError

__all__ = ["AsyncClient", "AsyncView"]

_AT_ONCE: Final = frozenset(
    {"namespace", "keys", "foreign_keys", "view", "layer", "check", "release", "writing", "register"}
)
"""Verbs that wait for nobody: called as they are, in the loop's thread."""
_WRAPPED: Final = (ClientNamespace, ClientReadLease, ClientWriteLease)


class AsyncView:
    """A client, a namespace or a lease whose verbs that may wait are coroutines.

    Names, arguments, results and errors are those of the blocking object; what it returns is wrapped the same
    way. What waits for nobody stays a plain call (``namespace``, ``keys``, ``foreign_keys``, ``view``,
    ``layer``, ``check``, ``release``, ``writing``), attributes are passed on. Leases are asynchronous context
    managers. A lease that is still on its way when its task is cancelled is given back when it arrives.
    """

    def __init__(self, target: Any, threads: ThreadPoolExecutor) -> None:  # noqa: ANN401 - of _WRAPPED
        self._target = target
        self._threads = threads

    def __repr__(self) -> str:
        return f"<AsyncView of {self._target!r}>"

    def __len__(self) -> int:
        return len(self._target)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the blocking object has
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._target, name)
        if not callable(found):
            return found
        if name in _AT_ONCE:
            return partial(self._at_once, found)
        return partial(self._in_thread, found)

    def _at_once(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self._wrap(verb(*args, **kwargs))

    async def _in_thread(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        future: Future[Any] = self._threads.submit(verb, *args, **kwargs)
        try:
            return self._wrap(await asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(_give_back)
            raise

    def _wrap(self, found: Any) -> Any:  # noqa: ANN401
        if isinstance(found, _WRAPPED):
            return AsyncView(found, self._threads)
        if isinstance(found, tuple):  # of publish(): a count and a lease
            return tuple([self._wrap(one) for one in found])
        return found

    async def __aenter__(self) -> AsyncView:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._target, ClientWriteLease):
            await self._in_thread(self._target.abort)
        elif isinstance(self._target, ClientReadLease):
            self._target.__exit__(kind, error, trace)


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
        threads = ThreadPoolExecutor(client.link.options.max_connections, "kvferry-async-client")
        super().__init__(client, threads)

    @classmethod
    async def connect(
        cls, url: str | None = None, options: ClientOptions | None = None, *, session: str = ""
    ) -> AsyncClient:
        """A client of its own; arguments and errors are those of :class:`Client`."""
        make = partial(Client, url, options or ClientOptions(), session=session)
        return cls(await asyncio.to_thread(make))

    async def close(self) -> None:
        """End its leases, connections and threads."""
        await self._in_thread(self._target.close)
        await asyncio.to_thread(self._threads.shutdown)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
