"""Files that earlier releases wrote stay readable, and this one still writes exactly those."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.keys import block_keys
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, Restore, TensorSpec
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.disk.inspection import verify
from kvferry.store.encoding import TierCodec
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, TierNamespace

GOLDEN = Path(__file__).parents[2] / "data" / "disk_v1"
ENCODED = GOLDEN.with_name("disk_v2")


def _k(dtype: DType) -> TensorSpec:
    return TensorSpec("k", (2, 1, 3), dtype)


SPACES = {
    "kv": TierNamespace.of(
        "default",
        KVSpec(
            model="org/tiny",
            revision="r1",
            layers=(LayerSpec((_k(DType.BFLOAT16), TensorSpec("v", (2, 1, 3), DType.BFLOAT16))),) * 2,
            block_tokens=2,
        ),
    ),
    "state": TierNamespace.of(
        "default",
        KVSpec(
            model="org/hybrid",
            revision="",
            layers=(
                LayerSpec((TensorSpec("state", (), DType.FLOAT32), TensorSpec("empty", (0, 8), DType.INT8))),
            ),
            block_tokens=2,
            group="state",
            restore=Restore("snapshot"),
            tp_rank=1,
            tp_size=2,
        ),
        KeyScope("lora", "r2", b"salt"),
    ),
    "opaque": TierNamespace.of(
        "Tenant A",
        KVSpec(
            model="org/opaque",
            revision="r",
            layers=(LayerSpec((_k(DType.FLOAT8_E4M3FN),)),),
            block_tokens=2,
            layout="engine/v1",
            restore=Restore("last_window", 8),
        ),
        KeyScope(salt=b""),
    ),
}


def block_data(namespace: TierNamespace, position: int) -> bytes:
    return bytes((i * 7 + position) % 256 for i in range(namespace.spec.block_nbytes))


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier("disk", DiskOptions((str(tmp_path / "disk"),), 1 << 20, direct="off"))


@pytest.mark.parametrize("name", sorted(SPACES))
def test_version_1_is_read(tmp_path: Path, name: str) -> None:
    shutil.copytree(GOLDEN, tmp_path / "disk")
    tier = DiskTier("disk", DiskOptions((str(tmp_path / "disk"),), 1 << 20, direct="off"))
    try:
        assert tier.usage().entries == 6
        namespace = SPACES[name]
        tier.open(namespace)
        keys = block_keys(namespace.namespace_id, [0, 1, 2, 3], 2)
        reads = [BlockRead(key, memoryview(bytearray(namespace.spec.block_nbytes))) for key in keys]
        results = tier.read_into(namespace, reads, deadline=deadline_in(20))
        assert [(r.outcome, r.parent, r.position) for r in results] == [
            (ReadOutcome.HIT, None, 0),
            (ReadOutcome.HIT, keys[0], 1),
        ]
        assert [bytes(r.into) for r in reads] == [block_data(namespace, p) for p in range(2)]
    finally:
        tier.close()


def test_version_1_is_written(tier: DiskTier, tmp_path: Path) -> None:
    """A change of what is written needs a new version, and this test then a new folder of files."""
    for namespace in SPACES.values():
        tier.open(namespace)
        keys = block_keys(namespace.namespace_id, [0, 1, 2, 3], 2)
        blocks = [
            BlockWrite(key, memoryview(block_data(namespace, p)), keys[p - 1] if p else None, p)
            for p, key in enumerate(keys)
        ]
        tier.write(namespace, blocks, deadline=deadline_in(20))
    tier.close()
    assert files_below(tmp_path / "disk") == files_below(GOLDEN)


def test_version_1_is_sound_without_a_tier() -> None:
    found = verify(str(GOLDEN))
    assert (found.blocks, found.corrupt, found.unreadable) == (6, [], [])


# ---- version 2: encoded blocks ---------------------------------------------------------------------


def _encoded_space(model: str, *extra: LayerSpec, layout: str = "kvferry") -> TierNamespace:
    tensors = [TensorSpec(name, (64, 1, 32), DType.BFLOAT16) for name in ("k", "v")]
    layers = (LayerSpec(tuple(tensors)),) * 3 + extra
    spec = KVSpec(model=model, revision="r", layers=layers, block_tokens=64, layout=layout)
    return TierNamespace.of("default", spec, KeyScope("lora", "r2"))


_STATE = LayerSpec((TensorSpec("state", (7,), DType.FLOAT32),))
CODECS = {
    "ebp": _encoded_space("org/ebp", _STATE),
    "int8": _encoded_space("org/int8"),
    "int4(group=64)": _encoded_space("org/int4", _STATE),
    "shuffle|zstd": _encoded_space("org/zstd"),
    "lz4": _encoded_space("org/opaque", layout="engine/v1"),
}
STABLE = ("ebp", "int8")  # others may write other bytes with another library
INT4 = (
    "44d740818a0860b7264747e7885e4d4c35d478a19b193a23dc1f824310f73ce3",
    "1cddfaf3dad786b3723a90c15fcc3abdc9b95703f85f8bb0931428e0b8e8529d",
)
"""Of the two blocks of int4, as this release writes them; a change is no new format, but is to be meant."""


def kv_data(namespace: TierNamespace, position: int) -> bytes:
    """Values as bfloat16 that any release makes equal."""
    numbers = np.arange(namespace.spec.block_nbytes // 2, dtype=np.int64) * 7919 + position
    values = ((numbers % 1021 - 510) / 256).astype(np.float32)
    if namespace.spec.layout != "kvferry":
        values[: len(values) // 2] = 1
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def encoding_tier(folder: Path, text: str) -> DiskTier:
    codec = TierCodec(text, allow_lossy=text.startswith("int"))
    return DiskTier("disk", DiskOptions((str(folder),), 4 << 20, direct="off"), codec=codec)


def write_encoded(folder: Path, text: str) -> None:
    namespace = CODECS[text]
    tier = encoding_tier(folder, text)
    tier.open(namespace)
    keys = block_keys(namespace.namespace_id, list(range(128)), 64)
    blocks = [
        BlockWrite(key, memoryview(kv_data(namespace, p)), keys[p - 1] if p else None, p)
        for p, key in enumerate(keys)
    ]
    tier.write(namespace, blocks, deadline=deadline_in(20))
    tier.close()


@pytest.mark.parametrize("text", sorted(CODECS))
def test_version_2_is_read(tmp_path: Path, text: str) -> None:
    shutil.copytree(ENCODED, tmp_path / "disk")
    lossy = text.startswith("int")
    tier = encoding_tier(tmp_path / "disk", text if lossy else "off")
    try:
        namespace = CODECS[text]
        tier.open(namespace)
        keys = block_keys(namespace.namespace_id, list(range(128)), 64)
        reads = [BlockRead(key, memoryview(bytearray(namespace.spec.block_nbytes))) for key in keys]
        results = tier.read_into(namespace, reads, deadline=deadline_in(20))
        assert [(r.outcome, r.parent, r.position, r.lossy) for r in results] == [
            (ReadOutcome.HIT, None, 0, lossy),
            (ReadOutcome.HIT, keys[0], 1, lossy),
        ]
        for position, read in enumerate(reads):
            same = bytes(read.into) == kv_data(namespace, position)
            assert same != lossy
    finally:
        tier.close()


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("text", STABLE)
def test_version_2_is_written(tmp_path: Path, text: str) -> None:
    write_encoded(tmp_path / "disk", text)
    golden = files_below(ENCODED)
    found = files_below(tmp_path / "disk")
    assert len(found) == 2
    assert found == {name: golden[name] for name in found}


@pytest.mark.usefixtures("both_kernels")
def test_int4_is_written(tmp_path: Path) -> None:
    write_encoded(tmp_path / "disk", "int4(group=64)")
    found = files_below(tmp_path / "disk")
    assert found.keys() <= files_below(ENCODED).keys()
    assert tuple(hashlib.sha256(found[name]).hexdigest() for name in sorted(found)) == INT4


def test_version_2_is_sound_without_a_tier() -> None:
    found = verify(str(ENCODED))
    assert (found.blocks, found.corrupt, found.unreadable) == (2 * len(CODECS), [], [])
    assert found.codecs == dict.fromkeys(CODECS, 2)
    assert found.lossy == 4
