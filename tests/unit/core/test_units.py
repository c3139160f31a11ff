from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ConfigError
from kvferry.core.units import (
    format_nbytes,
    format_rate,
    format_seconds,
    parse_nbytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        (4096.0, 4096),
        ("512B", 512),
        ("512 b", 512),
        ("8GiB", 8 << 30),
        (" 512 MiB ", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5gib", 3 << 29),
        ("1KIB", 1024),
        ("1kB", 1000),
        ("1KB", 1000),
        ("2TiB", 2 << 40),
        (".5KiB", 512),
        ("0.3KiB", 307),
    ],
)
def test_parse_nbytes(text: str | float, nbytes: int) -> None:
    found = parse_nbytes(text)
    assert found == nbytes
    assert isinstance(found, int)


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "8G", "8Gb", "8 gIb", "-1", "+1", "1e9", "inf", "nan", "1_000", "1,5GB", "1.2.3", "1 2",
     "٣", "9" * 30, "8GiB/s", "8s", 1.5, "1.5", "1.5B", -1, math.inf, math.nan, True, None],
)  # fmt: skip
def test_nbytes_refused(text: str | float) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_nbytes(text)
    assert repr(text) in str(caught.value)
    assert "8GiB" in str(caught.value)


@pytest.mark.parametrize("text", ["8388608TiB", "9300PB", 2**63, 1e30])
def test_nbytes_too_large(text: str | float) -> None:
    with pytest.raises(ConfigError, match="too large"):
        parse_nbytes(text)
    assert parse_nbytes(2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5s", 5.0), ("200ms", 0.2), ("2m", 120.0), ("2min", 120.0), ("85us", 85e-6), ("85µs", 85e-6),
        ("10ns", 1e-8),
        ("1.5h", 5400.0), ("1d", 86400.0), ("0", 0.0), ("1.5", 1.5), (3, 3.0), (0.25, 0.25),
    ],
)  # fmt: skip
def test_parse_seconds(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 sec", "-5s", "5S", "1m30s", math.inf, math.nan, -0.1, False])
def test_seconds_refused(text: str | float) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_seconds(text)
    assert repr(text) in str(caught.value)
    assert "200ms" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10Gbit", 1.25e9), ("10Gbit/s", 1.25e9), ("10gbit", 1.25e9), ("10Gbps", 1.25e9), ("100MB/s", 1e8),
        ("1GiB/s", 2.0**30), ("1.5kB/s", 1500.0), ("8bit", 1.0), ("8bps", 1.0), ("1000", 1000.0), (2.5, 2.5),
    ],
)  # fmt: skip
def test_parse_rate(text: str | float, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "0", 0, "0MB/s", "10G", "10GB", "10Gb/s", "10Gb", "-1", "10 Gbit / s", math.inf]
)
def test_rate_refused(text: str | float) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)
    assert "10Gbit" in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (8 << 30, "8 GiB"), (123 << 20, "123 MiB"), (int(12.34 * 1024), "12.3 KiB"), (-2048, "-2 KiB"),
        (5 << 60, "5120 PiB"),
    ],
)  # fmt: skip
def test_format_nbytes(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(st.integers(0, 2**60))
def test_formatted_sizes_are_read_back_close(nbytes: int) -> None:
    assert parse_nbytes(format_nbytes(nbytes)) == pytest.approx(nbytes, rel=0.006)


def test_format_rate() -> None:
    assert format_rate(1.25e9) == "1.25 GB/s"
    assert format_rate(999.9) == "1 kB/s"
    assert format_rate(99.94e6) == "99.9 MB/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (1.5e-9, "1.5 ns"), (85e-6, "85 µs"), (0.2, "200 ms"), (0.9996, "1 s"), (1.25, "1.25 s"),
        (59.9, "59.9 s"), (59.96, "1 m 0 s"), (125, "2 m 5 s"), (3599.7, "1 h 0 m"), (5430, "1 h 30 m"),
        (-0.5, "-500 ms"),
    ],
)  # fmt: skip
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
