"""Questions to a daemon's HTTP port, for the commands that show and change it."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

import msgspec
import typer

from kvferry.cli.options import absolute
from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in, time_left
from kvferry.core.errors import ConfigError, ConnectError, ProtocolError, RequestError, TransferTimeoutError
from kvferry.core.names import connect_by

if TYPE_CHECKING:
    from kvferry.daemon.admin import AdminDone
    from kvferry.daemon.status import DaemonStatus

__all__ = ["Port", "TokenOption", "UrlOption"]

T = TypeVar("T")

_TIMEOUT_S = 15.0
_MOST_NBYTES = 64 << 20

UrlOption = Annotated[
    Optional[str],  # noqa: UP045  typer evaluates it
    typer.Option("--url", metavar="URL", help="The daemon's HTTP port. [default: daemon.http]"),
]


TokenOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--token-file", metavar="FILE", help="File with the token to show. [default: daemon.token_file]"
    ),
]


class _NeedsTokenError(RequestError):
    """The port wants a token."""


class _Refused(msgspec.Struct):
    code: str = ""
    message: str = ""


class _RefusedBody(msgspec.Struct):
    error: _Refused


class _TimedSocket(socket.socket):
    """A socket whose deadline is that of all that is sent and received, not of each call."""

    deadline: float

    def recv_into(self, *args: Any, **kwargs: Any) -> int:  # noqa: ANN401 - as of the socket
        """As of the socket; raises :class:`TimeoutError` at the deadline."""
        left = time_left(self.deadline)
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)
        return super().recv_into(*args, **kwargs)

    @classmethod
    def connected(cls, host: str, port: int, deadline: float) -> _TimedSocket:
        """One that is connected."""
        plain = connect_by(host, port, deadline)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        timed = cls(plain.family, plain.type, plain.proto, plain.detach())
        timed.deadline = deadline
        timed.settimeout(time_left(deadline))
        return timed


class Port:
    """The HTTP port of a daemon; each question is a connection of its own.

    Args:
        url: ``http://host:port``.
        token_file: As ``daemon.token_file``.

    Raises:
        ConfigError: If that is no such address.
    """

    def __init__(self, url: str, token_file: str = "none") -> None:  # noqa: S107 - a path
        address = parse_url(url, default_scheme="http", default_port=8451)
        if address.scheme != "http" or not address.port:
            raise ConfigError(f"{url} must be http://host:port, as the daemon's ready line has it")
        self.url = address.url
        self._token_file = token_file
        self._shown: dict[str, str] = {}
        self._host, self._port = address.host, address.port

    @classmethod
    def of(cls, url: str | None, config: str | None, token_file: str | None = None) -> Port:
        """The port that a command was told, or that of the configuration.

        Raises:
            ConfigError: If there is none.
        """
        from kvferry.core.config_sources import load_config

        daemon = load_config(config).config.daemon
        url = url or daemon.http
        if url is None:
            raise ConfigError("daemon.http is none: say with --url where the daemon's HTTP port is")
        return cls(url, absolute(token_file, "--token-file") or daemon.token_file)

    def status(self) -> DaemonStatus:
        """The daemon's status.

        Raises:
            ConnectError: If nobody answers.
            ProtocolError: If the answer is no status.
        """
        from kvferry.daemon.status import DaemonStatus

        try:
            return self._decoded(self.ask("GET", "/status", headers=self._shown), DaemonStatus)
        except _NeedsTokenError:
            if self._shown:
                raise
            self._shown = self._authorization()
            return self._decoded(self.ask("GET", "/status", headers=self._shown), DaemonStatus)

    def admin(self, verb: str, request: msgspec.Struct) -> AdminDone:
        """Change something.

        Raises:
            ConfigError: If there is no token to show.
            ConnectError: If nobody answers.
            RequestError: If it is refused.
        """
        from kvferry.daemon.admin import AdminDone

        headers = {**self._authorization(), "content-type": "application/json"}
        body = msgspec.json.encode(request)
        return self._decoded(self.ask("POST", f"/admin/{verb}", body, headers), AdminDone)

    def _authorization(self) -> dict[str, str]:
        from kvferry.daemon.token import read_token, token_path

        path = token_path(self._token_file)
        if path is None:
            raise ConfigError("daemon.token_file is none: say with --token-file where the admin token is")
        return {"authorization": f"Bearer {read_token(path)}"}

    def _decoded(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"{self.url} is no kvferry daemon of this version: {error}", remote=True
            ) from error

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """One question; the body of its answer, which is there within 15 s.

        Raises:
            ConnectError: If nobody answers.
            TransferTimeoutError: If somebody is there, and does not answer in time.
            RequestError: If the answer is a refusal; with its reason.
        """
        connection = http.client.HTTPConnection(self._host, self._port)
        try:
            connection.sock = _TimedSocket.connected(self._host, self._port, deadline_in(_TIMEOUT_S))
            connection.request(method, path, body or None, dict(headers or {}))
            answer = connection.getresponse()
            data = answer.read(_MOST_NBYTES)
        except TimeoutError as error:
            if connection.sock is None:
                raise self._nobody("timed out") from error
            unsure = "; it may still do this, if it had begun" if method == "POST" else ""
            raise TransferTimeoutError(
                f"the daemon at {self.url} hangs: no answer within {_TIMEOUT_S:g} s{unsure}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._nobody(
                getattr(error, "strerror", None) or str(error) or type(error).__name__
            ) from error
        finally:
            connection.close()
        if answer.status >= 400:
            kind = _NeedsTokenError if answer.status == 401 else RequestError
            raise kind(f"{self.url}{path} refused it ({answer.status}): {_reason(data)}")
        return data

    def _nobody(self, reason: str) -> ConnectError:
        return ConnectError(
            f"no daemon answers at {self.url}: {reason}; start one with kvferry serve, or say with --url "
            "where its HTTP port is"
        )


def _reason(data: bytes) -> str:
    try:
        return msgspec.json.decode(data, type=_RefusedBody).error.message
    except msgspec.DecodeError:
        return data[:200].decode(errors="replace")
