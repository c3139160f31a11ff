from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.address import Address, parse_url, same_place
from kvferry.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [  # the first eight: every form of case C152 that means something
        ("::1", "::1", 8450, "tcp://[::1]:8450"),
        ("[::1]", "::1", 8450, "tcp://[::1]:8450"),
        ("[::1]:9000", "::1", 9000, "tcp://[::1]:9000"),
        ("fe80::1%lo", "fe80::1%lo", 8450, "tcp://[fe80::1%25lo]:8450"),
        ("host", "host", 8450, "tcp://host:8450"),
        ("host:9", "host", 9, "tcp://host:9"),
        ("1.2.3.4:9", "1.2.3.4", 9, "tcp://1.2.3.4:9"),
        ("2605:340:cd50::1", "2605:340:cd50::1", 8450, "tcp://[2605:340:cd50::1]:8450"),
        ("::", "::", 8450, "tcp://[::]:8450"),
        ("[fe80::1%lo]:9", "fe80::1%lo", 9, "tcp://[fe80::1%25lo]:9"),
        ("[fe80::1%25lo]:9", "fe80::1%lo", 9, "tcp://[fe80::1%25lo]:9"),
        ("tcp://[fe80::1%lo]:9", "fe80::1%lo", 9, "tcp://[fe80::1%25lo]:9"),
        ("tcp://[fe80::1%25lo]:9", "fe80::1%lo", 9, "tcp://[fe80::1%25lo]:9"),
        ("tcp://[fe80::1%25]:9", "fe80::1%25", 9, "tcp://[fe80::1%2525]:9"),
        ("::ffff:1.2.3.4", "::ffff:1.2.3.4", 8450, "tcp://[::ffff:1.2.3.4]:8450"),
        ("  host:9  ", "host", 9, "tcp://host:9"),
        ("host:0", "host", 0, "tcp://host:0"),
        ("host:65535", "host", 65535, "tcp://host:65535"),
        ("tcp://host", "host", 8450, "tcp://host:8450"),
        ("tcp://host:9/", "host", 9, "tcp://host:9"),
        ("ucx://host-1.example_net.:9", "host-1.example_net.", 9, "ucx://host-1.example_net.:9"),
    ],
)
def test_host_and_port(text: str, host: str, port: int, url: str) -> None:
    found = parse_url(text, default_port=8450)
    assert (found.host, found.port, found.path) == (host, port, "")
    assert found.url == str(found) == url
    assert parse_url(url) == found
    assert hash(parse_url(url)) == hash(found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (":9", "no host"),
        ("host:", "port after the ':' is missing"),
        ("[::1", "closing ']' is missing"),
        ("host:99999", "port '99999' is not a number from 0 to 65535"),
        ("", "empty"),
        ("   ", "empty"),
        ("tcp://", "no host"),
        ("tcp://:9", "no host"),
        ("[::1]9", "not a :port"),
        ("[::1]:", "port after the ':' is missing"),
        ("[]:9", "not an IPv6 address"),
        ("[host]:9", "not an IPv6 address"),
        ("[1.2.3.4]:9", "not an IPv6 address"),
        ("host:1:2", "not an IPv6 address"),
        ("2605:340:cd50::1::9", "not an IPv6 address"),
        ("fe80::1%", "not a zone"),
        ("fe80::1%a/b", "not a zone"),
        ("host:-1", "not a number"),
        ("host:+1", "not a number"),
        ("host: 9", "not a number"),
        ("host:٣", "not a number"),
        ("host:9/path", "not a number"),
        ("host/path", "not a host name"),
        ("ho st", "not a host name"),
        ("-host", "not a host name"),
        ("host-:9", "not a host name"),
        ("1.2.3.400:9", "not an IPv4 address"),
        ("1.2.3", "not an IPv4 address"),
        ("9000", "not an IPv4 address"),
        ("TCP://host:9", "not a scheme"),
        ("://host", "not a scheme"),
        ("host:9#x", "'#'"),
        ("unix://path", "not absolute"),
        ("unix://", "not absolute"),
        ("unix:///" + "x" * 107, "107 bytes"),
        ("unix:///a%00b", "none of them zero"),
        ("inproc://", "inproc://name"),
        ("inproc://a/b", "inproc://name"),
        ("host:9?rate", "name=value"),
        ("host:9?=1", "name=value"),
        ("host:9?rate=", "name=value"),
        ("host:9?rate=1&&x=2", "name=value"),
        ("host:9?rate=1&rate=2", "twice"),
    ],
)
def test_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(text, default_port=8450)
    assert reason in str(caught.value)
    assert not text.strip() or repr(text) in str(caught.value), "the message does not name the address"


def test_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url("tcp://me:hunter2@host:9?token=hunter3")
    assert "hunter" not in str(caught.value)


def test_port_is_needed_without_a_default() -> None:
    assert parse_url("host:9").port == 9
    with pytest.raises(ConfigError, match="no port"):
        parse_url("host")


def test_unix_path() -> None:
    found = parse_url("unix:///run/kv%20ferry.sock")
    assert (found.scheme, found.host, found.port, found.path) == ("unix", "", None, "/run/kv ferry.sock")
    assert parse_url(found.url) == found


def test_inproc_name() -> None:
    found = parse_url("inproc://store-1.a_b", default_port=8450)
    assert found == Address("inproc", host="store-1.a_b")
    assert found.url == "inproc://store-1.a_b"


def test_default_scheme() -> None:
    assert parse_url("host", default_scheme="ucx", default_port=1).scheme == "ucx"
    assert parse_url("name", default_scheme="inproc").url == "inproc://name"


def test_options() -> None:
    found = parse_url("host:9?rate=1GB/s&name=a%26b%3D", options=("rate", "name"))
    assert dict(found.options) == {"rate": "1GB/s", "name": "a&b="}
    assert found.url == "tcp://host:9?rate=1GB/s&name=a%26b%3D"
    assert parse_url(found.url) == found
    assert found != parse_url("host:9?rate=2GB/s")
    assert dict(parse_url("host:9?").options) == {}


def test_unknown_option_is_refused_with_the_nearest() -> None:
    assert parse_url("host:9?rat=1").options["rat"] == "1", "without a list all pass"
    with pytest.raises(ConfigError, match=r"'rat' is not an option of tcp, did you mean rate\?"):
        parse_url("host:9?rat=1", options=("rate", "lanes"))
    with pytest.raises(ConfigError, match="known: lanes, rate"):
        parse_url("host:9?zzz=1", options=("rate", "lanes"))
    with pytest.raises(ConfigError, match="it has none"):
        parse_url("inproc://x?zzz=1", options=())


@given(st.ip_addresses(v=6), st.integers(0, 65535))
def test_every_ipv6_address_goes_through(host: ipaddress.IPv6Address, port: int) -> None:
    for text in (str(host), host.exploded, f"[{host}]:{port}", f"tcp://[{host}]:{port}"):
        found = parse_url(text, default_port=port)
        assert ipaddress.ip_address(found.host) == host
        assert found.port == port
        assert parse_url(found.url) == found


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        found = parse_url(text, default_port=1)
    except ConfigError:
        return
    assert parse_url(found.url) == found


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("tcp://127.0.0.1:1", "auto://127.0.0.1:1", True),
        ("tcp://127.0.0.1:1", "tcp://0.0.0.0:1?lanes=2", True),
        ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", False),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", False),
        ("tcp://127.0.0.1:1", "tcp://127.0.0.2:1", False),
        ("unix:///a", "unix:///a?rate=1GB/s", True),
        ("unix:///a", "unix:///b", False),
        ("unix:///a", "tcp://127.0.0.1:1", False),
    ],
)
def test_places_that_clash(one: str, other: str, same: bool) -> None:
    assert same_place(one, other) is same
    assert same_place(other, one) is same


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("unix:/tmp/x", "write two slashes behind the scheme: unix:///tmp/x"),
        ("tcp:/127.0.0.1:1", "write two slashes behind the scheme: tcp://127.0.0.1:1"),
        ("tcp:127.0.0.1:1", "write two slashes behind the scheme: tcp://127.0.0.1:1"),
        ("auto:host:1?lanes=2", "write two slashes behind the scheme: auto://host:1?lanes=2"),
        ("tls:[::1]:1", "write two slashes behind the scheme: tls://[::1]:1"),
        ("fe80:1:2", "is not an IPv6 address"),
        ("unix:///tmp/a%00b", "leave the %00 away"),
        ("unix:///tmp/\udcff", "is not text"),
    ],
)
def test_slips_of_the_pen_are_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_url(text)
