from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.core.blockstore import Namespace
from kvferry.core.errors import (
    CapacityError,
    ConfigError,
    LeaseExpiredError,
    RequestCancelledError,
    RequestError,
    TransferTimeoutError,
)
from kvferry.core.leases import SlotReadLease
from kvferry.core.memory import MemoryNamespace, MemoryStore
from kvferry.engine.model import Model
from kvferry.engine.paged_kv import PagedKV, Sequence
from kvferry.engine.prefill import PrefillResult, prefill, save_blocks
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.wire.messages import SamplingParams

BLOCK, LAYERS = 16, 3
GREEDY = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def model(models: Path) -> Model:
    return load_model(make_tiny(models / "prefill", layers=LAYERS, hidden=64, head_dim=16, max_positions=256))


@pytest.fixture
def kv(model: Model) -> PagedKV:
    return PagedKV(model.config, num_blocks=24, block_tokens=BLOCK)


@pytest.fixture
def store(kv: PagedKV) -> MemoryStore:
    return MemoryStore(max(kv.nbytes, 1 << 20))


def _namespace(store: MemoryStore, kv: PagedKV) -> MemoryNamespace:
    return store.namespace(kv.spec("tiny", "r"))


def _prompt(length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(length).integers(0, 256, length)]


def _rows(sequence: Sequence, length: int) -> list[torch.Tensor]:
    """All KV of a sequence, as copies."""
    return [t.clone() for layer in range(LAYERS) for t in sequence.kv.gather(layer, sequence, length)]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Emitted:
    """Collects what is emitted, with the bytes that were in place at that moment."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.seen: dict[tuple[int, int], list[bytes]] = {}

    def __call__(self, sequence: Sequence, layer: int, first: int, stop: int) -> None:
        self.calls.append((layer, first, stop))
        for number in range(first // BLOCK, -(-stop // BLOCK)):
            rows = min(BLOCK, stop - number * BLOCK)
            views = sequence.kv.tensor_views(layer, sequence.blocks[number], rows)
            self.seen[layer, number] = [view.tobytes() for view in views]

    def assert_complete(self, result: PrefillResult, length: int) -> None:
        """What was emitted is the final KV: nothing was announced before it was written."""
        sequence = result.sequence
        for layer in range(LAYERS):
            for number in range(-(-length // BLOCK)):
                rows = min(BLOCK, length - number * BLOCK)
                views = sequence.kv.tensor_views(layer, sequence.blocks[number], rows)
                assert self.seen[layer, number] == [view.tobytes() for view in views]


def test_emits_each_layer_of_each_chunk_once_and_in_place(model: Model, kv: PagedKV, deadline: float) -> None:
    emitted = Emitted()
    result = prefill(model, kv, _prompt(75), GREEDY, chunk_tokens=32, emit=emitted, deadline=deadline)
    chunks = [(0, 32), (32, 64), (64, 75)]
    assert emitted.calls == [(layer, *chunk) for chunk in chunks for layer in range(LAYERS)]
    emitted.assert_complete(result, 75)
    assert (result.cached_tokens, result.computed_tokens, result.sequence.length) == (0, 75, 75)


def test_kv_written_at_is_before_the_last_emit_of_the_last_chunk(
    model: Model, kv: PagedKV, deadline: float
) -> None:
    times: list[float] = []
    result = prefill(
        model,
        kv,
        _prompt(40),
        GREEDY,
        chunk_tokens=16,
        emit=lambda *_: times.append(time.monotonic()),
        deadline=deadline,
    )
    assert result.started_at <= times[-2] <= result.kv_written_at <= times[-1]


def test_cached_tokens_are_emitted_first_and_only_the_rest_is_computed(
    model: Model, kv: PagedKV, store: MemoryStore, deadline: float
) -> None:
    prompt, namespace = _prompt(100), _namespace(store, kv)
    cold = prefill(model, kv, prompt[:70], GREEDY, namespace=namespace, deadline=deadline)
    assert cold.saved_blocks == 4
    before = _rows(cold.sequence, 64)
    emitted = Emitted()
    warm = prefill(
        model, kv, prompt, GREEDY, namespace=namespace, emit=emitted, chunk_tokens=32, deadline=deadline
    )
    assert (warm.cached_tokens, warm.computed_tokens, warm.saved_blocks) == (64, 36, 2)
    chunks = [(0, 64), (64, 96), (96, 100)]
    assert emitted.calls == [(layer, *chunk) for chunk in chunks for layer in range(LAYERS)]
    emitted.assert_complete(warm, 100)
    assert _same(_rows(warm.sequence, 64), before)
    assert store.stats().leases == 0


@pytest.mark.parametrize("length", [1, 3, 15, 16, 17])
def test_c030_prompts_around_one_block(
    model: Model, kv: PagedKV, store: MemoryStore, length: int, deadline: float
) -> None:
    emitted = Emitted()
    result = prefill(
        model, kv, _prompt(length), GREEDY, namespace=_namespace(store, kv), emit=emitted, deadline=deadline
    )
    emitted.assert_complete(result, length)
    assert result.saved_blocks == length // BLOCK
    result.sequence.release()
    assert kv.free_blocks == kv.num_blocks


def test_the_same_prompt_on_scattered_pages_gives_the_same_bits(
    model: Model, kv: PagedKV, deadline: float
) -> None:
    prompt = _prompt(100)
    run = prefill(model, kv, prompt, GREEDY, chunk_tokens=32, deadline=deadline)
    held = kv.allocate(kv.free_blocks)
    kv.free(held[1::2][:8])
    scattered = prefill(model, kv, prompt, GREEDY, chunk_tokens=32, deadline=deadline)
    assert run.sequence.run_start is not None
    assert scattered.sequence.run_start is None
    assert _same(_rows(run.sequence, 100), _rows(scattered.sequence, 100))


@pytest.mark.parametrize("at", [0, 1, 4, 8])
def test_stops_between_layers_when_asked_and_gives_its_pages_back(
    model: Model, kv: PagedKV, at: int, deadline: float
) -> None:
    emitted: list[int] = []

    def emit(_sequence: Sequence, layer: int, _first: int, _stop: int) -> None:
        emitted.append(layer)

    with pytest.raises(RequestCancelledError):
        prefill(
            model,
            kv,
            _prompt(48),
            GREEDY,
            chunk_tokens=16,
            emit=emit,
            should_stop=lambda: len(emitted) >= at,
            deadline=deadline,
        )
    assert len(emitted) == at
    assert kv.free_blocks == kv.num_blocks


def test_stops_at_its_deadline(model: Model, kv: PagedKV) -> None:
    with pytest.raises(TransferTimeoutError, match=r"stopped within tokens 0\.\.48"):
        prefill(model, kv, _prompt(48), GREEDY, deadline=time.monotonic() - 1)
    assert kv.free_blocks == kv.num_blocks


def test_an_error_of_the_emitter_ends_it_and_gives_its_pages_back(
    model: Model, kv: PagedKV, deadline: float
) -> None:
    def emit(*_: object) -> None:
        raise LeaseExpiredError("gone")

    with pytest.raises(LeaseExpiredError):
        prefill(model, kv, _prompt(48), GREEDY, emit=emit, deadline=deadline)
    assert kv.free_blocks == kv.num_blocks


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 257, "the prompt has 257 tokens, the model's limit is 256"),
        ([5, 272], "token id 272 is outside the vocabulary of 272"),
        ([-1, 5], "token id -1 is outside"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(
    model: Model, kv: PagedKV, tokens: list[int], message: str, deadline: float
) -> None:
    with pytest.raises(RequestError, match=message):
        prefill(model, kv, tokens, GREEDY, deadline=deadline)
    assert kv.free_blocks == kv.num_blocks


def test_other_refusals_hold_no_page(model: Model, kv: PagedKV, deadline: float) -> None:
    with pytest.raises(RequestError, match="top_p"):
        prefill(model, kv, [1], SamplingParams(top_p=2.0, temperature=1.0), deadline=deadline)
    with pytest.raises(ConfigError, match="chunk_tokens 24 is not a multiple of the 16 tokens"):
        prefill(model, kv, [1], GREEDY, chunk_tokens=24, deadline=deadline)
    small = PagedKV(model.config, num_blocks=2, block_tokens=BLOCK)
    with pytest.raises(CapacityError, match="3 KV blocks"):
        prefill(model, small, _prompt(33), GREEDY, deadline=deadline)
    assert (kv.free_blocks, small.free_blocks) == (24, 2)


def test_a_prompt_of_the_models_full_length_works(model: Model, kv: PagedKV, deadline: float) -> None:
    assert prefill(model, kv, _prompt(256), GREEDY, deadline=deadline).computed_tokens == 256


def test_cached_blocks_whose_lease_expired_are_computed(
    model: Model, kv: PagedKV, store: MemoryStore, deadline: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, namespace = _prompt(50), _namespace(store, kv)
    cold = prefill(model, kv, prompt, GREEDY, namespace=namespace, deadline=deadline)
    copied: list[int] = []
    write_block = PagedKV.write_block

    def write_wrong_then_expire(self: PagedKV, block: int, data: memoryview) -> None:
        write_block(self, block, bytes(len(data)))  # what a slot that was used again would give
        copied.append(block)

    def expired(_: SlotReadLease) -> None:
        raise LeaseExpiredError("past its deadline")

    monkeypatch.setattr(PagedKV, "write_block", write_wrong_then_expire)
    monkeypatch.setattr(SlotReadLease, "check", expired)
    warm = prefill(model, kv, prompt, GREEDY, namespace=namespace, deadline=deadline)
    assert len(copied) == 3
    assert (warm.cached_tokens, warm.computed_tokens) == (0, 50)
    assert _same(_rows(warm.sequence, 50), _rows(cold.sequence, 50))
    assert store.stats().leases == 0


def test_a_store_without_room_is_no_error(model: Model, kv: PagedKV, deadline: float) -> None:
    store = MemoryStore(1 << 16)
    namespace: Namespace = store.namespace(kv.spec("tiny", ""))
    blocks = (1 << 16) // namespace.spec.block_nbytes
    result = prefill(model, kv, _prompt((blocks + 1) * BLOCK), GREEDY, namespace=namespace, deadline=deadline)
    assert result.saved_blocks == 0
    assert result.save_error is not None
    assert store.stats().entries == 0
    assert store.stats().leases == 0


def test_saving_may_be_left_for_later(model: Model, kv: PagedKV, store: MemoryStore, deadline: float) -> None:
    prompt, namespace = _prompt(50), _namespace(store, kv)
    result = prefill(model, kv, prompt, GREEDY, namespace=namespace, save=False, deadline=deadline)
    assert store.stats().entries == 0
    keys = namespace.keys(prompt)
    assert save_blocks(namespace, result.sequence, keys, deadline=deadline) == (3, None)
    assert save_blocks(namespace, result.sequence, keys, deadline=deadline) == (0, None)
    with namespace.load(keys, deadline=deadline) as lease:
        assert len(lease) == 3
        for index in range(3):
            for layer in range(LAYERS):
                k, v = kv.tensor_views(layer, result.sequence.blocks[index])
                assert lease.layer(index, layer).tobytes() == k.tobytes() + v.tobytes()


def test_what_is_computed_behind_lossy_blocks_is_stored_as_lossy(
    model: Model, kv: PagedKV, store: MemoryStore, deadline: float
) -> None:
    prompt, exact = _prompt(70), _namespace(store, kv)
    any_loss = store.namespace(kv.spec("tiny", "r"), takes_lossy=True)
    keys = exact.keys(prompt)
    cold = prefill(model, kv, prompt, GREEDY, deadline=deadline)
    with exact.reserve(keys[:3], parent=None, deadline=deadline) as lease:
        for index in range(3):
            cold.sequence.kv.read_block(cold.sequence.blocks[index], lease.view(index))
        lease.mark_lossy([1])
        lease.commit()
    assert exact.lookup(keys).prefix == 1  # what stands behind it cannot be used
    taken = prefill(model, kv, prompt, GREEDY, namespace=any_loss, deadline=deadline)
    assert (taken.cached_tokens, taken.saved_blocks) == (48, 1)
    assert taken.lossy == {1, 3}
    with any_loss.load(keys, deadline=deadline) as lease:
        assert lease.lossy == {1, 3}
    again = prefill(model, kv, prompt, GREEDY, namespace=exact, deadline=deadline)
    assert (again.cached_tokens, again.saved_blocks, again.lossy) == (16, 2, frozenset())
    assert _same(_rows(again.sequence, 70), _rows(cold.sequence, 70))
    assert exact.lookup(keys).prefix == 4
    for result in (cold, taken, again):
        result.sequence.release()
