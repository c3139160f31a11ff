"""A full, a read-only and a vanished file system, in a mount namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("disk_mounts.py")


def _cannot_mount() -> str:
    if os.geteuid() != 0:
        return "mounting a small file system needs root"
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    probe = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return "" if probe.returncode == 0 else f"no mounts here: {probe.stderr.strip()}"


def test_full_read_only_and_vanished(tmp_path: Path) -> None:
    reason = _cannot_mount()
    if reason:
        pytest.skip(reason)
    done = subprocess.run(
        ["unshare", "-m", sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"
