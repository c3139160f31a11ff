from __future__ import annotations

import math

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.values import require_bool, require_number, require_text, require_whole


@pytest.mark.parametrize("value", [True, 1.0, math.nan, "1", None, b"1"])
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"size is .*, must be a whole number"):
        require_whole("size", value)


@pytest.mark.parametrize("value", [True, math.nan, math.inf, -math.inf, "1", None, 1j])
def test_what_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"wait is .*number"):
        require_number("wait", value)


def test_bounds() -> None:
    require_whole("n", 1, least=1, most=2)
    require_whole("n", 2, least=1, most=2)
    require_number("n", 0, least=0)
    require_number("n", 1e-9, above=0, most=1)
    require_bool("b", value=False)
    require_text("t", "")
    for number, bounds in ((0, {"least": 1}), (3, {"least": 1, "most": 2}), (-1, {"least": 0})):
        with pytest.raises(ConfigError, match=f"n is {number}, must"):
            require_whole("n", number, **bounds)
    for value, limits in ((-0.1, {"least": 0.0}), (0, {"above": 0.0}), (2, {"above": 0.0, "most": 1.0})):
        with pytest.raises(ConfigError, match=f"n is {value}, must be"):
            require_number("n", value, **limits)
    with pytest.raises(ConfigError, match="b is 1, must be true or false"):
        require_bool("b", 1)
    with pytest.raises(ConfigError, match="t is 1, must be text"):
        require_text("t", 1)
