"""Keys name blocks by everything that makes their bytes differ, and by nothing else."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.keys import (
    BlockKey,
    Media,
    block_keys,
    foreign_keys,
    split_keys,
    token_array,
    usable_prefix,
)
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, Restore, TensorSpec, namespace_id

VECTORS = Path(__file__).parents[2] / "data" / "key_vectors.json"
TOKENS = list(range(100, 140))
BLOCK = 16


def spec(
    *, dtype: DType = DType.BFLOAT16, layers: int = 2, heads: int = 2, latent: bool = False, **fields: Any
) -> KVSpec:
    shape = (BLOCK, heads, 64)
    tensors = (TensorSpec("k", shape, dtype), TensorSpec("v", shape, dtype))
    if latent:
        tensors = (TensorSpec("latent", (BLOCK, 576), dtype),)  # type: ignore[assignment]
    values: dict[str, Any] = {"model": "m", "revision": "r1", "block_tokens": BLOCK, **fields}
    return KVSpec(layers=(LayerSpec(tensors),) * layers, **values)


def keys(a_spec: KVSpec, scope: KeyScope = KeyScope(), media: tuple[Media, ...] = ()) -> list[BlockKey]:  # noqa: B008
    return block_keys(namespace_id(a_spec, scope), TOKENS, BLOCK, media=media)


def assert_all_differ(found: list[list[BlockKey]]) -> None:
    flat = [key for one in found for key in one]
    assert len(set(flat)) == len(flat)


# ---- golden vectors: a change here changes every stored and every sent key -----------------------------


def build_spec(case: dict[str, Any]) -> KVSpec:
    layers = tuple(
        LayerSpec(tuple(TensorSpec(n, tuple(s), DType(d)) for n, s, d in layer)) for layer in case["layers"]
    )
    fields = dict(case["fields"])
    if "restore" in fields:
        fields["restore"] = Restore(*fields["restore"])
    return KVSpec(layers=layers, **fields)


CASES = json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_golden_vectors(case: dict[str, Any]) -> None:
    a_spec = build_spec(case)
    assert a_spec.fingerprint().hex() == case["fingerprint"]
    salt = case["scope"]["salt"]
    scope = KeyScope(
        case["scope"]["adapter"],
        case["scope"]["adapter_revision"],
        None if salt is None else bytes.fromhex(salt),
    )
    namespace = namespace_id(a_spec, scope)
    assert namespace.hex() == case["namespace_id"]
    media = [Media(first, count, bytes.fromhex(i)) for first, count, i in case["media"]]
    found = block_keys(namespace, case["tokens"], a_spec.block_tokens, media=media)
    assert [key.hex() for key in found] == case["keys"]


def test_the_key_chain_is_what_the_format_says() -> None:
    namespace = namespace_id(spec(), KeyScope())
    link = namespace
    for index, key in enumerate(keys(spec())):
        tokens = np.array(TOKENS[index * BLOCK : (index + 1) * BLOCK], "<u4").tobytes()
        whole = (32).to_bytes(4, "little") + link + len(tokens).to_bytes(4, "little") + tokens + bytes(4)
        link = hashlib.blake2b(whole, digest_size=32, person=b"kvferry.key.1").digest()
        assert key == link


# ---- what must differ ----------------------------------------------------------------------------------


def test_c012_another_dtype_is_another_key() -> None:
    dtypes = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8)
    assert_all_differ([keys(spec(dtype=d)) for d in dtypes])


def test_c014_another_revision_is_another_key() -> None:
    assert_all_differ([keys(spec(revision=r)) for r in ("r1", "r2", "")])


def test_c015_another_adapter_is_another_key() -> None:
    scopes = [
        KeyScope(),
        KeyScope(adapter="a", adapter_revision="1"),
        KeyScope(adapter="b", adapter_revision="1"),
        KeyScope(adapter="a", adapter_revision="2"),
        KeyScope(adapter="a"),
        KeyScope(adapter=""),
        KeyScope(adapter="a", adapter_revision=""),
        KeyScope(salt=b""),
        KeyScope(salt=b"a"),
    ]
    assert_all_differ([keys(spec(), scope) for scope in scopes])
    for scope in scopes:
        assert keys(spec(), scope) == keys(
            spec(), KeyScope(scope.adapter, scope.adapter_revision, scope.salt)
        )


def test_c017_every_bit_of_a_media_id_counts() -> None:
    ids = [hashlib.sha256(str(n).encode()).digest() for n in range(5000)]
    ids += [b"\x01" + bytes(29) + b"\xab\xcd", b"\x02" + bytes(29) + b"\xab\xcd", bytes(30) + b"\xab\xcd"]
    namespace = namespace_id(spec(), KeyScope())
    found = {block_keys(namespace, [7] * BLOCK, BLOCK, media=[Media(2, 9, i)])[0] for i in ids}
    assert len(found) == len(ids)


def test_c019_no_character_can_move_across_a_border() -> None:
    specs = [
        spec(model="abc", revision="x"),
        spec(model="ab", revision="cx"),
        spec(model="abcx", revision=""),
        spec(group="ab", layout="c"),
        spec(group="a", layout="bc"),
        spec(revision="rf", group="ull"),
        spec(tp_rank=1, tp_size=23),
        spec(tp_rank=12, tp_size=13),
        spec(tp_rank=1, tp_size=2, pp_rank=3, pp_size=4),
        spec(tp_rank=1, tp_size=23, pp_rank=3, pp_size=4),
        spec(heads=1, layers=12),
        spec(heads=11, layers=2),
        spec(restore=Restore("last_window", 16)),
        spec(restore=Restore("last_window", 1)),
    ]
    assert_all_differ([keys(s) for s in specs])
    scopes = [
        KeyScope("ab", "c", b"d"),
        KeyScope("a", "bc", b"d"),
        KeyScope("ab", "cd", b""),
        KeyScope("abc", None, b"d"),
        KeyScope(None, "abc", b"d"),
    ]
    assert_all_differ([keys(spec(), scope) for scope in scopes])
    names = [("ab", "c"), ("a", "bc")]
    tensors = [
        KVSpec(
            model="m",
            revision="r1",
            block_tokens=BLOCK,
            layers=(LayerSpec(tuple(TensorSpec(n, (BLOCK, 1), DType.INT8) for n in pair)),),
        )
        for pair in names
    ]
    assert_all_differ([keys(s) for s in tensors])
    namespace = namespace_id(spec(), KeyScope())
    media = [
        (Media(0, 1, b"ab"), Media(1, 1, b"c")),
        (Media(0, 1, b"a"), Media(1, 1, b"bc")),
        (Media(0, 2, b"abc"),),
        (Media(0, 1, b"abc"),),
        (Media(1, 1, b"abc"),),
    ]
    assert_all_differ([block_keys(namespace, [1] * BLOCK, BLOCK, media=m) for m in media])


def test_c020_every_rank_has_its_own_keys_but_for_what_all_ranks_share() -> None:
    grid: list[dict[str, Any]] = [
        {"tp_rank": tp, "tp_size": tps, "pp_rank": pp, "pp_size": pps}
        for tps, pps in itertools.product((1, 2, 4), (1, 2))
        for tp, pp in itertools.product(range(tps), range(pps))
    ]
    assert_all_differ([keys(spec(**ranks)) for ranks in grid])
    # MLA latents are the same on all tensor-parallel ranks and described as rank 0 of 1 everywhere.
    shared = [keys(spec(latent=True, pp_rank=pp, pp_size=2)) for pp in range(2) for _tp_rank in range(4)]
    assert len({tuple(k) for k in shared}) == 2
    assert_all_differ([shared[0], shared[4]])


CHILD = """
import random
from kvferry.core.keys import Media, block_keys
from kvferry.core.spec import *
layer = LayerSpec((TensorSpec("k", (16, 2, 64), DType.BFLOAT16),))
ns = namespace_id(KVSpec(model="m", revision="r", layers=(layer,), block_tokens=16), KeyScope(adapter="a"))
rng = random.Random(5)
for _ in range(100):
    tokens = [rng.randrange(50000) for _ in range(rng.randrange(16, 200))]
    for key in block_keys(ns, tokens, 16, media=[Media(3, 20, b"image")]):
        print(key.hex())
"""


def test_c023_keys_are_the_same_in_every_process() -> None:
    outputs = []
    for seed in (None, "1", "2"):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        outputs.append(done.stdout)
    assert len(outputs[0].splitlines()) > 300
    assert outputs[0] == outputs[1] == outputs[2]


# ---- media spans, continuation, token types --------------------------------------------------------------


def test_a_media_span_changes_the_blocks_that_it_touches_and_all_after() -> None:
    plain = keys(spec())
    assert len(plain) == 2
    assert keys(spec(), media=(Media(32, 4, b"i"),)) == plain, "it begins after the last full block"
    second = keys(spec(), media=(Media(16, 4, b"i"),))
    assert second[0] == plain[0]
    assert second[1] != plain[1]
    across = keys(spec(), media=(Media(15, 2, b"i"),))
    assert across[0] != plain[0]
    # Block 1 of a span over the border differs from block 1 whose predecessor has the span alone.
    assert across[1] != keys(spec(), media=(Media(15, 1, b"i"),))[1]
    ordered = (Media(0, 1, b"a"), Media(4, 1, b"b"))
    assert keys(spec(), media=ordered) == keys(spec(), media=ordered[::-1])
    for bad in (Media(-1, 2, b"i"), Media(0, 0, b"i")):
        with pytest.raises(ConfigError, match="empty or negative"):
            keys(spec(), media=(bad,))


def test_a_chain_goes_on_from_its_parent() -> None:
    namespace = namespace_id(spec(), KeyScope())
    tokens, media = list(range(96)), [Media(40, 30, b"i")]
    whole = block_keys(namespace, tokens, BLOCK, media=media)
    for cut in (16, 48, 80):
        rest = block_keys(
            namespace,
            tokens[cut:],
            BLOCK,
            media=media,
            parent=whole[cut // BLOCK - 1],
            first_token=cut,
        )
        assert rest == whole[cut // BLOCK :]
    for parent, first in ((None, 16), (whole[0], 0), (whole[0], 17)):
        with pytest.raises(ConfigError, match=f"first_token {first}"):
            block_keys(namespace, tokens, BLOCK, parent=parent, first_token=first)
    with pytest.raises(ConfigError, match="32 bytes, got 3"):
        block_keys(b"abc", tokens, BLOCK)


def test_token_types_do_not_matter_but_their_values_do() -> None:
    namespace = namespace_id(spec(), KeyScope())
    want = block_keys(namespace, TOKENS, BLOCK)
    for dtype in ("<u4", ">u4", np.int64, np.uint16, np.int32):
        assert block_keys(namespace, np.array(TOKENS, dtype), BLOCK) == want
    assert block_keys(namespace, np.repeat(np.array(TOKENS, "<u4"), 2)[::2], BLOCK) == want
    array = np.array(TOKENS, "<u4")
    assert np.shares_memory(token_array(array), array)
    assert block_keys(namespace, [2**32 - 1] * BLOCK, BLOCK)
    assert token_array([]).size == 0
    for bad, message in (
        ([[1]], "flat"),
        ([1.5], "integers"),
        ([True], "integers"),
        ([-1], r"-1\.\."),
        ([2**32], str(2**32)),
    ):
        with pytest.raises(ConfigError, match=message):
            token_array(bad)  # type: ignore[arg-type]


def test_foreign_keys() -> None:
    assert foreign_keys([b"x" * 32]) == [b"x" * 32]
    with pytest.raises(ConfigError, match="engine hash 1 has 31"):
        foreign_keys([b"x" * 32, b"x" * 31])


def test_keys_of_a_message_are_taken_apart() -> None:
    assert split_keys(b"") == []
    assert split_keys(b"x" * 32 + b"y" * 32) == [b"x" * 32, b"y" * 32]
    with pytest.raises(ConfigError, match="keys of 33 bytes"):
        split_keys(b"x" * 33)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_c026_the_last_token_is_always_computed(n: int) -> None:
    for prompt in (BLOCK * n - 1, BLOCK * n, BLOCK * n + 1):
        stored = prompt // BLOCK
        usable = usable_prefix(stored, prompt, BLOCK)
        assert 0 <= usable <= prompt - 1
        assert usable == min(stored * BLOCK, prompt - 1)


def test_usable_prefix_is_never_negative() -> None:
    assert usable_prefix(0, 0, BLOCK) == 0
    assert usable_prefix(0, 1, BLOCK) == 0
    assert usable_prefix(9, 1, BLOCK) == 0
    assert usable_prefix(1, 40, BLOCK) == BLOCK
