"""The native kernels: one plain C library, loaded by ctypes, which releases the GIL around each call.

It is built when kvferry is installed, where a C compiler is found, and lies beside the codecs, whose kernels
are most of it; without it they do the same in numpy, slower, and so do copies into memory tiers.
``KVFERRY_NATIVE`` decides otherwise: ``off`` takes numpy, a path that library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.core.errors import ConfigError
from kvferry.core.forks import loading
from kvferry.core.open_files import require_descriptors

__all__ = ["ABI", "Native", "load", "native"]

ABI: Final = 11
"""Version of the functions and their arguments; a library of another one is not used."""
_VARIABLE: Final = "KVFERRY_NATIVE"
_NAME: Final = "libkvferry_native.so"
_DESCRIPTORS: Final = 2
_REMEDY: Final = "install a C compiler (Debian: gcc) and install kvferry again"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Native:
    """What was found.

    Attributes:
        library: The library; ``None`` if everything runs in numpy.
        path: Its file.
        instructions: The instruction set that it chose on this processor: ``avx2``, ``neon`` or ``portable``.
        reason: Why there is no library, with the remedy; empty if there is one.
    """

    library: ctypes.CDLL | None
    path: Path | None = None
    instructions: str = "numpy"
    reason: str = ""


def load(wanted: str = "") -> Native:
    """Look for the library.

    Args:
        wanted: ``off``, a path, or empty for the one that was installed.

    Raises:
        ConfigError: If ``wanted`` is a path and that library cannot be used.
    """
    if wanted == "off":
        return Native(None, reason=f"switched off by {_VARIABLE}=off")
    if wanted:
        return _open(Path(wanted))
    spec = importlib.util.find_spec("kvferry.codecs")
    folders = None if spec is None else spec.submodule_search_locations
    for folder in folders or ():  # an editable install has it beside site-packages' empty folder
        path = Path(folder) / "native" / _NAME
        if path.is_file():
            try:
                return _open(path)
            except ConfigError as error:
                return Native(None, reason=str(error))
    return Native(None, reason=f"it was not built: {_REMEDY}")


def _open(path: Path) -> Native:
    try:
        library = ctypes.CDLL(str(path))
        abi = int(library.kvc_abi())
        library.kvc_instructions.restype = ctypes.c_char_p
        instructions = library.kvc_instructions().decode("ascii")
    except (OSError, AttributeError) as error:
        raise ConfigError(f"the native library {path} cannot be used: {error}; {_REMEDY}") from error
    if abi != ABI:
        raise ConfigError(f"the native library {path} is of version {abi}, {ABI} is needed; {_REMEDY}")
    return Native(library, path, instructions)


@functools.lru_cache(1)
def native() -> Native:
    """The library of this process, looked for once; says in the log why there is none.

    Raises:
        CapacityError: If there is no descriptor left to look for it, and so for none to be remembered.
    """
    with loading():
        require_descriptors(_DESCRIPTORS, "to look for the native library")
        found = load(os.environ.get(_VARIABLE, ""))
    if found.library is None:
        _LOG.info("codecs and copies run in numpy, without the native library: %s", found.reason)
    return found
