"""The ``auto`` transport itself: asking, choosing, and dialling what was chosen."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from kvferry.core.address import Address
from kvferry.core.clock import earliest, is_past
from kvferry.core.errors import (
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    KVFerryError,
    TransferTimeoutError,
)
from kvferry.core.units import parse_rate
from kvferry.transports import ip
from kvferry.transports.auto.choosing import Ranking, rank, remedy_for_wish, ucx_problem
from kvferry.transports.auto.connection import AutoConnection, wrap
from kvferry.transports.auto.listener import AutoListener
from kvferry.transports.auto.offers import (
    ACCEPTED,
    PREFIX_NBYTES,
    Ask,
    Offer,
    Offers,
    Taken,
    pack,
    parse_body,
    parse_prefix,
    shown,
)
from kvferry.transports.auto.options import SCHEMES, AutoOptions, parse_auto
from kvferry.transports.auto.place import host_identity, socket_path
from kvferry.transports.base import Connection, Listener, Transport
from kvferry.transports.choices import (
    Choice,
    Rejected,
    announced_regions,
    record_choice,
)
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.sockets import SocketConnection
from kvferry.transports.spin import DEFAULT_SPIN_S

__all__ = ["AutoTransport"]

_ANSWER_S: Final = 5.0
_FRESH_S: Final = 2.0
_NO_ANSWER: Final = "the peer made no offers, it is no auto listener"
_PLAIN_OFFERS: Final = Offers(
    host="", offers=[Offer(scheme="tcp")], lacking=dict.fromkeys(("unix", "ucx"), _NO_ANSWER)
)


@dataclass
class _Asked:
    """The port after the question.

    Attributes:
        host: This one, as it was told.
        answer: What it offers.
        port: Its socket, on which the stream may go on; ``None`` if it cannot.
        at: When it answered.
    """

    host: str
    answer: Offers
    port: SocketConnection | None = None
    at: float = field(default_factory=time.monotonic)

    def take(self) -> SocketConnection:
        """The socket, now the caller's."""
        assert self.port is not None
        taken, self.port = self.port, None
        return taken

    def close(self) -> None:
        """Close the socket, if nobody took it."""
        if self.port is not None:
            self.take().close()


class AutoTransport(Transport):
    """Makes connections over the best transport of both ends; has no state, any thread may use it."""

    scheme: ClassVar[str] = "auto"

    def connect(self, address: str, deadline: float) -> AutoConnection:
        """Ask ``address`` what there is, and connect over the best of it.

        The connection's ``choice`` says which one and why, the log too when it is a new one.

        Raises:
            ConnectError: See :meth:`Transport.connect`; also if the address requires what both ends do not
                have, or what was chosen fails, and ``fallback`` does not allow anything else.
            ConfigError: See :meth:`Transport.connect`.
        """
        parsed, options = parse_auto(address)
        try:
            host = host_identity()
        except OSError as error:  # to go on would be a slower way for as long as the connection lives
            raise ConnectError(f"cannot connect to {parsed.url}: {ip.reason_of(error)}") from error
        asked = _ask(parsed, options, host, deadline)
        try:
            ranking = rank(asked.answer, host, options)
            if not ranking.usable:
                raise _refusal(parsed, options, asked.answer, ranking)
            return _connect_best(parsed, options, asked, ranking, deadline)
        finally:
            asked.close()

    def listen(self, address: str) -> AutoListener:
        """Listen on the port of ``address`` and beside it.

        Raises:
            ConnectError: See :meth:`Transport.listen`.
            ConfigError: See :meth:`Transport.listen`; also if the address requires what this host has not,
                and ``fallback`` does not allow anything else.
        """
        parsed, options = parse_auto(address)
        sock = ip.bind(parsed)
        sides: list[tuple[Listener, bool]] = []
        try:
            lacking = _listen_beside(parsed, options, sides)
            _check_wish(parsed, options, [one.address.partition("://")[0] for one, _ in sides], lacking)
            listener = _listener(sock, parsed, options, sides, lacking)
        except BaseException:
            sock.close()
            for one, _ in sides:
                one.close()
            raise
        offered = listener.offered
        rejected = tuple(Rejected(scheme, reason) for scheme, reason in lacking.items())
        fell_back = bool(options.require) and options.wish not in offered
        record_choice(
            listener.address,
            Choice("+".join(offered) or "tcp", "offered to peers", rejected, fell_back=fell_back),
        )
        return listener


# -- listening -------------------------------------------------------------------------------------------


def _listener(
    sock: socket.socket,
    parsed: Address,
    options: AutoOptions,
    sides: list[tuple[Listener, bool]],
    lacking: dict[str, str],
) -> AutoListener:
    try:
        return AutoListener(sock, parsed, options, sides, lacking)
    except OSError as error:  # no descriptors
        raise ConnectError(f"cannot listen on {parsed.url}: {ip.reason_of(error)}") from error


def _listen_beside(
    parsed: Address, options: AutoOptions, sides: list[tuple[Listener, bool]]
) -> dict[str, str]:
    """Open what is to be offered beside the port, into ``sides``; what is not offered, with the reason."""
    from kvferry.transports import get_transport

    lacking = {
        one: f"it listens with require={options.require}" for one in SCHEMES if not options.considers(one)
    }
    if options.considers("unix"):
        rate = "" if options.rate is None else f"?rate={options.rate}"
        try:
            url = Address("unix", path=socket_path()).url
            sides.append((get_transport("unix").listen(url + rate), False))
        except KVFerryError as error:
            lacking["unix"] = str(error)
    if options.considers("ucx"):
        rdma = options.require != "ucx"
        problem = "it cannot limit its rate" if options.rate is not None else ucx_problem(options.require)
        if not problem:
            query = {"require": "rdma"} if rdma else {}
            url = Address("ucx", host=parsed.host, port=0, options=query).url
            try:
                sides.append((get_transport("ucx").listen(url), rdma))
            except KVFerryError as error:
                problem = str(error)
        if problem:
            lacking["ucx"] = problem
    return lacking


def _check_wish(parsed: Address, options: AutoOptions, found: list[str], lacking: Mapping[str, str]) -> None:
    found = [*found, "tcp"]
    if not options.require or options.wish in found or not set(options.fallback).isdisjoint(found):
        return
    why = lacking.get(options.wish, "it is not there")
    raise ConfigError(f"cannot listen on {parsed.url}: {remedy_for_wish(options, found, why)}")


# -- dialling --------------------------------------------------------------------------------------------


def _ask(parsed: Address, options: AutoOptions, host: str, deadline: float) -> _Asked:
    """Ask the port; a peer that does not answer as one of ``auto`` counts as one that offers tcp."""
    port = _dial(parsed, options, deadline)
    limit = earliest(deadline, time.monotonic() + _ANSWER_S)
    ask = Ask(host=host, require=options.require, regions=list(announced_regions()))
    try:
        port.send([pack(ask)], limit)
        prefix = memoryview(bytearray(PREFIX_NBYTES))
        port.recv_into([prefix], limit)
        body = memoryview(bytearray(parse_prefix(prefix)))
        port.recv_into([body], limit)
        answer = parse_body(body, Offers)
    except TransferTimeoutError as error:
        port.abort()
        if is_past(deadline):
            raise ConnectError(f"cannot connect to {parsed.url}: no offers came by the deadline") from error
    except (ConnectionClosedError, ValueError):
        port.abort()
    except BaseException:
        port.abort()
        raise
    else:
        if answer.refused:
            port.abort()
            raise ConnectError(f"cannot connect to {parsed.url}: {shown(answer.refused)}")
        return _Asked(host, answer, port)
    return _Asked(host, _PLAIN_OFFERS)


def _dial(parsed: Address, options: AutoOptions, deadline: float) -> SocketConnection:
    sock = ip.dial(parsed, deadline)
    try:
        local = ip.url_of("tcp", sock.getsockname())
        limit = parse_rate(options.rate) if options.rate is not None else None
        return HashedSocketConnection(
            sock, local_address=local, peer_address=parsed.url, rate=limit, spin_s=DEFAULT_SPIN_S
        )
    except BaseException:
        sock.close()
        raise


def _refusal(parsed: Address, options: AutoOptions, answer: Offers, ranking: Ranking) -> ConnectError:
    """Nothing can be taken: what was asked, what there is, why that is not it, and what to do."""
    offered = [shown(one.scheme) for one in answer.offers]
    considered = [one for one in ranking.rejected if options.considers(one.scheme)]
    why = "; ".join(f"{one.scheme}: {one.reason}" for one in considered)
    if options.require:
        return ConnectError(f"cannot connect to {parsed.url}: {remedy_for_wish(options, offered, why)}")
    return ConnectError(f"cannot connect to {parsed.url}: nothing that it offers can be used here: {why}")


def _connect_best(
    parsed: Address, options: AutoOptions, asked: _Asked, ranking: Ranking, deadline: float
) -> AutoConnection:
    """The first usable transport that works; those behind the first only as ``fallback`` allows."""
    wanted = options.wish or ranking.usable[0][0].scheme
    failed: list[Rejected] = []
    cause: KVFerryError | None = None
    for number, (offer, reason) in enumerate(ranking.usable):
        if number and offer.scheme not in options.fallback:
            continue
        try:
            inner = _connect_one(parsed, options, asked, offer, deadline)
        except KVFerryError as error:
            failed.append(Rejected(offer.scheme, f"it failed: {error}"))
            cause = error
            continue
        rest = (Rejected(one.scheme, f"{offer.scheme} is better") for one, _ in ranking.usable[number + 1 :])
        choice = Choice(
            offer.scheme,
            f"as fallback={','.join(options.fallback)} allows" if number else reason,
            (*failed, *ranking.rejected, *rest),
            fell_back=offer.scheme != wanted,
            regions=tuple(sorted(set(asked.answer.regions) & set(announced_regions()))),
        )
        record_choice(parsed.url, choice)
        return wrap(inner, choice, local_address=inner.local_address, peer_address=parsed.url)
    text = "; ".join(f"{one.scheme}, but {one.reason}" for one in failed)
    hint = "" if options.fallback or wanted == "tcp" else "; fallback=tcp in the address goes on without it"
    raise ConnectError(f"cannot connect to {parsed.url}: chose {text}{hint}") from cause


def _connect_one(
    parsed: Address, options: AutoOptions, asked: _Asked, offer: Offer, deadline: float
) -> Connection:
    from kvferry.transports import get_transport

    if offer.scheme == "tcp":
        return _connect_tcp(parsed, options, asked, deadline)
    if offer.scheme == "unix":
        query = {} if options.rate is None else {"rate": options.rate}
        url = Address("unix", path=offer.path, options=query).url
    else:
        query = {"require": "rdma"} if options.require != "ucx" else {}
        url = Address("ucx", host=parsed.host, port=offer.port, options=query).url
    inner = get_transport(offer.scheme).connect(url, deadline)
    try:
        inner.send([asked.answer.ticket], deadline)
        reply = bytearray(len(ACCEPTED))
        inner.recv_into([memoryview(reply)], deadline)
        if reply != ACCEPTED:
            raise ConnectError(f"{url} did not take our ticket, it is another listener")
    except BaseException:
        inner.abort()
        raise
    return inner


def _connect_tcp(parsed: Address, options: AutoOptions, asked: _Asked, deadline: float) -> Connection:
    from kvferry.transports import get_transport

    if asked.port is not None and options.lanes == 1:
        if time.monotonic() - asked.at > _FRESH_S:  # the listener may have given up on it meanwhile
            asked.close()
            renewed = _ask(parsed, options, asked.host, deadline)
            asked.port, asked.at = renewed.port, renewed.at
        if asked.port is not None:
            asked.port.send([pack(Taken(scheme="tcp"))], deadline)
            return asked.take()
    query = {} if options.rate is None else {"rate": options.rate}
    if options.lanes > 1:
        query["lanes"] = str(options.lanes)
    return get_transport("tcp").connect(
        dataclasses.replace(parsed, scheme="tcp", options=query).url, deadline
    )
