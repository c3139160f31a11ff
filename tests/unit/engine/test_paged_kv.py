from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.core.errors import CapacityError, ConfigError
from kvferry.core.spec import DType
from kvferry.engine.config import ModelConfig
from kvferry.engine.paged_kv import PagedKV, Sequence


def _config(*, kv_heads: int = 2, head_dim: int = 8, layers: int = 3) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_layers=layers,
        num_heads=2 * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=64,
    )


def _kv(blocks: int = 10, dtype: torch.dtype = torch.float32, block_tokens: int = 4) -> PagedKV:
    return PagedKV(_config(), num_blocks=blocks, block_tokens=block_tokens, dtype=dtype)


def _rows(kv: PagedKV, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    shape = (2, tokens, 2, 8)
    both = torch.randn(shape, generator=generator).to(kv.dtype)
    return both[0], both[1]


def _filled(kv: PagedKV, sequence: Sequence, tokens: int) -> Sequence:
    for layer in range(kv.num_layers):
        kv.write_rows(layer, sequence, 0, *_rows(kv, layer, tokens))
    sequence.length = tokens
    return sequence


def _fragmented(kv: PagedKV, blocks: int) -> Sequence:
    """A sequence whose pages are no neighbours and in no order."""
    everything = kv.allocate(kv.num_blocks)
    chosen = everything[1::2][:blocks][::-1]
    kv.free([b for b in everything if b not in chosen])
    return Sequence(kv, chosen)


def test_pages_are_taken_and_given_back() -> None:
    kv = _kv(10)
    first, second = kv.allocate(4), kv.allocate(6)
    assert sorted(first + second) == list(range(10))
    assert kv.free_blocks == 0
    assert kv.allocate(0) == []
    kv.free(second)
    assert kv.free_blocks == 6


def test_too_many_pages_are_refused_with_the_figures_and_none_is_taken() -> None:
    kv = _kv(10)
    kv.allocate(7)
    with pytest.raises(CapacityError, match="4 KV blocks of 4 tokens asked, 3 of 10 are free"):
        kv.allocate(4)
    assert kv.free_blocks == 3


@pytest.mark.parametrize("ids", [[3], [11], [-1], [0, 0], [0, 3]])
def test_a_page_that_nobody_holds_cannot_be_freed(ids: list[int]) -> None:
    kv = _kv(10)
    kv.allocate(3)
    with pytest.raises(ValueError, match="twice or do not exist"):
        kv.free(ids)
    assert kv.free_blocks == 7


def test_neighbours_are_preferred_and_growth_follows_on() -> None:
    kv = _kv(10)
    a = kv.allocate(2)
    b = kv.allocate(2)
    kv.free(a)
    assert kv.allocate(3) == [4, 5, 6]  # not 0, 1 and 4
    assert kv.allocate(1, after=6) == [7]
    assert kv.allocate(1, after=b[-1]) == [0]  # what follows is taken
    kv.free([4, 6])
    assert kv.allocate(4) == [1, 4, 6, 8]  # no such run is left


def test_a_sequence_grows_by_pages_and_is_released_once() -> None:
    kv = _kv(10)
    sequence = Sequence.allocate(kv, 9)
    assert (sequence.blocks, sequence.capacity_tokens) == ([0, 1, 2], 12)
    sequence.grow(12)
    assert len(sequence.blocks) == 3
    other = kv.allocate(1)
    sequence.grow(13)
    assert sequence.blocks == [0, 1, 2, 4]
    assert sequence.run_start is None
    with pytest.raises(CapacityError):
        sequence.grow(1000)
    sequence.release()
    sequence.release()
    assert kv.free_blocks == 9
    kv.free(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 4, 5, 11, 12])
def test_what_is_written_is_gathered_whether_pages_are_neighbours_or_not(
    dtype: torch.dtype, tokens: int
) -> None:
    for fragmented in (False, True):
        kv = _kv(dtype=dtype)
        sequence = _filled(kv, _fragmented(kv, 3) if fragmented else Sequence.allocate(kv, 12), tokens)
        for layer in range(kv.num_layers):
            k, v = _rows(kv, layer, tokens)
            got_k, got_v = kv.gather(layer, sequence, tokens)
            assert torch.equal(got_k, k.transpose(0, 1)[None])
            assert torch.equal(got_v, v.transpose(0, 1)[None])
            assert got_k.stride()[-3:] == (8, 16, 1)  # the same for views and copies


def test_neighbours_are_gathered_without_a_copy() -> None:
    kv = _kv()
    sequence = _filled(kv, Sequence.allocate(kv, 12), 12)
    k, _ = kv.gather(1, sequence, 12)
    view, _ = kv.tensor_views(1, sequence.blocks[0])
    assert k.data_ptr() == np.frombuffer(view, np.uint8).ctypes.data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensor_views_are_the_rows_in_place(dtype: torch.dtype) -> None:
    kv = _kv(dtype=dtype)
    sequence = _filled(kv, _fragmented(kv, 3), 10)
    for layer in range(kv.num_layers):
        k, v = _rows(kv, layer, 10)
        for number, (first, count) in enumerate(((0, 4), (4, 4), (8, 2))):
            views = kv.tensor_views(layer, sequence.blocks[number], count)
            for view, tensor in zip(views, (k, v), strict=True):
                assert len(view) == count * 16 * dtype.itemsize
                expected = tensor[first : first + count].contiguous().view(torch.uint8).numpy().tobytes()
                assert view.tobytes() == expected
    with pytest.raises(ConfigError, match="5 tokens of a KV block of 4"):
        kv.tensor_views(0, 0, 5)


def test_spec_describes_a_block() -> None:
    kv = _kv(dtype=torch.bfloat16)
    spec = kv.spec("tiny", "r1")
    assert (spec.model, spec.revision, spec.block_tokens, len(spec.layers)) == ("tiny", "r1", 4, 3)
    assert [(t.name, t.shape, t.dtype) for t in spec.layers[0].tensors] == [
        ("k", (4, 2, 8), DType.BFLOAT16),
        ("v", (4, 2, 8), DType.BFLOAT16),
    ]


@pytest.mark.parametrize(
    "config", [_config(), _config(kv_heads=1, head_dim=2), _config(kv_heads=3, head_dim=6)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_go_out_and_come_in_as_the_spec_lays_them_out(config: ModelConfig, dtype: torch.dtype) -> None:
    kv = PagedKV(config, num_blocks=4, block_tokens=5, dtype=dtype)
    spec = kv.spec("tiny", "")
    source, target, by_slice = kv.allocate(3)
    for layer in range(3):
        k, v = kv.tensor_views(layer, source)
        k[:] = np.random.default_rng(layer).bytes(len(k))
        v[:] = np.random.default_rng(layer + 50).bytes(len(v))
    block = bytearray(b"\xff" * spec.block_nbytes)
    kv.read_block(source, memoryview(block))
    for layer, layer_spec in enumerate(spec.layers):
        piece = bytes(block[spec.layer_slice(layer)])
        for view, (tensor, offset) in zip(kv.tensor_views(layer, source), layer_spec.slots(), strict=True):
            assert piece[offset : offset + tensor.nbytes] == view.tobytes()
        assert not any(piece[layer_spec.data_nbytes :])  # padding is zeros
        kv.write_slice(layer, by_slice, piece, 5)
    kv.write_block(target, bytes(block))  # read-only, as the view of a lease
    for layer in range(3):
        for copy in (target, by_slice):
            got = [view.tobytes() for view in kv.tensor_views(layer, copy)]
            assert got == [view.tobytes() for view in kv.tensor_views(layer, source)]


def test_a_partial_slice_is_taken_in_either_layout_and_nothing_behind_it_is_touched() -> None:
    kv = _kv()
    spec = kv.spec("tiny", "")
    row = 2 * 8 * 4
    layer_slice = np.random.default_rng(0).integers(0, 256, spec.layers[0].nbytes, np.uint8)
    k, v = layer_slice[: 4 * row], layer_slice[4 * row : 8 * row]
    packed = np.concatenate([k[: 3 * row], v[: 3 * row]])
    for data in (layer_slice, packed):
        (block,) = kv.allocate(1)
        for view in kv.tensor_views(2, block):
            view[:] = b"\x77" * len(view)
        kv.write_slice(2, block, data, 3)
        for view, expected in zip(kv.tensor_views(2, block), (k, v), strict=True):
            assert view[: 3 * row].tobytes() == expected[: 3 * row].tobytes()
            assert view[3 * row :].tobytes() == b"\x77" * row
    with pytest.raises(ConfigError, match="17 bytes for 3 tokens of layer 2"):
        kv.write_slice(2, 0, b"x" * 17, 3)


@pytest.mark.parametrize(("blocks", "tokens"), [(0, 16), (4, 0), (-1, 16)])
def test_sizes_below_one_are_refused(blocks: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        PagedKV(_config(), num_blocks=blocks, block_tokens=tokens)


def test_memory_that_cannot_be_had_is_refused_with_the_figures() -> None:
    with pytest.raises(
        ConfigError, match=r"KV blocks of 1536 bytes take \d+ bytes, \d+ bytes of memory are available"
    ):
        _kv(2**46)


def test_pages_that_start_off_the_boundary_are_gathered_by_copy() -> None:
    """Since matrix products may round differently for them: the same bits on any page matter more."""
    kv = PagedKV(_config(kv_heads=1, head_dim=2), num_blocks=4, block_tokens=5)
    sequence = Sequence.allocate(kv, 10)
    sequence.length = 10
    k, v = kv.gather(0, sequence, 10)
    assert k.data_ptr() % 64 == 0
    assert np.frombuffer(kv.tensor_views(0, 1)[0], np.uint8).ctypes.data % 64 != 0
    assert v.shape == (1, 1, 10, 2)
