"""The plug-ins: every stage by its ``codec_id``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvferry.codecs.base import CodecConfig, Stage
from kvferry.codecs.frame import StageId
from kvferry.codecs.text import parse_stages, stage_text
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
            one of another name, or of parameters from which it cannot be built again.
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
    found = _built(kind, name, config)
    try:
        given = found.config()
        fits = isinstance(given, Mapping) and parse_stages(stage_text(name, given)) == [(name, dict(given))]
    except Exception as error:
        raise PluginUnavailableError(
            f"{registry.group}: the parameters of {name!r} cannot be had: {_told(error)}; tell its authors"
        ) from error
    if not fits or _built(kind, name, given).config() != given:  # frames name them, none could be decoded
        raise PluginUnavailableError(
            f"{registry.group}: {name!r} says that its parameters are {shown(given)}, from which no equal "
            "stage is built; tell its authors"
        )
    return found


def _built(kind: type[Stage], name: str, config: CodecConfig) -> Stage:
    try:
        found = kind.from_config(config)
    except KVFerryError:
        raise
    except Exception as error:  # third-party code can raise anything, and parameters come from wire and disk
        raise CodecError(f"codec {name!r} does not take {shown(dict(config))}: {_told(error)}") from error
    if not isinstance(found, kind):
        raise PluginUnavailableError(
            f"{registry.group}: {name!r} makes {shown(found)} of its parameters; tell its authors"
        )
    return found


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
