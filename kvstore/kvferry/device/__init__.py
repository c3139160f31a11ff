"""Devices: MUSA and CUDA through one thin layer, the host as a third, and copies behind their backs.

Nothing here imports torch before a device that needs it is opened.
"""

from __future__ import annotations

from kvferry.device.base import Device, DeviceBytes, Event, MemoryInfo, Stream
from kvferry.device.copy_engine import CopyEngine
from kvferry.device.diagnosis import device_probes
from kvferry.device.pinned import Slot
from kvferry.device.registry import DEVICES, open_device
from kvferry.device.tickets import CopyPart, CopyTicket

__all__ = [
    "DEVICES",
    "CopyEngine",
    "CopyPart",
    "CopyTicket",
    "Device",
    "DeviceBytes",
    "Event",
    "MemoryInfo",
    "Slot",
    "Stream",
    "device_probes",
    "open_device",
]
