from __future__ import annotations

import pytest

from kvferry.bench.link.serve import serve_link
from kvferry.bench.registry import Options
from kvferry.bench.results import Param
from kvferry.bench.scenarios import transport_link, transport_rate
from kvferry.bench.scenarios.transport import TransportOptions
from kvferry.core.config import Config
from kvferry.core.errors import ConfigError


def test_an_address_names_what_is_measured() -> None:
    found = TransportOptions.of(Options(params={"connect": "ucx://127.0.0.1:9"}))
    assert found.scenarios == tuple(f"transport.ucx.{kind}" for kind in ("put", "get", "roundtrip", "batch"))
    with pytest.raises(ConfigError, match="auto chooses by itself"):
        TransportOptions.of(Options(params={"connect": "auto://127.0.0.1:9"}))


def test_params_have_the_lanes_of_the_address() -> None:
    def of(address: str) -> list[tuple[int, str]]:
        options = TransportOptions.of(Options(params={"connect": address, "with": "none"}))
        scheme = options.scenarios[0].split(".")[1]
        return [(one.lanes, one.tls) for one in transport_link.Variant.of(scheme, options)]

    assert of("tcp://127.0.0.1:9?lanes=4") == [(4, "")]
    assert of("tcp://127.0.0.1:9") == [(1, "")]
    assert of("ucx://127.0.0.1:9?tls=tcp") == [(1, "tcp")]


def test_a_bare_host_means_tcp_and_the_port_of_the_server() -> None:
    def of(text: str) -> str:
        return TransportOptions.of(Options(params={"connect": text})).address

    assert of("10.0.0.1") == "tcp://10.0.0.1:8470"
    assert of("::1") == "tcp://[::1]:8470"
    assert of("node-7:9") == "tcp://node-7:9"
    assert of("ucx://node-7?require=rdma") == "ucx://node-7:8470?require=rdma"
    with pytest.raises(ConfigError, match="inproc"):
        of("inproc://x")


def test_lanes_beside_an_address_are_refused() -> None:
    with pytest.raises(ConfigError, match="part of the address"):
        TransportOptions.of(Options(params={"connect": "tcp://127.0.0.1:9", "lanes": "4"}))


def test_the_rate_is_measured_with_the_lanes_that_were_asked_for() -> None:
    def of(**params: str) -> tuple[int, ...]:
        return TransportOptions.of(Options(params={"with": "none", **params})).rate_lanes

    assert of() == (1, 4)
    assert of(lanes="3") == (3,)
    asked = TransportOptions.of(Options(params={"connect": "tcp://127.0.0.1:9?lanes=4"}))
    assert transport_rate.lanes_of(asked) == (4,)


def test_ends_are_apart_unless_they_may_be_anywhere() -> None:
    assert TransportOptions.of(Options(params={"with": "none"})).apart
    assert not TransportOptions.of(Options(params={"with": "none", "ends": "anywhere"})).apart
    with pytest.raises(ConfigError, match="apart, anywhere"):
        TransportOptions.of(Options(params={"with": "none", "ends": "same"}))


@pytest.mark.parametrize("url", ["auto://127.0.0.1:0", "inproc://a"])
def test_only_what_can_be_dialled_is_served(url: str) -> None:
    with pytest.raises(ConfigError, match="has to be named"):
        serve_link(url, None, Config())


@pytest.mark.parametrize("walk", ["0", "1000TiB"])
def test_a_walk_is_memory_that_there_is(walk: str) -> None:
    with pytest.raises(ConfigError, match=r"--walk \d+: take from 4096 bytes up to"):
        serve_link("tcp://127.0.0.1:0", walk, Config())
    with pytest.raises(ConfigError, match="--walk"):
        TransportOptions.of(Options(params={"with": "none", "walk": walk}))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"scheme": ""}, "--scheme '' names nothing"),
        ({"connect": " "}, "--connect ' ' names nothing"),
        ({"checksum": ","}, "--checksum ',' names nothing"),
        ({"scenario": ""}, "--scenario '' names nothing"),
        ({"with": "none,redis"}, "none leaves all of them out"),
        (
            {"scenario": "transport.tcp.put", "scheme": "unix"},
            "--scheme unix beside --scenario transport.tcp.put",
        ),
        ({"connect": "tcp://127.0.0.1:9", "scheme": "tcp,ucx"}, "--scheme tcp,ucx beside --connect tcp://"),
        ({"seconds": float("inf")}, "--seconds inf: a run takes at most 3600 s"),
        ({"seconds": float("nan")}, "--seconds nan"),
    ],
)
def test_what_was_asked_is_never_left_aside(params: dict[str, Param], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransportOptions.of(Options(params={"with": "none", **params}))


def test_a_scheme_may_stand_beside_what_has_it() -> None:
    found = TransportOptions.of(
        Options(params={"scenario": "transport.tcp.put", "scheme": "tcp", "with": "none"})
    )
    assert found.scenarios == ("transport.tcp.put",)
