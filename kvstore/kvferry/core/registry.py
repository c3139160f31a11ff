"""Plug-ins by name, over the entry points of installed distributions.

In-tree plug-ins register as third-party ones do, in ``pyproject.toml``. Nothing is imported before it is
asked for by name, so a plug-in whose requirements are not installed costs nothing and breaks nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from importlib import invalidate_caches
from importlib.metadata import EntryPoint, MetadataPathFinder, entry_points
from typing import Final, Generic, TypeVar, cast

from kvferry.core.errors import (
    CapacityError,
    ConfigError,
    KVFerryError,
    PluginUnavailableError,
    UnknownPluginError,
)
from kvferry.core.forks import loading
from kvferry.core.install_hint import install_hint
from kvferry.core.nearest import did_you_mean, shown
from kvferry.core.open_files import caused_by_lack_of_files, require_descriptors

__all__ = ["GROUPS", "PluginInfo", "Registry"]

T = TypeVar("T")

GROUPS = (
    "kvferry.transports",
    "kvferry.regions",
    "kvferry.codecs",
    "kvferry.tiers",
    "kvferry.policies",
    "kvferry.devices",
)
"""Every group of plug-ins that kvferry knows."""

_LONGEST = 100
_SCAN_DESCRIPTORS: Final = 4  # a folder and a file are open at once; some to spare
_LOCAL = "(this process)"
_OUT_OF_FILES: Final = "this process has no descriptor left: raise its limit (ulimit -n), or close some"


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What ``kvferry plugins`` shows of one plug-in."""

    group: str
    name: str
    module: str
    distribution: str
    ok: bool
    problem: str = ""
    """What is missing and how to install it; empty when ``ok``."""


class Registry(Generic[T]):
    """The plug-ins of one group, by name.

    Thread safe. ``T`` is what the entry points of the group refer to, usually a class
    (``Registry[type[Transport]]``).

    Args:
        group: The entry-point group, one of :data:`GROUPS` or a name of the application's own.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._points: dict[str, list[EntryPoint]] | None = None
        self._local: dict[str, T] = {}

    def names(self) -> list[str]:
        """The names of all plug-ins, also of those that cannot be loaded, sorted."""
        with loading(), self._lock:
            return sorted({*self._scan(), *self._local})

    def load(self, name: str) -> T:
        """The plug-in called ``name``; its module is imported by the first call.

        Raises:
            UnknownPluginError: No plug-in has that name; the message has the nearest name and all that exist.
            PluginUnavailableError: It exists, but cannot be imported; the message has the pip command.
            ConfigError: Two distributions claim the name; the message names both.
            CapacityError: This process has no descriptor left to look for it, or to import it.
        """
        with loading(), self._lock:
            if name in self._local:
                return self._local[name]
            points = self._scan().get(name)
        if points is None:
            raise self._unknown(name)
        return cast("T", _load(self._only(name, points)))

    def register(self, name: str, plugin: T) -> None:
        """Add a plug-in of this process, for applications and tests that install no distribution.

        Raises:
            ConfigError: If the name is taken; :meth:`unregister` frees a name registered here.
        """
        with loading(), self._lock:
            points = self._scan().get(name, [])
            if points or name in self._local:
                owner = _distribution(points[0]) if points else _LOCAL
                raise ConfigError(
                    f"{self.group}: {name!r} is already registered by {owner}; choose another name"
                )
            self._local[name] = plugin

    def unregister(self, name: str) -> None:
        """Remove a plug-in that :meth:`register` added.

        Raises:
            UnknownPluginError: If this process did not register that name.
        """
        with loading(), self._lock:
            if name in self._local:
                del self._local[name]
                return
        raise UnknownPluginError(f"{self.group}: {name!r} was not registered by this process")

    def describe(self) -> list[PluginInfo]:
        """Every plug-in with its state, by name; imports each, since only that shows what is missing."""
        with loading(), self._lock:
            points = dict(self._scan())
            local = dict(self._local)
        found = [self._describe_one(name, group) for name, group in points.items()]
        for name, plugin in local.items():
            module = getattr(plugin, "__module__", type(plugin).__module__)
            found.append(PluginInfo(self.group, name, module, _LOCAL, ok=True))
        return sorted(found, key=lambda info: info.name)

    def _describe_one(self, name: str, points: list[EntryPoint]) -> PluginInfo:
        problem = ""
        try:
            self.load(name)
        except KVFerryError as error:
            problem = str(error)
        distributions = ", ".join(sorted({_distribution(point) for point in points}))
        return PluginInfo(self.group, name, points[0].module, distributions, ok=not problem, problem=problem)

    def _scan(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name, read once; the caller holds the lock.

        What the system's finder could not read for want of a descriptor it leaves away, and remembers as
        empty: so that is looked at beside it, and nothing empty is kept.

        Raises:
            CapacityError: If there is no descriptor left.
        """
        if self._points is not None:
            return self._points
        purpose = f"to look for plug-ins of {self.group}"
        require_descriptors(_SCAN_DESCRIPTORS, purpose)
        try:
            found = _points_of(self.group)
            require_descriptors(_SCAN_DESCRIPTORS, purpose)
        except (OSError, CapacityError) as error:
            _forget_metadata()
            if isinstance(error, OSError) and caused_by_lack_of_files(error):
                raise CapacityError(f"{purpose}: {_OUT_OF_FILES}") from error
            raise
        if not found and self.group in GROUPS:  # ours are there: somebody has looked without descriptors
            _forget_metadata()
            found = _points_of(self.group)
        if found:
            self._points = found
        return found

    def _only(self, name: str, points: list[EntryPoint]) -> EntryPoint:
        if len(points) == 1:
            return points[0]
        owners = " and ".join(f"{_distribution(p)} ({p.value})" for p in points)
        raise ConfigError(f"{self.group}: {name!r} is claimed by {owners}; uninstall one of them")

    def _unknown(self, name: str) -> UnknownPluginError:
        names = self.names()
        existing = f"existing: {', '.join(names)}" if names else "none is installed"
        return UnknownPluginError(
            f"{self.group}: no plug-in {shown(name)}{did_you_mean(name[:_LONGEST], names)} ({existing})"
        )


def _points_of(group: str) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):  # a distribution seen twice on the path counts once
        found.setdefault(point.name, []).append(point)
    return found


def _forget_metadata() -> None:
    """Let folders be read again that were found empty, maybe for want of a descriptor."""
    invalidate_caches()
    MetadataPathFinder().invalidate_caches()


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "(unknown distribution)"


def _load(point: EntryPoint) -> object:
    """Import what an entry point refers to; whatever goes wrong there is mapped here, once."""
    where = f"{point.group}: {point.name!r}"
    try:
        with loading():
            return point.load()
    except ImportError as error:
        if caused_by_lack_of_files(error):
            invalidate_caches()
            raise CapacityError(f"{where} cannot be loaded: {_OUT_OF_FILES}") from error
        missing = error.name or str(error)
        raise PluginUnavailableError(f"{where} needs {missing}: {_pip_hint(point, error.name)}") from error
    except Exception as error:  # third-party import code can raise anything, and must not take others along
        if caused_by_lack_of_files(error):
            invalidate_caches()
            raise CapacityError(f"{where} cannot be loaded: {_OUT_OF_FILES}") from error
        reason = f"{type(error).__name__}: {error}"
        raise PluginUnavailableError(
            f"{where} of {_distribution(point)} cannot be loaded from {point.value}: {reason}"
        ) from error


def _pip_hint(point: EntryPoint, missing: str | None) -> str:
    """How to install what is missing.

    The extra comes from the entry point itself (``ucx = "module:Class [ucx]"``).
    """
    own = _distribution(point)
    if point.extras:
        extras = ",".join(point.extras)
        return install_hint(extras) if own == "kvferry" else f"pip install '{own}[{extras}]'"
    if missing and missing.partition(".")[0] != point.module.partition(".")[0]:
        return f"install the distribution that has the module {missing}"
    return f"the installation of {own} is incomplete: pip install --force-reinstall {own}"
