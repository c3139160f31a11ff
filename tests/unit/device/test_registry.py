from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.core.errors import ConfigError, DeviceError, PluginUnavailableError, UnknownPluginError
from kvferry.device import open_device


def test_the_host_is_a_device() -> None:
    assert open_device("cpu").name == open_device("cpu:0").name == "cpu:0"


@pytest.mark.parametrize("name", ["", ":0", "cpu:", "cpu:x", "cpu:-1", "cpu:0:1"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="such as musa:0"):
        open_device(name)


def test_an_unknown_kind_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownPluginError, match="musa"):
        open_device("muse:0")


@pytest.mark.parametrize(("kind", "remedy"), [("musa", "torch_musa"), ("cuda", "CUDA")])
def test_what_is_missing_is_said_with_the_remedy(kind: str, remedy: str) -> None:
    """On a machine that has the device, its opening is the test."""
    try:
        open_device(kind)
    except PluginUnavailableError as error:
        assert remedy in str(error)  # noqa: PT017 - or it is there
        assert "torch 2." in str(error)  # noqa: PT017
    else:
        with pytest.raises(DeviceError, match="there are"):
            open_device(f"{kind}:999")


def test_the_package_comes_without_torch() -> None:
    code = "import sys, kvferry.device; kvferry.device.open_device('cpu'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
