"""The texts of ``kvferry bench codec``: six that every machine has, prose and code, or files."""

from __future__ import annotations

import _pydecimal
import argparse
import html.entities
import inspect
import pydoc
import pydoc_data.topics
from pathlib import Path
from typing import Final

import numpy as np

from kvferry.core.errors import ConfigError

__all__ = ["OWN_TEXTS", "texts"]

OWN_TEXTS: Final = 6
_NUMPY: Final = (
    "fft.fft",
    "einsum",
    "linalg.svd",
    "histogram",
    "pad",
    "gradient",
    "interp",
    "quantile",
    "nditer",
)


def texts(files: tuple[str, ...], number: int) -> dict[str, str]:
    """The contents of ``files`` by name, or the first ``number`` of this machine's own.

    Raises:
        ConfigError: If a file cannot be read.
    """
    if not files:
        return dict(list(_own().items())[:number])
    found = {}
    for file in files:
        try:
            found[Path(file).name] = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"text {file}: {error.strerror}") from error
    return found


def _own() -> dict[str, str]:
    topics, entities = pydoc_data.topics.topics, html.entities.html5.items()
    return {
        "prose": "\n\n".join(topics[name] for name in sorted(topics)),
        "code": inspect.getsource(argparse),
        "reference": "\n\n".join(pydoc.plain(pydoc.render_doc(kind)) for kind in (str, dict, int)),
        "arithmetic": inspect.getsource(_pydecimal),
        "manual": "\n\n".join(_documented(name) for name in _NUMPY),
        "table": "\n".join(f"{name}\t{value}\tU+{ord(value[0]):04X}" for name, value in entities),
    }


def _documented(name: str) -> str:
    found: object = np
    for part in name.split("."):
        found = getattr(found, part)
    return f"{name}\n\n{inspect.getdoc(found)}"
