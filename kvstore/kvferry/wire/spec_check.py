"""Specs that a peer sends: refused before anything is computed from sizes that no machine has."""

from __future__ import annotations

from typing import Final

from kvferry.core.errors import ConfigError
from kvferry.core.spec import KVSpec

__all__ = ["check_spec"]

_MAX_DIMENSIONS: Final = 16
_MAX_SIZE: Final = 2**40


def check_spec(spec: KVSpec) -> None:
    """Refuse a spec whose sizes no machine has.

    Raises:
        ConfigError: With the size.
    """
    for layer in spec.layers:
        for tensor in layer.tensors:
            if len(tensor.shape) > _MAX_DIMENSIONS or any(n > _MAX_SIZE for n in tensor.shape):
                raise ConfigError(
                    f"tensor {tensor.name!r} of {len(tensor.shape)} dimensions, largest "
                    f"{max(tensor.shape)}: at most {_MAX_DIMENSIONS} of up to {_MAX_SIZE} are possible"
                )
    try:
        spec.fingerprint()
    except OverflowError as error:
        raise ConfigError(f"spec of {spec.model!r} has a number over 64 bits: {error}") from error
