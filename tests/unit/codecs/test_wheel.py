"""The wheel: one for every Python of a platform; without a compiler one without the library, which works."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIBRARY = "kvferry/codecs/native/libkvferry_native.so"
BUILD = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1])"
USE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
from kvferry.codecs import CodecPipeline, decode_frame
from kvferry.codecs.native import native
from kvferry.testing.codecs import fill_of, kv_layer
layer = kv_layer(16, 1, 64)
data, room, back = memoryview(fill_of("values", layer.nbytes)), bytearray(1 << 16), bytearray(layer.nbytes)
pipeline = CodecPipeline.parse("ebp")
decode_frame(memoryview(room)[: pipeline.encode_into(data, layer, memoryview(room))], layer, memoryview(back))
assert back == data
print(native().instructions, native().reason)
"""
CMAKE = """#!/bin/sh
case "$*" in
*capabilities*) echo '{"version": {"string": "3.25.1", "major": 3, "minor": 25, "patch": 1}}' ;;
*version*) echo 'cmake version 3.25.1' ;;
*) echo 'no C compiler' >&2; exit 1 ;;
esac
"""


def tag_of(wheel: str, names: Iterable[str]) -> tuple[str, bool]:
    """The tag that a WHEEL file states, and whether the library is among the files."""
    (tag,) = [line.partition(": ")[2] for line in wheel.splitlines() if line.startswith("Tag: ")]
    return tag, any(name.endswith(LIBRARY) for name in names)


def test_what_is_installed_fits_every_python_of_its_platform() -> None:
    found = metadata.distribution("kvferry")
    files, wheel = found.files, found.read_text("WHEEL")
    assert files is not None
    assert wheel is not None
    tag, has_library = tag_of(wheel, map(str, files))
    assert tag.startswith("py3-none-"), "the library has no Python ABI"
    assert (tag == "py3-none-any") is not has_library, (tag, has_library)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Made where CMake finds no compiler, and what the build said."""
    folder = tmp_path_factory.mktemp("wheel")
    cmake = folder / "bin" / "cmake"
    cmake.parent.mkdir()
    cmake.write_text(CMAKE)
    cmake.chmod(0o755)
    env = {**os.environ, "PATH": f"{cmake.parent}:{os.environ['PATH']}", "CMAKE_EXECUTABLE": str(cmake)}
    made = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert made.returncode == 0, made.stdout
    (found,) = folder.glob("*.whl")
    return found, made.stdout


def test_without_a_compiler_the_wheel_has_no_library(wheel: tuple[Path, str]) -> None:
    file, said = wheel
    assert "no C compiler" in said
    assert "retrying due to override" in said
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        stated = archive.read(next(name for name in names if name.endswith(".dist-info/WHEEL"))).decode()
    assert tag_of(stated, names) == ("py3-none-any", False)
    assert file.name.endswith("-py3-none-any.whl")
    assert {"kvferry/codecs/native/__init__.py", "kvferry/codecs/fallback/ebp.py"} <= set(names)
    assert not [name for name in names if name.endswith((".c", ".h"))]


def test_without_a_compiler_it_works_and_says_what_is_missing(
    wheel: tuple[Path, str], tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel[0]) as archive:
        archive.extractall(tmp_path)
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVFERRY_NATIVE", "COVERAGE_"))
    }
    used = subprocess.run(
        [sys.executable, "-c", USE],
        env={**env, "PYTHONPATH": str(tmp_path)},  # before the working tree's, whose own finder is taken away
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith("numpy ")
    assert "install a C compiler" in used.stdout
