from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey
from kvferry.store.disk import names

HOSTILE = (
    "..",
    ".",
    "../x",
    "/etc",
    "a/b",
    "a\0b",
    "a\\b",
    "~",
    ".lock",
    ".quarantine",
    "=2e2e",
    "A",
    "\ud800",
)


@pytest.mark.parametrize("tenant", HOSTILE)
def test_hostile_tenants_get_a_harmless_folder_of_their_own(tenant: str) -> None:
    folder = names.tenant_folder(tenant)
    assert set(folder) <= set("=0123456789abcdef")
    assert names.tenant_of_folder(folder) == tenant


@given(st.text(st.characters(), min_size=1, max_size=30), st.text(st.characters(), min_size=1, max_size=30))
def test_different_tenants_have_different_folders(one: str, other: str) -> None:
    folders = names.tenant_folder(one), names.tenant_folder(other)
    assert (folders[0] == folders[1]) == (one == other)
    assert names.tenant_of_folder(folders[0]) == one
    assert "/" not in folders[0]
    assert "\0" not in folders[0]
    assert not folders[0].startswith(".")
    assert folders[0] == folders[0].lower() or names.tenant_of_folder(folders[0].lower()) != other


def test_what_is_too_long_or_empty_is_refused() -> None:
    for tenant in ("", "x" * 121, "é" * 61):
        with pytest.raises(ConfigError):
            names.tenant_folder(tenant)


@pytest.mark.parametrize("folder", ["", "=", "=zz", "=2E", "=61", ".lock", "UPPER", "=" + "c3", "a.b"])
def test_folders_that_are_no_tenants(folder: str) -> None:
    assert names.tenant_of_folder(folder) is None


def test_block_names() -> None:
    key = BlockKey(bytes([0xAB]) + bytes(31))
    name = names.block_name(key)
    assert names.key_of_name(name, 0xAB) == key
    assert names.key_of_name(name, 0xAC) is None  # in the wrong folder
    for wrong in (name.upper(), name + "x", name[1:], "../" + name, name.replace(".safetensors", "")):
        assert names.key_of_name(wrong, 0xAB) is None
    assert names.is_temporary(names.temporary_name(key, 1 << 60))
    assert names.key_of_name(names.temporary_name(key, 1), 0xAB) is None
    with pytest.raises(ConfigError):
        names.block_name(BlockKey(b"../../../etc/passwd"))
