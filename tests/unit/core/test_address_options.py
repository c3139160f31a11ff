"""Every option of the configuration that takes an address, with every form that people write."""

from __future__ import annotations

import pytest

from kvferry.core.address import parse_url
from kvferry.core.config import Config
from kvferry.core.config_sources import fields, load_config
from kvferry.core.config_types import Url
from kvferry.core.errors import ConfigError

RANKS = 8


def _urls() -> dict[str, Url]:
    """The marker of each option that is an address."""
    return {
        key: marker for key, field in fields().items() for marker in field.metadata if isinstance(marker, Url)
    }


def test_all_options_are_found() -> None:
    assert set(_urls()) == {
        "prefill.listen", "decode.listen", "decode.kv_listen", "gateway.listen", "gateway.prefill",
        "gateway.decode", "daemon.listen", "daemon.http",
    }  # fmt: skip


@pytest.mark.parametrize("key", sorted(_urls()))
@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("::1", "[::1]", None),
        ("[::1]", "[::1]", None),
        ("[::1]:9000", "[::1]", 9000),
        ("fe80::1%lo", "[fe80::1%25lo]", None),
        ("host", "host", None),
        ("host:9", "host", 9),
        ("1.2.3.4:9", "1.2.3.4", 9),
        ("2605:340:cd50::1", "[2605:340:cd50::1]", None),
    ],
)
def test_forms_of_c152_are_read(key: str, text: str, host: str, port: int | None) -> None:
    url = _urls()[key]
    section, name = key.split(".")
    value = getattr(getattr(load_config(assignments=[f"{key}={text}"]).config, section), name)
    found = value[0] if isinstance(value, tuple) else value
    assert found == f"{url.default_scheme}://{host}:{url.default_port if port is None else port}"
    for scheme in ("auto", "ucx", "tls"):
        if url.default_scheme == "tcp":
            loaded = load_config(assignments=[f"{key}={scheme}://{text}"]).config
            value = getattr(getattr(loaded, section), name)
            assert (value[0] if isinstance(value, tuple) else value).startswith(f"{scheme}://{host}:")


@pytest.mark.parametrize("key", sorted(_urls()))
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (":9", "no host"),
        ("host:", "port after the ':' is missing"),
        ("[::1", "closing ']' is missing"),
        ("host:99999", "not a number from 0 to 65535"),
        ("", "empty|at least 1"),
        ("2605:340:cd50::1:99999", "not an IPv6 address"),
    ],
)
def test_forms_of_c152_are_refused_with_the_reason(key: str, text: str, reason: str) -> None:
    if key in ("decode.kv_listen", "daemon.listen", "daemon.http") and not text:
        section, name = key.split(".")
        found = load_config(assignments=[f"{key}="]).config
        assert getattr(getattr(found, section), name) is None  # it may be left out
        return
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(assignments=[f"{key}={text}"])
    assert key in str(caught.value)


def test_default_ports_are_apart_for_eight_ranks() -> None:
    """C154."""
    config = Config()
    taken = {8451: "the daemon's HTTP"}
    assert parse_url(config.daemon.http or "").port == 8451
    for name, ranks in (("gateway", 1), ("prefill", RANKS), ("decode", RANKS)):
        base = parse_url(getattr(config, name).listen).port
        assert base is not None
        for rank in range(ranks):
            assert base + rank not in taken, f"{name} {rank} and {taken[base + rank]} share {base + rank}"
            taken[base + rank] = f"{name} {rank}"
    assert config.daemon.listen == ("tcp://127.0.0.1:8450",)
    assert 8450 not in taken
    assert config.decode.kv_listen is None  # a free one, which the worker names
    assert len(taken) == 1 + 2 * RANKS + 1
