"""The backend of the s3 tier: requests by ``obstore``, in threads of ours, each call back by its deadline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import S3Store

from kvferry.core.buffers import copy_into
from kvferry.core.clock import is_past
from kvferry.core.errors import ConfigError, TierError
from kvferry.core.regular_file import open_regular
from kvferry.core.user_path import user_path
from kvferry.store.problems import Problems
from kvferry.store.remote.backend import Answer, Backend, Done, Get, Listed, Put
from kvferry.store.remote.payload import Received
from kvferry.store.remote.requests import Requests
from kvferry.store.remote.s3.options import S3Options
from kvferry.store.remote.s3.reasons import late, reason_of

__all__ = ["S3Backend"]

_MAX_OBJECT_NBYTES: Final = 1 << 40
_STREAM_NBYTES: Final = 1 << 20
_DELETE_AT_ONCE: Final = 1000
_LIST_AT_ONCE: Final = 1000
_OK: Final = Answer(Done.OK)
_NO: Final = Answer(Done.NO)
_ABSENT: Final = (NotFoundError, FileNotFoundError)
_BUCKET_CODES: Final = ("NoSuchBucket",)


class _Hand:
    """The right to write into a caller's buffer, until it is taken away."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone = False

    def fill(self, views: Sequence[memoryview], data: memoryview) -> bool:
        """Copy ``data`` into ``views``; ``False`` if that is not allowed any more."""
        with self._lock:
            if self._gone:
                return False
            for view in views:
                copy_into(view, data[: len(view)])
                data = data[len(view) :]
            return True

    def take_away(self) -> None:
        """From now on nothing is written."""
        with self._lock:
            self._gone = True


class S3Backend(Backend):
    """Objects in one bucket. See :class:`~kvferry.store.remote.backend.Backend`.

    Args:
        tier: Name of the tier.
        options: Of the tier.
        problems: Where lasting problems are told.

    Raises:
        ConfigError: If the options cannot be used.
    """

    tells_deleted = False

    def __init__(self, tier: str, options: S3Options, problems: Problems) -> None:
        self._tier = tier
        self._options = options
        self._problems = problems
        self._store = _store(options)
        self._where = options.url() or "AWS"
        self._requests = Requests(tier, f"bucket {options.bucket}", options, late=late(self._where))
        self._closed = False

    # -- the verbs -------------------------------------------------------------------------------------

    def max_value_nbytes(self, deadline: float) -> int:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        del deadline
        return _MAX_OBJECT_NBYTES

    def exists(self, names: Sequence[str], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""

        def head(number: int) -> Answer:
            obstore.head(self._store, names[number])
            return _OK

        return self._run(len(names), head, deadline)

    def get(self, gets: Sequence[Get], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        hand = _Hand()
        try:
            answers = self._run(len(gets), lambda n: self._get(gets[n], hand, deadline), deadline)
        finally:
            hand.take_away()
        return [a._replace(in_flight=None) for a in answers]

    def _get(self, get: Get, hand: _Hand, deadline: float) -> Answer:
        options: Any = None if get.most is None else {"range": (0, get.most)}
        result = obstore.get(self._store, get.name, options=options)
        start, end = result.range
        nbytes = end - start
        sink = get.sink(nbytes)
        chunks = _Chunks(iter(result.stream(min_chunk_size=_STREAM_NBYTES)))
        try:
            while True:
                for view in next(sink):
                    while len(view):
                        piece = chunks.next(len(view))
                        if not len(piece):
                            return Answer(
                                Done.FAILED, f"{self._where}: an answer ended before its {nbytes} bytes"
                            )
                        if is_past(deadline) or not hand.fill([view[: len(piece)]], piece):
                            return Answer(Done.FAILED, "not done by the deadline")
                        view = view[len(piece) :]
        except StopIteration as end_of_sink:
            received: Received = end_of_sink.value
        return Answer(Done.OK, "", received)

    def put(self, puts: Sequence[Put], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        return self._run(len(puts), lambda n: self._put(puts[n], deadline), deadline)

    def _put(self, put: Put, deadline: float) -> Answer:
        whole = put.nbytes <= self._options.multipart_nbytes
        if put.only_new and not whole:  # an upload in pieces knows no condition
            with contextlib.suppress(*_ABSENT):
                obstore.head(self._store, put.name)
                return _NO
        pieces = _pieces(put, deadline)
        mode: Any = "create" if put.only_new and whole else "overwrite"
        if whole:
            obstore.put(self._store, put.name, b"".join(pieces), mode=mode, use_multipart=False)
        else:
            size = self._options.multipart_nbytes
            obstore.put(self._store, put.name, pieces, use_multipart=True, chunk_size=size, max_concurrency=4)
        return _OK

    def keep(self, names: Sequence[str], deadline: float) -> None:
        """See :class:`~kvferry.store.remote.backend.Backend`. Nothing goes by itself here."""

    def delete(self, names: Sequence[str], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`. Whether there was one is not told."""
        batches = [names[n : n + _DELETE_AT_ONCE] for n in range(0, len(names), _DELETE_AT_ONCE)]

        def delete(number: int) -> Answer:
            with contextlib.suppress(*_ABSENT):
                obstore.delete(self._store, list(batches[number]))
            return _OK

        answers = self._run(len(batches), delete, deadline)
        return [answer for answer, batch in zip(answers, batches, strict=True) for _ in batch]

    def listing(self, start: str, deadline: float) -> Iterator[list[Listed]]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        pages = obstore.list(self._store, prefix=start.rstrip("/"), chunk_size=_LIST_AT_ONCE)
        try:
            for page in pages:
                if is_past(deadline) or self._closed:
                    raise TierError("not all that is there could be listed by the deadline")
                yield [Listed(found["path"], found["size"]) for found in page]
        except BaseError as error:
            raise TierError(
                f"bucket {self._options.bucket} does not list: {reason_of(error, self._where)}"
            ) from error

    # -- what is told ----------------------------------------------------------------------------------

    def problems(self) -> Mapping[str, str]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        return {**self._problems.conditions(), **self._requests.problems()}

    def status(self) -> Mapping[str, str]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        style = "path style" if self._options.path_style else "virtual-host style"
        return {f"bucket {self._options.bucket}": f"{self._where}, {style}"}

    def counters(self) -> Mapping[str, float]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        return self._requests.counters()

    def close(self) -> None:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        if self._closed:
            return
        self._closed = True
        self._requests.close()

    # -- requests --------------------------------------------------------------------------------------

    def _run(self, count: int, work: Callable[[int], Answer], deadline: float) -> list[Answer]:
        """Make requests side by side; an answer each by the deadline."""
        return self._requests.run(count, lambda span: [self._one(work, n) for n in span], deadline)

    def _one(self, work: Callable[[int], Answer], number: int) -> Answer:
        try:
            return work(number)
        except (AlreadyExistsError, PreconditionError):
            return _NO
        except _ABSENT as error:
            if any(code in str(error) for code in _BUCKET_CODES):
                return Answer(Done.FAILED, f"there is no bucket {self._options.bucket}")
            return _NO
        except (BaseError, OSError, TierError) as error:
            return Answer(Done.FAILED, reason_of(error, self._where))


class _Chunks:
    """The bytes of a stream, as many at a time as are wanted."""

    def __init__(self, stream: Iterator[Any]) -> None:
        self._stream = stream
        self._left = memoryview(b"")

    def next(self, most: int) -> memoryview:
        """Up to ``most`` bytes; none at the end."""
        while not len(self._left):
            chunk = next(self._stream, None)
            if chunk is None:
                return memoryview(b"")
            self._left = memoryview(chunk)
        found, self._left = self._left[:most], self._left[most:]
        return found


def _pieces(put: Put, deadline: float) -> Iterator[Any]:
    for pieces in put.source(False):
        if is_past(deadline):
            raise TierError("not done by the deadline")
        yield from pieces


def _store(options: S3Options) -> S3Store:
    secret = options.secret()
    url = options.url()
    keys: dict[str, Any] = {}
    if options.access_key_id is not None and secret is not None:
        keys = {"access_key_id": options.access_key_id, "secret_access_key": secret}
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=options.timeout_s),
        "connect_timeout": timedelta(seconds=options.timeout_s),
        "allow_http": url is not None and url.startswith("http://"),
        "pool_max_idle_per_host": str(options.connections),
    }
    if options.ca_file is not None:
        try:
            with open_regular(user_path(options.ca_file, "ca_file")) as file:
                client["root_certificate"] = file.read()
        except OSError as error:
            raise ConfigError(f"ca_file: cannot read {options.ca_file}: {error.strerror}") from error
    if url is not None:
        keys["endpoint"] = url
    step = min(0.1, options.timeout_s / 4)
    retry: Any = {
        "max_retries": options.retries,
        "retry_timeout": timedelta(seconds=options.timeout_s),
        "backoff": {"init_backoff": timedelta(seconds=step), "max_backoff": timedelta(seconds=2), "base": 2},
    }
    try:
        return S3Store(
            options.bucket,
            region=options.region,
            virtual_hosted_style_request=not options.path_style,
            unsigned_payload=not client["allow_http"],
            client_options=client,  # type: ignore[arg-type]
            retry_config=retry,
            **keys,
        )
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the bucket {options.bucket} cannot be used: {reason_of(error, url or 'AWS')}"
        ) from error
