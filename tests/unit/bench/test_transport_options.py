from __future__ import annotations

import pytest

from kvferry.bench.link.serve import serve_link
from kvferry.bench.registry import Options
from kvferry.bench.scenarios import transport_link
from kvferry.bench.scenarios.transport import TransportOptions
from kvferry.core.config import Config
from kvferry.core.errors import ConfigError


def test_an_address_names_what_is_measured() -> None:
    found = TransportOptions.of(Options(params={"address": "ucx://127.0.0.1:9"}))
    assert found.scenarios == ("transport.ucx.put", "transport.ucx.get", "transport.ucx.rpc")
    with pytest.raises(ConfigError, match="auto chooses by itself"):
        TransportOptions.of(Options(params={"address": "auto://127.0.0.1:9"}))


def test_params_have_the_lanes_of_the_address() -> None:
    def of(address: str) -> list[tuple[int, str]]:
        options = TransportOptions.of(Options(params={"address": address, "with": "none"}))
        scheme = options.scenarios[0].split(".")[1]
        return [(one.lanes, one.tls) for one in transport_link._Variant.of(scheme, options)]

    assert of("tcp://127.0.0.1:9?lanes=4") == [(4, "")]
    assert of("tcp://127.0.0.1:9") == [(1, "")]
    assert of("ucx://127.0.0.1:9?tls=tcp") == [(1, "tcp")]


def test_lanes_beside_an_address_are_refused() -> None:
    with pytest.raises(ConfigError, match="part of the address"):
        TransportOptions.of(Options(params={"address": "tcp://127.0.0.1:9", "lanes": "4"}))


def test_auto_is_not_served() -> None:
    with pytest.raises(ConfigError, match="has to be named"):
        serve_link("auto://127.0.0.1:0", None, Config())
