"""Devices by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.core.errors import ConfigError
from kvferry.core.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.device.base import Device

__all__ = ["DEVICES", "open_device"]

DEVICES: Registry[Callable[[int], Device]] = Registry("kvferry.devices")
"""The plug-ins: each is made with a device's number."""


def open_device(name: str) -> Device:
    """The device called ``name``: ``musa:0``, ``cuda``, ``cpu``; without a number, the first.

    Raises:
        ConfigError: If the name is of another form; :class:`UnknownPluginError` if there is no such kind,
            :class:`PluginUnavailableError` if what it needs is not installed.
        DeviceError: If there is no device of that number.
    """
    kind, colon, number = name.partition(":")
    if not kind or (colon and not number.isdecimal()):
        raise ConfigError(f"device {name!r}: a kind and a number, such as musa:0")
    return DEVICES.load(kind)(int(number or 0))
