"""Devices: MUSA and CUDA through one thin layer. So far: what there is."""

from __future__ import annotations

from kvferry.device.diagnosis import device_probes

__all__ = ["device_probes"]
