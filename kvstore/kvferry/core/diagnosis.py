"""Findings about this machine, collected without ever hanging: what ``kvferry doctor`` shows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvferry.core.clock import deadline_in, time_left

__all__ = ["Finding", "Level", "Probe", "collect"]

_log = logging.getLogger(__name__)

Level: TypeAlias = Literal["ok", "warn", "fail"]
"""``fail``: what the configuration asks for does not work. ``warn``: worth knowing, nothing stops."""

_TIMEOUT_S: Final = 25.0  # libraries that are read from a cold disk take seconds


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about this machine.

    Attributes:
        area: What it belongs to, such as ``memory``.
        name: What was looked at.
        value: What was found, for people.
        level: See :data:`Level`.
        why: Why it matters.
        remedy: What to do, an exact command or setting where there is one; empty if nothing needs doing.
    """

    area: str
    name: str
    value: str
    level: Level = "ok"
    why: str = ""
    remedy: str = ""


Probe: TypeAlias = "Callable[[], Iterable[Finding]]"
"""Looks at one thing; may take its time, or fail, without harm to the others."""


def collect(
    probes: Sequence[tuple[str, str, Probe]],
    *,
    asked: Collection[str] = (),
    timeout_s: float = _TIMEOUT_S,
) -> list[Finding]:
    """Run ``probes`` side by side; their findings, in the order of the probes.

    One that raises, or does not answer in time, becomes a finding that says so. Its thread, which ends with
    the process, is left behind then.

    Args:
        probes: Area, name and probe of each.
        asked: Areas that the configuration asks for: no answer there is a failure.
        timeout_s: For all of them together.
    """
    found: dict[int, list[Finding]] = {}

    def run(number: int, area: str, name: str, probe: Probe) -> None:
        try:
            found[number] = list(probe())
        except Exception as error:  # noqa: BLE001 - the root of a thread; a library may raise anything
            _log.debug("looking at %s failed", name, exc_info=True)
            found[number] = [_broken(area, name, f"{type(error).__name__}: {error}", asked)]

    threads = [
        threading.Thread(target=run, args=(n, *probe), name=f"kvferry-doctor-{probe[1]}", daemon=True)
        for n, probe in enumerate(probes)
    ]
    deadline = deadline_in(timeout_s)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(time_left(deadline))
    late = f"no answer within {timeout_s:g} s"
    return [
        finding
        for number, (area, name, _) in enumerate(probes)
        for finding in found.get(number, [_broken(area, name, late, asked)])
    ]


def _broken(area: str, name: str, reason: str, asked: Collection[str]) -> Finding:
    level: Level = "fail" if area in asked else "warn"
    remedy = "run kvferry doctor again; if it stays, report it with this line"
    return Finding(
        area, name, f"could not be looked at: {reason}", level, "nothing is known about it", remedy
    )
