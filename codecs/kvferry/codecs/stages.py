"""The plug-ins: every stage by its ``codec_id``."""

from __future__ import annotations

from typing import Final

from kvferry.codecs.base import Stage
from kvferry.core.registry import Registry

__all__ = ["registry"]

registry: Final[Registry[type[Stage]]] = Registry("kvferry.codecs")
"""The stages by name; one is imported when it is used first."""
