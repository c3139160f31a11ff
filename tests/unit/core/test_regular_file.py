"""What is named by path is a regular file: nothing else is waited for, or read without an end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.regular_file import open_regular
from kvferry.store.remote.options import read_secret


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    fifo, plain = tmp_path / "fifo", tmp_path / "plain"
    os.mkfifo(fifo)
    plain.write_bytes(b"secret\n")
    for path in (fifo, tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="no regular file"):
            open_regular(path)
        with pytest.raises(ConfigError, match="no regular file"):
            read_secret(str(path), "password_file")
    with open_regular(plain) as file:
        assert file.read() == b"secret\n"
    assert read_secret(str(plain), "password_file") == b"secret"
