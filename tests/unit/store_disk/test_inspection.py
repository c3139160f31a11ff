from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors

from kvferry.cli import main
from kvferry.core.errors import CorruptBlockError, RequestError, StoreError, TierError
from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskTier, inspection
from kvferry.store.tier import TierNamespace
from kvferry.testing.blocks import block_bytes, small_spec
from kvferry.testing.disk_usage import disk_usage
from kvferry.testing.tiers_common import SPEC, chain, opened, write

MakeTier = Callable[..., DiskTier]


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(args)
    return caught.value.code if isinstance(caught.value.code, int) else 0


@pytest.fixture
def tier(make_tier: MakeTier) -> DiskTier:
    return make_tier()


@pytest.fixture
def space(tier: DiskTier) -> TierNamespace:
    return opened(tier, SPEC, "alice")


@pytest.fixture
def keys(tier: DiskTier, space: TierNamespace) -> list[BlockKey]:
    """Of alice's five blocks; the default tenant has two of another model."""
    found = chain(space, 1, 5)
    write(tier, space, found)
    other = opened(tier, small_spec("other/model", pages=8, layers=4))
    write(tier, other, chain(other, 1, 2))
    return found


def block_file(folder: Path, key: BlockKey) -> Path:
    (path,) = folder.rglob(f"{key.hex()}.safetensors")
    return path


def spoil(folder: Path, key: BlockKey) -> None:
    path = block_file(folder, key)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_what_is_held_is_told_while_a_store_uses_it(folder: Path, keys: list[BlockKey]) -> None:
    found = inspection.inspect(str(folder))
    assert found.used_by == os.getpid()
    assert found.nbytes == disk_usage(folder)
    by_tenant = {n.tenant: n for n in found.namespaces}
    assert [by_tenant[t].blocks for t in ("alice", "default")] == [5, 2]
    header = by_tenant["default"].header
    assert header is not None
    assert header.spec.model == "other/model"
    assert 0 <= by_tenant["alice"].newest_s <= by_tenant["alice"].oldest_s < 300
    assert found.namespaces[0].tenant == "default"  # the largest first
    assert (found.temporaries, found.foreign_count, found.errors) == (0, 0, ())


def test_looking_does_not_touch_the_time_of_last_use(
    folder: Path, tier: DiskTier, keys: list[BlockKey]
) -> None:
    path = block_file(folder, keys[0])
    os.utime(path, (1e9, 1e9))
    inspection.verify(str(folder))
    assert path.stat().st_atime == 1e9
    tier.close()
    os.utime(path, (1e9, 1e9))


def test_verify_names_what_is_wrong_and_changes_nothing(folder: Path, keys: list[BlockKey]) -> None:
    spoil(folder, keys[2])
    os.truncate(block_file(folder, keys[3]), 100)
    steps: list[tuple[int, int]] = []
    found = inspection.verify(str(folder), lambda done, total: steps.append((done, total)))
    assert {f.key for f in found.corrupt} == {keys[2], keys[3]}
    assert all(f.reason for f in found.corrupt)
    assert (found.blocks, found.put_away) == (7, 0)
    assert steps[-1] == (7, 7)
    assert block_file(folder, keys[2]).exists()


def test_repair_needs_the_directory_for_itself(folder: Path, tier: DiskTier, keys: list[BlockKey]) -> None:
    spoil(folder, keys[2])
    left = block_file(folder, keys[0]).with_name(f".{keys[0].hex()}.1.tmp")
    left.write_bytes(b"left by a crash")
    with pytest.raises(TierError, match="used by another tier of this process"):
        inspection.repair(str(folder))
    tier.close()
    assert inspection.inspect(str(folder)).temporaries == 1
    found = inspection.repair(str(folder))
    assert found.put_away == len(found.corrupt) == 1
    assert not left.exists()
    after = inspection.inspect(str(folder))
    assert len(after.quarantined) == 1
    assert after.used_by is None
    assert inspection.verify(str(folder)).corrupt == []


def test_one_block_is_exported(folder: Path, tmp_path: Path, keys: list[BlockKey]) -> None:
    target = tmp_path / "block.safetensors"
    inspection.export_block(str(folder), keys[1].hex(), str(target))
    with safetensors.safe_open(target, "np") as file:
        assert file.metadata()["parent"] == keys[0].hex()
        first = file.get_tensor("layers.0.k").tobytes()
    assert first == block_bytes(keys[1], SPEC.block_nbytes)[: len(first)]
    with pytest.raises(StoreError, match="exists"):
        inspection.export_block(str(folder), keys[1].hex(), str(target))
    with pytest.raises(RequestError, match="is not in"):
        inspection.export_block(str(folder), "ab" * 32, str(tmp_path / "none"))
    with pytest.raises(RequestError, match="64 hex"):
        inspection.export_block(str(folder), "../../etc/passwd", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    spoil(folder, keys[1])
    with pytest.raises(CorruptBlockError, match="checksum"):
        inspection.export_block(str(folder), keys[1].hex(), str(tmp_path / "none"))


def test_a_key_of_several_tenants_needs_one(
    folder: Path, tmp_path: Path, tier: DiskTier, keys: list[BlockKey]
) -> None:
    bob = opened(tier, SPEC, "bob")
    write(tier, bob, keys[:1])
    with pytest.raises(RequestError, match=r"2 places.*--tenant"):
        inspection.export_block(str(folder), keys[0].hex(), str(tmp_path / "out"))
    header = inspection.export_block(str(folder), keys[0].hex(), str(tmp_path / "out"), tenant="bob")
    assert header.tenant == "bob"


def test_the_command(folder: Path, keys: list[BlockKey], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", str(folder)) == 0
    text = capsys.readouterr().out
    assert "7 blocks, " in text
    assert f"used by process {os.getpid()}" in text
    assert "other/model@r1" in text
    assert run("inspect", str(folder), "--verify", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["blocks"] == 7
    assert value["verification"]["blocks"] == 7
    assert {n["model"] for n in value["namespaces"]} == {"tier-suite", "other/model"}
    spoil(folder, keys[0])
    assert run("inspect", str(folder), "--verify") == 1
    assert f"corrupt: {keys[0].hex()}" in capsys.readouterr().out
    assert run("inspect", str(folder), "--repair") == 1  # in use
    assert "used by another tier of this process" in capsys.readouterr().err
    assert run("inspect", str(folder / "nowhere")) == 2
    assert "give the directory of a disk tier" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--repair"], ["--verify"], ["--keys"], ["--keys", "--json"]])
def test_what_export_would_leave_undone_is_refused(
    folder: Path, tmp_path: Path, keys: list[BlockKey], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.safetensors"
    assert run("inspect", str(folder), "--export", keys[0].hex(), str(target), *more) == 2
    assert f"leave out {more[0]}" in capsys.readouterr().err
    assert not target.exists()
    assert run("inspect", str(folder), "--tenant", "alice", *more) == 2


def test_the_command_exports(
    folder: Path, tmp_path: Path, keys: list[BlockKey], capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.safetensors"
    assert run("inspect", str(folder), "--export", keys[0].hex(), str(target)) == 0
    assert "tier-suite@r1" in capsys.readouterr().out
    assert target.exists()


NASTY = "evil\x1b]0;title\x07\x1b[31m\x9b2J\u202egpj\r\nfake: line"


def test_names_of_others_cannot_write_to_the_terminal(
    make_tier: MakeTier, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models, tenants and files; JSON has them as they are."""
    tier = make_tier()
    space = opened(tier, small_spec(NASTY, pages=8, layers=4), "a\u202eb")
    write(tier, space, chain(space, 1, 2))
    (folder / "not\x1bours").write_text("")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")).mkdir()
    spoil(folder, chain(space, 1, 2)[0])
    assert run("inspect", str(folder), "--verify") == 1
    text = capsys.readouterr().out
    assert all(c == "\n" or c.isprintable() for c in text)
    assert r"\x1b]0;title\x07" in text
    assert r"a\u202eb" in text
    assert "\nfake: line" not in text
    assert run("inspect", str(folder), "--json") == 0
    shown = capsys.readouterr().out.rstrip("\n")
    assert shown.isprintable()
    assert json.loads(shown)["namespaces"][0]["model"] == NASTY
    assert run("inspect", str(folder) + "\x1b[31m") == 2
    assert r"\x1b[31m: No such file" in capsys.readouterr().err


def test_repair_leaves_alone_what_is_no_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").write_text("")
    assert run("inspect", str(tmp_path), "--repair") == 2
    assert "is no directory of a disk tier" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["photos"]
    (tmp_path / ".lock").write_text("")  # somebody else's
    assert run("inspect", str(tmp_path), "--repair") == 2
    assert run("inspect", str(tmp_path / "photos" / "cat"), "--repair") == 2
    assert "cat is a file, not a directory" in capsys.readouterr().err


def test_repair_leaves_no_empty_folders(folder: Path, tier: DiskTier, keys: list[BlockKey]) -> None:
    """Nor does a tier that puts a block into quarantine."""
    for key in keys[1:]:
        spoil(folder, key)
    place = block_file(folder, keys[1]).parent
    tier.close()
    assert inspection.repair(str(folder)).put_away == 4
    assert not place.exists()
    assert block_file(folder, keys[0]).exists()


def test_keys_are_listed_and_the_start_of_one_is_enough(
    folder: Path, tmp_path: Path, keys: list[BlockKey], capsys: pytest.CaptureFixture[str]
) -> None:
    for number, key in enumerate(keys):
        os.utime(block_file(folder, key), (1000 + number, 1000 + number))
    listed = inspection.list_keys(str(folder))
    assert len(listed) == 7
    assert [block.key for block in listed[-5:]] == keys[::-1]  # the last used first
    assert {block.tenant for block in listed[-5:]} == {"alice"}
    assert run("inspect", str(folder), "--keys") == 0
    shown = capsys.readouterr().out
    assert all(key.hex() in shown for key in keys)
    assert run("inspect", str(folder), "--keys", "--json") == 0
    (found,) = [k for k in json.loads(capsys.readouterr().out)["keys"] if k["key"] == keys[2].hex()]
    assert (found["tenant"], found["nbytes"]) == ("alice", block_file(folder, keys[2]).stat().st_size)
    assert run("inspect", str(folder)) == 0
    assert keys[0].hex() not in capsys.readouterr().out

    hexes = [block.key.hex() for block in listed]
    start = next(n for n in range(1, 65) if len({h for h in hexes if h.startswith(hexes[0][:n])}) == 1)
    inspection.export_block(str(folder), hexes[0][:start].upper(), str(tmp_path / "one"))
    with safetensors.safe_open(tmp_path / "one", "np") as file:
        assert file.metadata()["key"] == hexes[0]


def test_the_start_of_several_keys_is_refused(
    folder: Path, tier: DiskTier, space: TierNamespace, tmp_path: Path
) -> None:
    write(tier, space, chain(space, 1, 17))  # two of them start with the same digit
    hexes = sorted(block.key.hex() for block in inspection.list_keys(str(folder)))
    several = next(one[:1] for one, other in itertools.pairwise(hexes) if one[:1] == other[:1])
    with pytest.raises(RequestError, match=r"the start of .* keys in .*: give more digits"):
        inspection.export_block(str(folder), several, str(tmp_path / "x"))
    for wrong in ("", "xyz", "0" * 65, "0x12", " "):
        with pytest.raises(RequestError, match=r"is no key.*--keys lists all"):
            inspection.export_block(str(folder), wrong, str(tmp_path / "x"))
    with pytest.raises(RequestError, match="is not in"):
        inspection.export_block(str(folder), "f" * 64, str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_a_folder_that_is_no_tier_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a-b").mkdir()
    (tmp_path / "a-b" / "notes.txt").write_text("x")
    for flags in ((), ("--json",), ("--verify",)):
        assert run("inspect", str(tmp_path), *flags) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "is no directory of a disk tier" in said.err
    (tmp_path / "passwd").write_text("x")
    assert run("inspect", str(tmp_path / "passwd")) == 2
    assert "passwd is a file, not a directory" in capsys.readouterr().err


def test_a_tier_without_a_block_is_shown(folder: Path, tier: DiskTier) -> None:
    assert inspection.inspect(str(folder)).namespaces == ()
    assert not tier.usage().entries
