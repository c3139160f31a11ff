"""Measurements in a process of their own, whose memory holds nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvferry.core.errors import KVFerryError

__all__ = ["anonymous_rss", "run_child", "serve_child"]


def run_child(module: str, request: Mapping[str, object], *, timeout_s: float) -> dict[str, Any]:
    """Run ``python -m module`` with ``request`` as JSON on its standard input.

    Returns:
        The JSON object that it prints.

    Raises:
        KVFerryError: If it fails or is not done within ``timeout_s``; with the last line of its errors.
    """
    command = [sys.executable, "-m", module]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            out, errors = child.communicate(json.dumps(request), timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise KVFerryError(
                f"{module} was not done after {timeout_s:g} s; ask for fewer entries"
            ) from error
        finally:
            child.kill()
    if child.returncode:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        raise KVFerryError(f"{module} ended with code {child.returncode}: {last[0]}")
    found: dict[str, Any] = json.loads(out)
    return found


def serve_child(work: Callable[[dict[str, Any]], Mapping[str, object]]) -> None:
    """The other side of :func:`run_child`."""
    sys.stdout.write(json.dumps(work(json.loads(sys.stdin.read()))))


def anonymous_rss() -> int:
    """Bytes of this process's own memory: resident, without files and shared segments."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "RssAnon":
            return int(rest.split()[0]) * 1024
    raise KVFerryError("/proc/self/status has no RssAnon")
