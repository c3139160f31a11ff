"""Requests of the backend as commands of Redis, and what its replies mean."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Final

from kvferry.core.errors import ProtocolError
from kvferry.store.remote.backend import Answer, Done, Get, Put
from kvferry.store.remote.payload import Pieces, Received
from kvferry.store.remote.redis.resp import MISSING, ReplyReader, command
from kvferry.transports.hashed import HASH_NBYTES
from kvferry.transports.replies import Form, Taken
from kvferry.transports.values import Value

__all__ = ["Exists", "Plain", "Read", "Request", "Write"]

_OK: Final = Answer(Done.OK)
_NO: Final = Answer(Done.NO)
_STORED: Final = b"+OK\r\n"
_LEAST_SEALED_NBYTES: Final = 64 << 10  # less is sooner hashed and joined with others here


class Request(ABC):
    """One command about one name, and how its reply is taken."""

    name: str
    nbytes: int = 0
    """Of the value that goes with it, there or back, as far as that is known."""

    @abstractmethod
    def pieces(self, *, last: bool) -> Iterable[Pieces]:
        """What is sent, ``last`` of all or not; called again if it has to be sent again."""

    def at_hand(self, reader: ReplyReader) -> Answer | None:
        """The answer if its reply was taken ahead, whole, and is the usual one."""
        del reader
        return None

    @abstractmethod
    def take(self, reader: ReplyReader, deadline: float) -> Answer:
        """Take the reply. Raises as :class:`ReplyReader`."""


class Plain(Request):
    """A command whose reply is a number: 0 is :attr:`~Done.NO`."""

    def __init__(self, name: str, *words: bytes) -> None:
        self.name = name
        self._words = words

    def pieces(self, *, last: bool) -> Iterator[Pieces]:
        """See :class:`Request`."""
        del last
        yield [command(self._words[0], self.name.encode(), *self._words[1:])]

    def take(self, reader: ReplyReader, deadline: float) -> Answer:
        """See :class:`Request`."""
        return _OK if reader.read(deadline) else _NO


class Exists(Plain):
    """Whether there is a value."""

    def __init__(self, name: str) -> None:
        super().__init__(name, b"EXISTS")


class Read(Request):
    """Reads a value into what its sink gives."""

    def __init__(self, get: Get) -> None:
        self.name = get.name
        self._get = get

    @property
    def form(self) -> Form | None:
        """Of the values that are as most, if :meth:`taken` knows what to do with one; else ``None``."""
        sealed = self._get.sealed
        if sealed is None or not len(sealed.into) or self._get.most is not None:
            return None
        return _form(sealed.prefix_nbytes, len(sealed.into))

    @property
    def into(self) -> memoryview:
        """What the data of such a value fills."""
        assert self._get.sealed is not None
        return self._get.sealed.into

    def taken(self, value: Taken) -> Answer:
        """The answer for such a value, which was received by who hashes the data."""
        assert self._get.sealed is not None
        return Answer(Done.OK, "", self._get.sealed.judge(*value))

    def pieces(self, *, last: bool) -> Iterator[Pieces]:
        """See :class:`Request`."""
        del last
        name, most = self.name.encode(), self._get.most
        if most is None:
            yield [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)]
        else:
            yield [command(b"GETRANGE", name, b"0", b"%d" % (most - 1))]

    def take(self, reader: ReplyReader, deadline: float) -> Answer:
        """See :class:`Request`."""
        nbytes = reader.value_nbytes(deadline)
        if nbytes == MISSING:
            return _NO
        left, sink, ended = nbytes, self._get.sink(nbytes), False
        try:
            while True:
                views = next(sink)
                left -= sum(map(len, views))
                if left < 0:
                    raise ProtocolError(f"{self.name}: more was asked for than the {nbytes} bytes there are")
                last = left == 0 and not ended
                reader.value(views, deadline, last=last)
                ended = ended or last
        except StopIteration as end:
            received: Received = end.value
        if not ended:
            reader.end(left, deadline)
        if nbytes == 0 and self._get.most is not None:
            return _NO  # of a value that is not there a range is empty
        return Answer(Done.OK, "", received)


class Write(Request):
    """Writes a value.

    Args:
        put: The value.
        seconds: It goes by itself after so many; 0: it stays.
    """

    def __init__(self, put: Put, seconds: int) -> None:
        self.name = put.name
        self.nbytes = put.nbytes
        self._put = put
        self._seconds = seconds

    def pieces(self, *, last: bool) -> Iterable[Pieces]:
        """See :class:`Request`."""
        put, name = self._put, self.name.encode()
        before, behind, end = _frame(len(name), put.nbytes, put.only_new, self._seconds)
        runs = put.source(last)
        if isinstance(runs, tuple) and len(runs) == 1:  # the usual case, in less time
            return ((before + name + behind, *runs[0], end),)
        return self._runs(before + name + behind, runs, end)

    @property
    def end(self) -> bytes | None:
        """What stands behind the checksum, if :meth:`value` can be sent in place of :meth:`pieces`."""
        put = self._put
        if put.sealed is None or put.nbytes < _LEAST_SEALED_NBYTES:
            return None
        return _frame(0, 0, put.only_new, self._seconds)[2]

    def value(self) -> Value:
        """What is sent of it by who hashes the data and adds the checksum and :attr:`end`."""
        put, name = self._put, self.name.encode()
        assert put.sealed is not None
        before, behind, _ = _frame(len(name), put.nbytes, put.only_new, self._seconds)
        manifest, data = put.sealed()
        return Value(b"".join((before, name, behind, manifest)), data)

    def _runs(self, head: bytes, runs: Iterable[Pieces], end: bytes) -> Iterator[Pieces]:
        """Not one ahead: what comes after a run is made while that is taken."""
        yield (head,)
        left = self.nbytes
        for run in runs:
            left -= sum(map(len, run))
            yield run if left else (*run, end)

    def at_hand(self, reader: ReplyReader) -> Answer | None:
        """See :class:`Request`."""
        return _OK if reader.skip(_STORED) else None

    def take(self, reader: ReplyReader, deadline: float) -> Answer:
        """See :class:`Request`."""
        if reader.skips(_STORED, deadline):
            return _OK
        return _NO if reader.read(deadline) is None else _OK


@functools.lru_cache(64)
def _form(prefix_nbytes: int, nbytes: int) -> Form:
    return Form(b"$%d\r\n" % (prefix_nbytes + nbytes + HASH_NBYTES), prefix_nbytes, nbytes)


@functools.lru_cache(64)
def _frame(name_nbytes: int, nbytes: int, only_new: bool, seconds: int) -> tuple[bytes, bytes, bytes]:
    """What stands before the name, between it and the value, and behind that."""
    words = [b"NX"] if only_new else []
    if seconds:
        words += [b"EX", b"%d" % seconds]
    before = b"*%d\r\n$3\r\nSET\r\n$%d\r\n" % (3 + len(words), name_nbytes)
    end = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return before, b"\r\n$%d\r\n" % nbytes, b"\r\n" + end
