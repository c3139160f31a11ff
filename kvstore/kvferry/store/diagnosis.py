"""Whether the slower tiers of a configuration can be had, and what their directories are good for."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvferry.core.diagnosis import Finding, Probe
from kvferry.core.errors import ConfigError
from kvferry.core.tier_plugins import TIERS
from kvferry.core.units import format_nbytes

if TYPE_CHECKING:
    from kvferry.core.config_tiers import TierConfig

__all__ = ["tier_probes"]

_WHY: Final = "the configuration asks for it (store.tiers)"
_WHY_DIRECT: Final = (
    "with O_DIRECT reads and writes leave the page cache to others; the tier measures whether it pays"
)


def tier_probes(tiers: Sequence[TierConfig]) -> list[tuple[str, str, Probe]]:
    """A probe a tier, one for each of its directories, and one for its codec where it has one."""
    found: list[tuple[str, str, Probe]] = []
    for tier in tiers:
        name = tier.name or tier.kind
        found.append(("tiers", name, partial(_plugin, tier, name)))
        given = tier.options.get("directories", tier.options.get("directory", ()))
        directories = [given] if isinstance(given, str) else list(given)
        found += [("tiers", f"{name} {one}", partial(_directory, name, Path(one))) for one in directories]
        if "codec" in tier.options or "allow_lossy" in tier.options:
            found.append(("codecs", f"tier {name}", partial(_codec, tier, name)))
    return found


def _plugin(tier: TierConfig, name: str) -> Iterator[Finding]:
    try:
        TIERS.load(tier.kind)
    except ConfigError as error:
        yield Finding("tiers", name, str(error), "fail", _WHY, "install what it needs, or remove the tier")
    else:
        yield Finding("tiers", name, f"kind {tier.kind} is installed", why=_WHY)


def _codec(tier: TierConfig, name: str) -> Iterator[Finding]:
    from kvferry.store.encoding import OFF, TierCodec

    label = f"tier {name}"
    try:
        codec, _ = TierCodec.from_options(label, tier.options)
    except ConfigError as error:
        yield Finding("codecs", label, str(error), "fail", _WHY, "do what it says, or leave codec out")
    else:
        yield Finding("codecs", label, codec.status().get("codec", OFF), why=_WHY)


def _directory(name: str, directory: Path) -> Iterator[Finding]:
    directory = directory.expanduser()
    place = directory
    while not place.exists() and place != place.parent:  # the tier makes it
        place = place.parent
    label = f"{name} {directory}"
    if not place.is_dir():
        yield Finding("tiers", label, f"{place} is no folder", "fail", _WHY, "choose another directory")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding(
            "tiers", label, f"uid {os.geteuid()} may not write in {place}", "fail", _WHY,
            f"sudo install -d -o {os.geteuid()} {directory}, or choose another directory",
        )  # fmt: skip
        return
    room = os.statvfs(place)
    free = format_nbytes(room.f_bavail * room.f_frsize)
    new = "" if place == directory else f"will be made in {place}; "
    yield Finding("tiers", label, f"{new}{free} free, O_DIRECT {_direct(place)}", why=_WHY_DIRECT)


def _direct(place: Path) -> str:
    """Whether a page can be written past the page cache in ``place``."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return "is not known to this system"
    path = place / f".kvferry-doctor-{secrets.token_hex(8)}"
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | flag, 0o600)
    except OSError as error:
        return f"does not work: {error.strerror}"
    finally:
        with suppress(OSError):
            path.unlink()
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.write(fd, page)
    except OSError as error:
        return f"does not work: {error.strerror}"
    finally:
        os.close(fd)
    return "works"
