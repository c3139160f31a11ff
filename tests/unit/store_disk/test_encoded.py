"""Encoded blocks on disk: round trips, restarts, damage, loss, room, and what other readers see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from kvferry.codecs import decode_frame
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey, block_keys
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.store.disk import DiskTier
from kvferry.store.disk.inspection import export_block, inspect, verify
from kvferry.store.encoding import TierCodec
from kvferry.store.tier import (
    BlockRead,
    BlockWrite,
    ReadOutcome,
    ReadResult,
    TierNamespace,
    WriteOutcome,
    WriteResult,
)
from kvferry.testing.codecs import fill_of, kv_layer, mutations

MakeTier = Callable[..., DiskTier]
KV = kv_layer(64, 1, 64)
STATE = LayerSpec((TensorSpec("state", (33,), DType.FLOAT32),))
ODD = LayerSpec((TensorSpec("k", (64, 3, 33), DType.FLOAT16), TensorSpec("flag", (3,), DType.BOOL)))
BLOCKS = 4


def spec_of(*layers: LayerSpec, layout: str = "kvferry") -> KVSpec:
    return KVSpec(model="m", revision="r", layers=layers, block_tokens=64, layout=layout)


PLAIN, MIXED = spec_of(KV, KV), spec_of(KV, STATE, ODD, kv_layer(0, 8, 128))
HIT, MISS, CORRUPT = ReadOutcome.HIT, ReadOutcome.MISS, ReadOutcome.CORRUPT


def keys_of(spec: KVSpec) -> list[BlockKey]:
    return block_keys(TierNamespace.of("default", spec).namespace_id, [1] * 64 * BLOCKS, 64)


def data_of(spec: KVSpec, number: int) -> memoryview:
    """Values as in KV, a little different in each block."""
    data = bytearray(fill_of("values", spec.block_nbytes))
    data[:2] = number.to_bytes(2, "little")
    return memoryview(data)


def write(tier: DiskTier, spec: KVSpec, *, lossy: bool = False) -> list[WriteResult]:
    namespace, keys = TierNamespace.of("default", spec), keys_of(spec)
    tier.open(namespace)
    blocks = [
        BlockWrite(key, data_of(spec, n), keys[n - 1] if n else None, n, lossy) for n, key in enumerate(keys)
    ]
    return tier.write(namespace, blocks, deadline=deadline_in(20))


def read(tier: DiskTier, spec: KVSpec) -> tuple[list[ReadResult], list[memoryview]]:
    namespace = TierNamespace.of("default", spec)
    tier.open(namespace)
    reads = [BlockRead(key, page_aligned(spec.block_nbytes)) for key in keys_of(spec)]
    results = tier.read_into(namespace, reads, deadline=deadline_in(20))
    return results, [block.into for block in reads]


def outcomes(results: list[ReadResult]) -> list[ReadOutcome]:
    return [result.outcome for result in results]


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("default/*/*/*.safetensors"))


def codec(text: str) -> TierCodec:
    return TierCodec(text, allow_lossy=text.startswith(("int", "fp")), check="always")


@pytest.mark.parametrize("spec", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize(
    "text", ["ebp", "ebp(bits=4)", "split", "shuffle|zstd", "lz4", "dedup", "int8", "int4", "fp8", "auto"]
)
def test_blocks_come_back_at_once_and_after_a_restart(make_tier: MakeTier, text: str, spec: KVSpec) -> None:
    used = codec(text)
    tier = make_tier(codec=used)
    assert {r.outcome for r in write(tier, spec)} == {WriteOutcome.STORED}
    first, found = read(tier, spec)
    tier.close()
    again, found_again = read(make_tier(codec=TierCodec(allow_lossy=used.accepts_lossy)), spec)
    keys = keys_of(spec)
    for results in (first, again):
        assert outcomes(results) == [HIT] * BLOCKS
        assert [r.parent for r in results] == [None, *keys[:-1]]
        assert [r.position for r in results] == list(range(BLOCKS))
        assert {r.lossy for r in results} == {bool(used.lossy)}
    assert [bytes(f) for f in found] == [bytes(f) for f in found_again]
    if not used.lossy:
        assert [bytes(f) for f in found] == [bytes(data_of(spec, n)) for n in range(BLOCKS)]


def test_the_room_is_that_of_what_is_written(make_tier: MakeTier, folder: Path) -> None:
    plain = make_tier(directories=(str(folder) + "-plain",))
    encoded = make_tier(codec=TierCodec("ebp"))
    for tier in (plain, encoded):
        write(tier, PLAIN)
        taken = sum(e.nbytes for e in tier.scan())
        assert taken == sum(p.stat().st_blocks * 512 for p in files(Path(tier.options.directories[0])))
    saved = sum(e.nbytes for e in plain.scan()) - sum(e.nbytes for e in encoded.scan())
    assert saved > BLOCKS * PLAIN.block_nbytes // 8
    assert plain.usage().used_nbytes - encoded.usage().used_nbytes == saved
    namespace = TierNamespace.of("default", PLAIN)
    before = encoded.usage().used_nbytes
    encoded.remove(namespace, keys_of(PLAIN), deadline=deadline_in(20))
    assert encoded.usage().used_nbytes <= before - sum(p.stat().st_size for p in files(folder))


def test_more_blocks_fit_into_the_same_room(make_tier: MakeTier, folder: Path) -> None:
    """And the cap holds while blocks of any size take the place of others."""
    counts = []
    for text in ("off", "int4"):
        tier = make_tier(directories=(str(folder) + text,), capacity_nbytes=(512 << 10), codec=codec(text))
        namespace = TierNamespace.of("default", PLAIN)
        tier.open(namespace)
        for number in range(60):
            key = BlockKey(number.to_bytes(2, "big") * 16)
            block = BlockWrite(key, data_of(PLAIN, number), None, 0)
            (result,) = tier.write(namespace, [block], deadline=deadline_in(20))
            assert result.outcome is WriteOutcome.STORED
            assert tier.usage().used_nbytes <= 512 << 10
        counts.append(tier.usage().entries)
    assert counts[1] > 1.5 * counts[0]


def test_what_takes_no_fewer_pages_is_written_as_it_is(make_tier: MakeTier, folder: Path) -> None:
    small = spec_of(kv_layer(4, 1, 16))
    tier = make_tier(codec=TierCodec("ebp"))
    write(tier, small)
    assert tier.usage().counters["codec_kept_blocks"] == BLOCKS
    assert {e.codec for e in tier.scan()} == {""}
    assert b'"version":"1"' in files(folder)[0].read_bytes()
    assert outcomes(read(tier, small)[0]) == [HIT] * BLOCKS


def test_other_readers_find_a_frame_a_layer(make_tier: MakeTier, folder: Path) -> None:
    write(make_tier(codec=codec("int8")), MIXED)
    keys = keys_of(MIXED)
    (path,) = [p for p in files(folder) if p.stem == keys[1].hex()]
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        names = [f"layers.{n}.encoded" for n in range(len(MIXED.layers))]
        assert set(names) <= set(file.keys())
        assert all(n.startswith("_pad.") for n in set(file.keys()) - set(names))
        block = page_aligned(MIXED.block_nbytes)
        for number, layer in enumerate(MIXED.layers):
            frame = file.get_tensor(names[number])
            assert frame.dtype == np.uint8
            decode_frame(memoryview(frame), layer, block[MIXED.layer_slice(number)])
    assert (metadata["codec"], metadata["lossy"], metadata["version"]) == ("int8", "true", "2")
    assert float(metadata["bound"]) == 0.025
    assert metadata["parent"] == keys[0].hex()


# ---- loss ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify_first", [False, True])
def test_a_directory_that_was_lossy_gives_a_lossless_tier_nothing(
    make_tier: MakeTier, folder: Path, verify_first: bool
) -> None:
    """Not even to look-ups that come after the first; and the blocks can be written anew."""
    tier = make_tier(codec=codec("int8"))
    write(tier, PLAIN)
    assert {(e.codec, e.lossy) for e in tier.scan()} == {("int8", True)}
    tier.close()
    tier = make_tier(codec=TierCodec("ebp"), verify=verify_first)
    if verify_first:
        assert tier.wait_verified(deadline=deadline_in(10))
        assert tier.usage().entries == 0
    results, _ = read(tier, PLAIN)
    assert outcomes(results) == [MISS] * BLOCKS
    assert tier.usage().counters["codec_refused_lossy"] == BLOCKS
    assert tier.usage().entries == 0
    assert files(folder) == []
    assert {r.outcome for r in write(tier, PLAIN)} == {WriteOutcome.STORED}
    results, found = read(tier, PLAIN)
    assert [(r.outcome, r.lossy) for r in results] == [(HIT, False)] * BLOCKS
    assert bytes(found[2]) == bytes(data_of(PLAIN, 2))


def test_a_lossy_tier_reads_what_a_lossless_one_wrote(make_tier: MakeTier) -> None:
    tier = make_tier(codec=TierCodec("ebp"))
    write(tier, PLAIN)
    tier.close()
    tier = make_tier(codec=codec("int8"))
    results, _ = read(tier, PLAIN)
    assert [(r.outcome, r.lossy) for r in results] == [(HIT, False)] * BLOCKS
    assert tier.wait_verified(deadline=deadline_in(10))
    assert {(e.codec, e.lossy) for e in tier.scan()} == {("ebp", False)}


def test_blocks_that_lost_something_elsewhere_are_marked_or_refused(
    make_tier: MakeTier, folder: Path
) -> None:
    lossless = make_tier(directories=(str(folder) + "-lossless",), codec=TierCodec("ebp"))
    assert {r.outcome for r in write(lossless, PLAIN, lossy=True)} == {WriteOutcome.REFUSED}
    assert not lossless.takes_lossy
    for text in ("off", "ebp"):
        tier = make_tier(directories=(str(folder) + text,), codec=TierCodec(text, allow_lossy=True))
        assert tier.takes_lossy
        assert {r.outcome for r in write(tier, PLAIN, lossy=True)} == {WriteOutcome.STORED}
        results, found = read(tier, PLAIN)
        assert [(r.outcome, r.lossy) for r in results] == [(HIT, True)] * BLOCKS
        assert bytes(found[1]) == bytes(data_of(PLAIN, 1))


def test_slices_outside_the_bound_are_lossless_on_disk_too(make_tier: MakeTier) -> None:
    used = TierCodec("int8(bound=0.00001)|zstd", allow_lossy=True, check="always")
    tier = make_tier(codec=used)
    write(tier, PLAIN)
    results, found = read(tier, PLAIN)
    assert [(r.outcome, r.lossy) for r in results] == [(HIT, False)] * BLOCKS
    assert bytes(found[3]) == bytes(data_of(PLAIN, 3))
    assert tier.usage().counters["codec_out_of_bound"] == BLOCKS * len(PLAIN.layers)


# ---- damage -------------------------------------------------------------------------------------------


def test_damage_is_quarantined_and_never_served(make_tier: MakeTier, folder: Path) -> None:
    """Whatever is changed, in header or data: corrupt once, or just what was written."""
    spec = spec_of(KV)
    tier = make_tier(codec=TierCodec("ebp"), verify=False)
    write(tier, spec)
    tier.close()
    path = next(p for p in files(folder) if p.stem == keys_of(spec)[1].hex())
    whole = path.read_bytes()
    assert b'"version":"2"' in whole
    tier = make_tier(codec=TierCodec("ebp"), verify=False)
    assert outcomes(read(tier, spec)[0]) == [HIT] * BLOCKS
    seen = set()
    for mutated in mutations(whole, 60):
        tier.remove(TierNamespace.of("default", spec), keys_of(spec)[1:2], deadline=deadline_in(20))
        write(tier, spec)
        path.write_bytes(mutated)
        results, found = read(tier, spec)
        seen.add(results[1].outcome)
        assert outcomes(results[::2]) == [HIT, HIT]
        if results[1].outcome is HIT:
            assert bytes(found[1]) == bytes(data_of(spec, 1))
        else:
            assert outcomes(read(tier, spec)[0])[1] is MISS
    assert seen - {HIT} == {CORRUPT}
    assert tier.usage().quarantined_nbytes > 0


def test_a_damaged_header_is_found_in_the_background(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier(codec=TierCodec("ebp"))
    write(tier, PLAIN)
    tier.close()
    damaged, cut = files(folder)[:2]
    damaged.write_bytes(damaged.read_bytes().replace(b'"codec":"ebp"', b'"codec":"epb"'))
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 4096)
    tier = make_tier(codec=TierCodec("off"))
    assert tier.wait_verified(deadline=deadline_in(10))
    assert tier.usage().entries == BLOCKS - 1  # a text of the codec's that is another is none of damage
    assert sorted(outcomes(read(tier, PLAIN)[0]), key=str) == [HIT] * (BLOCKS - 1) + [MISS]


# ---- looking at a directory ---------------------------------------------------------------------------


def test_inspect_tells_codec_ratio_and_loss(make_tier: MakeTier, folder: Path) -> None:
    write(make_tier(codec=codec("int4")), PLAIN)
    (summary,) = inspect(str(folder)).namespaces
    assert summary.codecs == {"int4": BLOCKS}
    assert summary.lossy == BLOCKS
    taken = sum(p.stat().st_size for p in files(folder))
    assert summary.ratio == pytest.approx(BLOCKS * PLAIN.block_nbytes / taken)
    checked = verify(str(folder))
    assert (checked.blocks, checked.corrupt, checked.lossy) == (BLOCKS, [], BLOCKS)
    assert checked.codecs == {"int4": BLOCKS}
    path = files(folder)[0]
    data = bytearray(path.read_bytes())
    data[4096 + 700] ^= 1
    path.write_bytes(data)
    (bad,) = verify(str(folder)).corrupt
    assert bad.key.hex() == path.stem


@pytest.mark.parametrize("text", ["ebp", "int8"])
def test_an_exported_block_has_the_tensors_of_the_block(
    make_tier: MakeTier, folder: Path, tmp_path: Path, text: str
) -> None:
    tier = make_tier(codec=codec(text))
    write(tier, MIXED)
    block = bytes(read(tier, MIXED)[1][2])
    key = keys_of(MIXED)[2]
    target = tmp_path / "exported.safetensors"
    header = export_block(str(folder), key.hex(), str(target))
    assert header.encoding is not None
    assert header.encoding.codec == text
    with safe_open(target, framework="np") as file:
        assert file.metadata()["lossy"] == str(text == "int8").lower()
        assert json.loads(file.metadata()["spec"])["model"] == "m"
        state = file.get_tensor("layers.1.state").tobytes()
        flag = file.get_tensor("layers.2.flag").tobytes()
    start = MIXED.layer_slice(1).start
    assert state == block[start : start + len(state)]
    start = MIXED.layer_slice(2).start + ODD.slots()[1].offset
    assert flag == block[start : start + len(flag)]


def test_an_exported_block_put_back_keeps_its_loss(make_tier: MakeTier, folder: Path, tmp_path: Path) -> None:
    tier = make_tier(codec=codec("int8"))
    write(tier, PLAIN)
    tier.close()
    key = keys_of(PLAIN)[2]
    (path,) = [p for p in files(folder) if p.stem == key.hex()]
    target = tmp_path / "exported.safetensors"
    export_block(str(folder), key.hex(), str(target))
    path.write_bytes(target.read_bytes())
    tier = make_tier(codec=codec("int8"))
    results, _ = read(tier, PLAIN)
    assert (results[2].outcome, results[2].lossy) == (HIT, True)
    tier.close()
    assert outcomes(read(make_tier(), PLAIN)[0])[2] is MISS
