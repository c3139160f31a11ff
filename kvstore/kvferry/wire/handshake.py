"""How a handshake fails: what its errors become, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvferry.core.errors import (
    AuthError,
    ConnectError,
    ConnectionClosedError,
    KVFerryError,
    OverloadedError,
    ProtocolError,
    TransferTimeoutError,
)

__all__ = ["shaking_hands"]


@contextmanager
def shaking_hands(
    address: str, abort: Callable[[], None], tell_refusal: Callable[[KVFerryError], None], within_s: float
) -> Iterator[None]:
    """Around a handshake: any error aborts the connection.

    Args:
        address: Of the peer, for messages.
        abort: Ends the connection at once.
        tell_refusal: Tells the peer, where it can be told, that it broke the protocol, offered no version
            or may not come in.
        within_s: Time that the handshake was given, for messages; not what was left of it by now.

    Raises:
        ConnectError: If it is not complete in time, or the peer left.
    """
    try:
        yield
    except TransferTimeoutError as error:
        abort()
        raise ConnectError(
            f"{address}: no handshake within {within_s:.3g} s; check that kvferry is at the other "
            "end, over the same transport, and that its process is not stopped or overloaded"
        ) from error
    except ConnectionClosedError as error:
        abort()
        raise ConnectError(f"{address}: connection closed during the handshake: {error}") from error
    except (ProtocolError, AuthError, OverloadedError) as error:
        tell_refusal(error)
        abort()
        raise
    except BaseException:
        abort()
        raise
