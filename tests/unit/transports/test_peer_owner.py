from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator

import pytest

from kvferry.core.errors import ConfigError
from kvferry.transports import peer_owner, sock_diag
from kvferry.transports.peer_owner import AllowedUsers, is_local, owner_of_peer, parse_allowed


@contextlib.contextmanager
def connected(
    host: str, family: socket.AddressFamily, *, dual: bool = False
) -> Iterator[list[socket.socket]]:
    bound = "::" if dual else host
    kind = socket.AF_INET6 if dual else family
    try:
        server = socket.create_server((bound, 0), family=kind, dualstack_ipv6=dual)
    except (OSError, ValueError):
        pytest.skip(f"this machine has no {bound}")
    with server, socket.create_connection((host, server.getsockname()[1]), timeout=20) as one:
        other, _ = server.accept()
        with other:
            yield [one, other]


@pytest.fixture(params=["asked", "listed"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a question to the kernel, and where that is not answered by its list."""

    def refuse(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such handler")

    def never(*_: object) -> None:
        raise AssertionError("the list is not needed")

    if request.param == "listed":
        monkeypatch.setattr(peer_owner, "owner_of", refuse)
    else:
        monkeypatch.setattr(peer_owner, "_listed_owner", never)


@pytest.mark.parametrize(
    ("host", "family", "dual"),
    [
        ("127.0.0.1", socket.AF_INET, False),
        ("::1", socket.AF_INET6, False),
        ("127.0.0.1", socket.AF_INET, True),
    ],
)
def test_the_owner_of_each_end_is_found(host: str, family: socket.AddressFamily, dual: bool) -> None:
    with connected(host, family, dual=dual) as ends:
        for end in ends:
            assert is_local(end)
            assert owner_of_peer(end) == os.geteuid()
            assert AllowedUsers().problem_with_peer(end) == ""


def test_an_end_that_was_closed_is_nobodys() -> None:
    """The kernel lists it with uid 0: who says something and closes must not be taken for root."""
    with connected("127.0.0.1", socket.AF_INET) as (one, other):
        one.sendall(b"x")
        one.close()
        assert owner_of_peer(other) is None
        with connected("127.0.0.1", socket.AF_INET) as (third, _):
            far = ipaddress.ip_address("127.0.0.1")
            ends = (far, third.getpeername()[1]), (far, 1)  # the socket that listens there is not this one
            assert sock_diag.owner_of(*ends) is None
        assert "cannot be found" in AllowedUsers().problem_with_peer(other)
        assert AllowedUsers(anybody=True).problem_with_peer(other) == ""


def test_other_users_need_to_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_owner, "owner_of_peer", lambda _: os.geteuid() + 1)
    with connected("127.0.0.1", socket.AF_INET) as (one, _):
        assert f"allow_uid={os.geteuid() + 1}" in AllowedUsers().problem_with_peer(one)
        assert AllowedUsers(frozenset({os.geteuid() + 1})).problem_with_peer(one) == ""


def test_allow_uid_is_read() -> None:
    assert parse_allowed(None) == AllowedUsers()
    assert parse_allowed("1,2") == AllowedUsers(frozenset({1, 2}))
    assert parse_allowed("any").open
    with pytest.raises(ConfigError, match="allow_uid=any"):
        parse_allowed("me")
