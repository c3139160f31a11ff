from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
import xxhash

from kvferry.core.errors import CorruptBlockError
from kvferry.core.keys import BlockKey
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, Restore, TensorSpec
from kvferry.store.disk.header import (
    HeaderTemplate,
    header_length,
    parse_header,
    spec_from_json,
    spec_to_json,
)
from kvferry.store.tier import TierNamespace

KEY, PARENT = BlockKey(bytes(range(32))), BlockKey(bytes(range(32, 64)))
K = TensorSpec("k", (4, 2, 33), DType.BFLOAT16)
SPEC = KVSpec(
    model="org/model",
    revision="abc",
    layers=(LayerSpec((K, TensorSpec("v", (4, 2, 33), DType.BFLOAT16))),) * 3,
    block_tokens=4,
    restore=Restore("last_window", 64),
    tp_rank=1,
    tp_size=4,
)
TORCH = {dtype: getattr(torch, dtype.value) for dtype in DType}


def spec_of(*layers: LayerSpec, layout: str = "kvferry") -> KVSpec:
    return KVSpec(model="m", revision="", layers=layers, block_tokens=4, layout=layout)


def template(spec: KVSpec, scope: KeyScope = KeyScope()) -> HeaderTemplate:  # noqa: B008
    return HeaderTemplate(TierNamespace.of("tenant", spec, scope))


@pytest.mark.parametrize("parent", [None, PARENT])
@pytest.mark.parametrize("position", [-1, 0, 123456])
def test_a_header_says_what_was_put_into_it(parent: BlockKey | None, position: int) -> None:
    made = template(SPEC, KeyScope("adapter", "r2", b"salt"))
    header = made.build(KEY, parent, position, 0xDEADBEEF)
    assert len(header) == made.header_nbytes
    assert made.header_nbytes % 4096 == 0
    assert made.file_nbytes % 4096 == 0
    assert made.check(header, KEY) == (parent, position, 0xDEADBEEF)
    found = parse_header(header)
    assert (found.key, found.parent, found.position, found.checksum) == (KEY, parent, position, 0xDEADBEEF)
    assert found.spec == SPEC
    assert found.fingerprint == SPEC.fingerprint()
    assert (found.tenant, found.adapter, found.adapter_revision) == ("tenant", "adapter", "r2")
    assert found.file_nbytes == made.file_nbytes
    assert b"salt" not in header
    assert HeaderTemplate(found.namespace()).same_layout(made)


def test_every_changed_byte_is_noticed() -> None:
    """Checked by comparison it is never another header; parsed it is wrong, or differs in what it says."""
    made = template(SPEC)
    header = made.build(KEY, PARENT, 7, 99)
    good = parse_header(header)
    same = 0
    for at in range(0, len(header), 3):
        changed = bytearray(header)
        changed[at] ^= 1
        if (quick := made.check(bytes(changed), KEY)) is not None:
            assert quick != (PARENT, 7, 99)  # a digit of what varies
            continue
        try:
            same += parse_header(bytes(changed)) == good
        except CorruptBlockError:
            continue
    assert same == 0


def test_a_header_of_another_key_or_namespace_is_not_it() -> None:
    made = template(SPEC)
    header = made.build(KEY, None, 0, 1)
    assert made.check(header, PARENT) is None
    assert template(SPEC, KeyScope(adapter="a")).check(header, KEY) is None
    assert made.check(header[:-1], KEY) is None
    assert made.check(header[:-1] + b"x", KEY) is None


@pytest.mark.parametrize(
    ("start", "word"),
    [(b"", "0 bytes"), (b"\0" * 7, "7 bytes"), (b"\0" * 8, "8 bytes"), (b"\xff" * 8, "whole pages")],
)
def test_absurd_lengths_are_refused_before_anything_is_allocated(start: bytes, word: str) -> None:
    with pytest.raises(CorruptBlockError, match=word):
        header_length(start)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"__metadata__":1}', '{"__metadata__":{}}', "nonsense", "[" * 3000]
)
def test_what_is_no_header_is_corrupt(text: str) -> None:
    header = (4096 - 8).to_bytes(8, "little") + text.encode().ljust(4096 - 8)
    with pytest.raises(CorruptBlockError):
        parse_header(header)


def test_a_spec_as_json_is_the_same_spec() -> None:
    value = json.loads(json.dumps(spec_to_json(SPEC)))
    assert spec_from_json(value) == SPEC
    assert len(value["layers"]) == 1  # equal layers once
    for broken in (
        {},
        {**value, "layers": [{"count": 10**9, "tensors": []}]},
        {**value, "block_tokens": 0},
        3,
    ):
        with pytest.raises(CorruptBlockError):
            spec_from_json(broken)


SPECS = {dtype.value: spec_of(LayerSpec((TensorSpec("k", (4, 2, 33), dtype),))) for dtype in DType} | {
    "several": SPEC,
    "no layers": spec_of(),
    "no tensors": spec_of(LayerSpec(())),
    "no elements": spec_of(LayerSpec((TensorSpec("k", (0, 8, 128), DType.BFLOAT16),)) ),
    "scalar": spec_of(LayerSpec((TensorSpec("state", (), DType.FLOAT32),))),
    "mixed": spec_of(
        LayerSpec((TensorSpec("a", (3,), DType.INT8), TensorSpec("b", (0,), DType.BOOL))),
        LayerSpec((TensorSpec("c", (5, 0), DType.FLOAT64), TensorSpec("d", (7,), DType.FLOAT8_E5M2))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SPECS))
def test_any_safetensors_reader_gives_the_tensors_by_layer(tmp_path: Path, name: str) -> None:
    spec = SPECS[name]
    made, path = template(spec), tmp_path / "block.safetensors"
    data = np.random.default_rng(3).integers(0, 2, spec.block_nbytes, np.uint8).tobytes()
    header = made.build(KEY, PARENT, 1, xxhash.xxh3_64_intdigest(data))
    path.write_bytes((header + data).ljust(made.file_nbytes, b"\0"))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["key"] == KEY.hex()
        names = {n for n in file.keys() if not n.startswith("_pad.")}  # noqa: SIM118
        wanted = {f"layers.{i}.{t.name}" for i, la in enumerate(spec.layers) for t in la.tensors}
        assert names == wanted
        for number, layer in enumerate(spec.layers):
            for slot in layer.slots():
                tensor = file.get_tensor(f"layers.{number}.{slot.spec.name}")
                assert tuple(tensor.shape) == slot.spec.shape
                assert tensor.dtype == TORCH[slot.spec.dtype]
                start = spec.layer_slice(number).start + slot.offset
                stored = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                assert stored == data[start : start + slot.spec.nbytes]


def test_an_opaque_layout_is_one_tensor_of_bytes_a_layer(tmp_path: Path) -> None:
    spec = spec_of(LayerSpec((K,)), LayerSpec((K,)), layout="engine/v1")
    made, path = template(spec), tmp_path / "block.safetensors"
    data = bytes(range(256)) * 5
    header = made.build(KEY, None, 0, 0)
    path.write_bytes((header + data[: spec.block_nbytes]).ljust(made.file_nbytes, b"\0"))
    with safetensors.safe_open(path, "np") as file:
        for number in range(2):
            found = file.get_tensor(f"layers.{number}.bytes")
            assert found.tobytes() == data[: spec.block_nbytes][spec.layer_slice(number)]
