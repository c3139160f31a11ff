"""Case C132 at a daemon: names of models, adapters, sessions and keys that are paths, or too much of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.client import Client
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.core.spec import KeyScope
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec

from .conftest import Running

HOSTILE = (
    "../escaped",
    "../../../../../../tmp/escaped",
    "/etc/escaped",
    "a\0b",
    "a\\b\\..\\..",
    "~root",
    "x" * 400,
    "line\nready role=daemon",
    "\x1b[31mred",
)


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", HOSTILE)
def test_c132_nothing_leaves_the_directory_whatever_names_say(
    running: Running, tmp_path: Path, name: str
) -> None:
    """Model, revision, group, adapter and session; what is stored is found by the same names alone."""
    before = files_in(tmp_path) - files_in(tmp_path / "disk")
    spec = replace(small_spec(), model=name, revision=name, group=name)
    scope = KeyScope(adapter=name, adapter_revision=name, salt=name.encode())
    with Client(running.daemon.addresses[0], session=f"{name} {tmp_path.name}"[-200:]) as client:
        ns = client.namespace(spec, scope)
        keys = ns.keys([1] * 3 * spec.block_tokens)
        assert save_blocks(ns, keys) == 3
        assert client.flush(deadline=deadline_in(60))
        running.daemon.store_of("default").evict(1 << 20)
        with ns.load(keys, deadline=deadline_in(60)) as lease:
            assert [lease.view(n) == block_bytes(key, spec.block_nbytes) for n, key in enumerate(keys)] == [
                True
            ] * 3
        assert client.namespace(spec).lookup(keys).prefix == 0
        assert running.port.status().clients, "the status can be read"
    stored = files_in(tmp_path / "disk")
    assert sum(path.suffix == ".safetensors" for path in stored) == 3
    assert files_in(tmp_path) - stored == before
    assert not Path("/etc/escaped").exists()
    assert not Path("/tmp/escaped").exists()


def test_c132_keys_that_spell_a_path_are_32_bytes_as_any(running: Running, tmp_path: Path) -> None:
    spec = small_spec("paths")
    ns = running.client.namespace(spec)
    keys = [
        BlockKey(text.ljust(32, b"\0")) for text in (b"../../../../escaped", b"/etc/escaped", b"a\0b/..\\")
    ]
    assert save_blocks(ns, keys) == 3
    assert running.client.flush(deadline=deadline_in(60))
    stored = [path for path in files_in(tmp_path / "disk") if path.suffix == ".safetensors"]
    assert {path.stem for path in stored} == {key.hex() for key in keys}
    assert not list(tmp_path.rglob("escaped*"))
