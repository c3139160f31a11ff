from __future__ import annotations

import pytest

from kvferry.bench.registry import Options
from kvferry.bench.scenarios.transport import TransportOptions
from kvferry.core.errors import ConfigError


def test_an_address_names_what_is_measured() -> None:
    found = TransportOptions.of(Options(params={"address": "ucx://127.0.0.1:9"}))
    assert found.scenarios == ("transport.ucx.put", "transport.ucx.get", "transport.ucx.rpc")
    with pytest.raises(ConfigError, match="auto chooses by itself"):
        TransportOptions.of(Options(params={"address": "auto://127.0.0.1:9"}))
