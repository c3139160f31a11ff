"""The plug-ins: every stage by its ``codec_id``."""

from __future__ import annotations

from typing import Final

from kvferry.codecs.base import Stage
from kvferry.codecs.frame import StageId
from kvferry.core.registry import Registry

__all__ = ["load_stage", "registry"]

registry: Final[Registry[type[Stage]]] = Registry("kvferry.codecs")
"""The stages by name; one is imported when it is used first."""


def load_stage(stage: StageId) -> Stage:
    """Build a stage from its name and parameters.

    Raises:
        CodecError: For parameters that it does not have.
        UnknownPluginError: For a stage that does not exist; with the nearest name.
        PluginUnavailableError: If it exists, but something that it needs is missing.
    """
    name, config = stage
    return registry.load(name).from_config(config)
