"""Mooncake's Python modules: loaded when they are first needed, under variables that only they are to see."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from kvferry.core.errors import CapacityError, PluginUnavailableError
from kvferry.core.install_hint import install_hint
from kvferry.core.open_files import caused_by_lack_of_files

__all__ = ["environment", "load_library"]


def load_library(name: str) -> Any:  # noqa: ANN401  a native module without types
    """The module ``name`` of the library.

    Raises:
        PluginUnavailableError: If it cannot be loaded; with the remedy.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        if caused_by_lack_of_files(error):
            raise CapacityError(
                "mooncake cannot be loaded, this process has no descriptor left: raise its limit (ulimit -n)"
            ) from error
        if not isinstance(error, ImportError):
            raise
        if error.name is None and "ibverbs" in str(error):
            raise PluginUnavailableError(
                "mooncake needs libibverbs.so.1, also without RDMA: apt-get install libibverbs1"
            ) from error
        raise PluginUnavailableError(
            f"mooncake cannot be loaded ({error}): {install_hint('mooncake')}"
        ) from error


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that the library reads when it starts, and the process is to have only then."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
