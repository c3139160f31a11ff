"""The plug-ins: every stage by its ``codec_id``."""

from __future__ import annotations

from typing import Final

from kvferry.codecs.base import Stage
from kvferry.codecs.frame import StageId
from kvferry.core.errors import CodecError, KVFerryError, PluginUnavailableError
from kvferry.core.nearest import shown
from kvferry.core.registry import Registry

__all__ = ["load_stage", "registry"]

registry: Final[Registry[type[Stage]]] = Registry("kvferry.codecs")
"""The stages by name; one is imported when it is used first."""


def load_stage(stage: StageId) -> Stage:
    """Build a stage from its name and parameters.

    Raises:
        CodecError: For parameters that it does not have, whatever a stage of others raises for them.
        UnknownPluginError: For a stage that does not exist; with the nearest name.
        PluginUnavailableError: If it exists, but something that it needs is missing, or it is no stage, or
            one of another name.
    """
    name, config = stage
    kind = registry.load(name)
    if not isinstance(kind, type) or not issubclass(kind, Stage):
        raise PluginUnavailableError(
            f"{registry.group}: {name!r} is {shown(kind)}, must be a subclass of kvferry.codecs.Stage; "
            "tell its authors"
        )
    if getattr(kind, "codec_id", None) != name:  # frames carry that name, and nobody could decode them
        raise PluginUnavailableError(
            f"{registry.group}: {name!r} calls itself {shown(getattr(kind, 'codec_id', None))}; "
            "tell its authors"
        )
    try:
        return kind.from_config(config)
    except KVFerryError:
        raise
    except Exception as error:  # third-party code can raise anything, and parameters come from wire and disk
        raise CodecError(
            f"codec {name!r} does not take {shown(dict(config))}: {type(error).__name__}: {str(error)[:200]}"
        ) from error
