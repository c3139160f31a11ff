"""The ``ucx`` transport itself: dialling and listening."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from kvferry.core.clock import is_past
from kvferry.core.errors import AuthError, ConnectError, ConnectionClosedError, TransferTimeoutError
from kvferry.transports import ip
from kvferry.transports.base import Connection, Transport
from kvferry.transports.ucx.bootstrap import (
    PREFIX_NBYTES,
    Preamble,
    keeps_messages,
    key_of,
    own_preamble,
    pack_preamble,
    parse_body,
    parse_prefix,
    problem_with,
    uses_shared_memory,
)
from kvferry.transports.ucx.connection import UcxConnection
from kvferry.transports.ucx.context import get_context
from kvferry.transports.ucx.control import ControlSocket
from kvferry.transports.ucx.listener import UcxListener
from kvferry.transports.ucx.settings import parse_address

__all__ = ["UcxTransport"]


class UcxTransport(Transport):
    """Makes UCX connections; has no state, any thread may use it."""

    scheme: ClassVar[str] = "ucx"

    def connect(self, address: str, deadline: float) -> Connection:
        """Connect to ``address``; the peer has answered when it returns.

        Raises:
            AuthError: If another user of this machine is there, or the listener refuses this one.
            ConnectError: If it cannot be reached by the deadline, or refuses; the message says why.
            ConfigError: If the address is malformed, contradicts the environment, or asks for what UCX does
                not have here.
            PluginUnavailableError: If ``ucxx`` is not installed.
        """
        parsed, options = parse_address(address)
        context = get_context(options)
        if is_past(deadline):
            raise ConnectError(f"cannot connect to {parsed.url}: the deadline passed")
        sock = ip.dial(parsed, deadline)
        local = ip.url_of("ucx", sock.getsockname())
        control = ControlSocket(sock, local_address=local, peer_address=parsed.url)
        try:
            own = own_preamble(context)
            peer = _exchange(control, own, parsed.url, deadline)
            if peer.unauthorised:
                raise AuthError(f"{parsed.url} lets this process not in: {peer.refused}")
            if peer.refused:
                raise ConnectError(f"cannot connect to {parsed.url}: {peer.refused}")
            if problem := options.allowed.problem_with_peer(sock):
                raise AuthError(f"cannot connect to {parsed.url}: {problem}")
            if problem := problem_with(own, peer, options):
                raise ConnectError(f"cannot connect to {parsed.url}: {problem}")
            shared, eager = uses_shared_memory(own, peer), keeps_messages(own, peer)
        except BaseException:
            control.abort()
            raise
        return UcxConnection(
            control, context, options, key=key_of(own, peer), error_handling=not shared, eager=eager
        )

    def listen(self, address: str) -> UcxListener:
        """Listen on ``address``; see :meth:`Transport.listen`, raises also as :meth:`connect`."""
        parsed, options = parse_address(address)
        context = get_context(options)
        sock = ip.bind(parsed)
        try:
            return UcxListener(sock, parsed, options, context)
        except BaseException:
            with contextlib.suppress(OSError):
                sock.close()
            raise


def _exchange(control: ControlSocket, own: Preamble, url: str, deadline: float) -> Preamble:
    prefix = memoryview(bytearray(PREFIX_NBYTES))
    try:
        control.send([pack_preamble(own)], deadline)
        control.recv_into([prefix], deadline)
        body = memoryview(bytearray(parse_prefix(prefix)))
        control.recv_into([body], deadline)
        return parse_body(body)
    except (TransferTimeoutError, ConnectionClosedError, ValueError) as error:
        if isinstance(error, TransferTimeoutError):
            reason = "it did not answer as a ucx listener by the deadline"
        elif isinstance(error, ConnectionClosedError):
            reason = "it ended the connection before it answered; check that a ucx listener is there"
        else:
            reason = str(error)
        raise ConnectError(f"cannot connect to {url}: {reason}") from error
