"""Which blocks do two prompts share? Names the blocks of both and compares the names.

Run: python examples/block_keys.py
"""

from __future__ import annotations

from kvferry.core import DType, KeyScope, KVSpec, LayerSpec, TensorSpec, block_keys, namespace_id

BLOCK_TOKENS = 16


def spec_of_a_small_model() -> KVSpec:
    """A model of two layers with two KV heads of 64 elements each."""
    rows = (BLOCK_TOKENS, 2, 64)
    layer = LayerSpec((TensorSpec("k", rows, DType.BFLOAT16), TensorSpec("v", rows, DType.BFLOAT16)))
    return KVSpec(model="example", revision="1", layers=(layer, layer), block_tokens=BLOCK_TOKENS)


def main() -> None:
    """Print how many blocks of the second prompt are already known from the first."""
    spec = spec_of_a_small_model()
    namespace = namespace_id(spec, KeyScope())
    system_prompt = list(range(100))
    first = block_keys(namespace, [*system_prompt, 7, 7, 7, 7] * 2, BLOCK_TOKENS)
    second = block_keys(namespace, [*system_prompt, 8, 8, 8, 8] * 2, BLOCK_TOKENS)
    shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
    print(f"{len(first)} and {len(second)} blocks of {spec.block_nbytes} bytes, {shared} shared")
    # a key names a block and all that came before it: after the first difference none is the same again
    assert not set(first[shared:]) & set(second[shared:])


if __name__ == "__main__":
    main()
