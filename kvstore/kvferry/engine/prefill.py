"""Prefill: computes the KV of a prompt, as far as it is not cached, and draws token 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import torch

from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import (
    ConfigError,
    RequestCancelledError,
    RequestError,
    StoreError,
    TransferTimeoutError,
)
from kvferry.core.keys import BlockKey, Tokens
from kvferry.engine.paged_kv import PagedKV, Sequence
from kvferry.engine.sampling import Sampler

if TYPE_CHECKING:
    from kvferry.core.blockstore import Namespace
    from kvferry.engine.model import Model
    from kvferry.wire.messages import SamplingParams

__all__ = ["SAVE_WAIT_S", "Emit", "PrefillResult", "check_prompt", "prefill", "save_blocks"]

Emit: TypeAlias = Callable[[Sequence, int, int, int], None]
"""``emit(sequence, layer, first_token, stop_token)``: that layer's KV of these tokens is in place."""

SAVE_WAIT_S = 0.1
"""How long a prompt's blocks wait for room in the store; tokens wait with them."""

_NONE: Final = frozenset[int]()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prompt's KV, and what is needed to go on from it.

    Attributes:
        sequence: Holds the KV; the caller releases it.
        first_token: Token 0 of the answer, not in the KV yet.
        cached_tokens: Tokens whose KV came from the namespace.
        computed_tokens: The others.
        sampler: Stands after drawing token 0.
        started_at: Monotonic time at the start.
        kv_written_at: Monotonic time right after the last layer's KV of the last token was written.
        saved_blocks: Blocks newly stored in the namespace.
        save_error: Why blocks were not stored, or ``None``.
        lossy: Numbers of the full blocks that are not what the tokens alone give: they had lost something in
            the namespace, or were computed behind such a block.
    """

    sequence: Sequence
    first_token: int
    cached_tokens: int
    computed_tokens: int
    sampler: Sampler
    started_at: float
    kv_written_at: float
    saved_blocks: int = 0
    save_error: str | None = None
    lossy: frozenset[int] = frozenset()


def check_prompt(model: Model, tokens: Tokens) -> None:
    """Refuse a prompt that the model cannot take.

    Raises:
        RequestError: Naming the limit and what was asked.
    """
    if len(tokens) == 0:
        raise RequestError("the prompt is empty; it needs at least 1 token")
    if len(tokens) > model.max_model_len:
        raise RequestError(f"the prompt has {len(tokens)} tokens, the model's limit is {model.max_model_len}")
    low, high = int(np.min(tokens)), int(np.max(tokens))
    if low < 0 or high >= model.config.vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(f"token id {wrong} is outside the vocabulary of {model.config.vocab_size}")


def prefill(
    model: Model,
    kv: PagedKV,
    tokens: Tokens,
    sampling: SamplingParams,
    *,
    namespace: Namespace | None = None,
    chunk_tokens: int = 512,
    emit: Emit | None = None,
    should_stop: Callable[[], bool] | None = None,
    deadline: float,
    save: bool = True,
) -> PrefillResult:
    """Compute the KV of ``tokens`` into pages of ``kv``, reusing what ``namespace`` holds.

    At most ``len(tokens) - 1`` tokens are reused, whole blocks only: the last one is always computed,
    since its logits give token 0. The same tokens, reused prefix, chunk size and threads give the same
    bits everywhere.

    Args:
        model: Weights.
        kv: Pages; those of the prompt are taken at once.
        tokens: The whole prompt.
        sampling: How to draw token 0 and what follows.
        namespace: Blocks to reuse and to store into. If it takes lossy ones, the result says which are.
        chunk_tokens: Tokens computed in one pass through the layers; a multiple of the block size.
        emit: Called first for the reused tokens, all layers, then for each layer of each chunk right
            after its KV was written, before its attention. ``first_token`` is at a block's start. Must
            not block: the model waits.
        should_stop: Asked between layers.
        deadline: Monotonic time by which the last chunk must be done.
        save: Whether to store the full blocks before returning; else the caller may do it later by
            :func:`save_blocks`, when token 0 is on its way.

    Raises:
        RequestError: For a prompt or sampling parameters that cannot be served.
        CapacityError: If there are not enough free pages.
        RequestCancelledError: When ``should_stop`` says so.
        TransferTimeoutError: Past the deadline.
    """
    started_at = time.monotonic()
    check_prompt(model, tokens)
    if chunk_tokens < 1 or chunk_tokens % kv.block_tokens:
        raise ConfigError(
            f"chunk_tokens {chunk_tokens} is not a multiple of the {kv.block_tokens} tokens of a block"
        )
    sampler = Sampler(sampling)
    keys = namespace.keys(tokens) if namespace is not None else []
    sequence, restored, lossy = _begin(kv, len(tokens), namespace, keys, deadline)
    try:
        cached = restored * kv.block_tokens
        lossy |= frozenset(range(restored, len(keys)) if lossy else ())  # it sees all that is before it
        run = _Run(model, sequence, emit, should_stop, deadline)
        run.resume(cached)
        logits = run.compute(tokens, chunk_tokens)
        first_token = sampler.draw(logits)
        saved, problem = 0, None
        if namespace is not None and save:
            wait_until = min(deadline, deadline_in(SAVE_WAIT_S))
            saved, problem = save_blocks(namespace, sequence, keys, deadline=wait_until, lossy=lossy)
        return PrefillResult(
            sequence=sequence,
            first_token=first_token,
            cached_tokens=cached,
            computed_tokens=len(tokens) - cached,
            sampler=sampler,
            started_at=started_at,
            # on a device it is known only when token 0 is
            kv_written_at=run.kv_written_at if kv.on_host else time.monotonic(),
            saved_blocks=saved,
            save_error=problem,
            lossy=lossy,
        )
    except BaseException:
        sequence.release()
        raise


class _Run:
    """The passes of one prompt through the model."""

    def __init__(
        self,
        model: Model,
        sequence: Sequence,
        emit: Emit | None,
        should_stop: Callable[[], bool] | None,
        deadline: float,
    ) -> None:
        self._model, self._sequence, self._emit = model, sequence, emit
        self._should_stop, self._deadline = should_stop, deadline
        self._first = self._stop = 0
        self.kv_written_at = 0.0

    def resume(self, cached: int) -> None:
        """Start behind ``cached`` tokens whose KV is in place, and say so."""
        self._sequence.length = cached
        if self._emit is not None and cached:
            for layer in range(self._sequence.kv.num_layers):
                self._emit(self._sequence, layer, 0, cached)

    def compute(self, tokens: Tokens, chunk_tokens: int) -> torch.Tensor:
        """Compute all tokens behind the sequence's length; returns the logits of the last one."""
        ids = torch.from_numpy(np.array(tokens, dtype=np.int64))
        logits: torch.Tensor | None = None
        for first in range(self._sequence.length, len(tokens), chunk_tokens):
            self._first, self._stop = first, min(first + chunk_tokens, len(tokens))
            self._check()
            logits = self._model.forward(
                ids[first : self._stop],
                self._sequence,
                on_layer=self._layer_written,
                want_logits=self._stop == len(tokens),
            )
        if logits is None:
            raise RuntimeError("prefill computed no token")
        return logits

    def _layer_written(self, layer: int) -> None:
        if layer == self._sequence.kv.num_layers - 1:
            self.kv_written_at = time.monotonic()  # the last chunk's stands
        if self._emit is not None:
            self._emit(self._sequence, layer, self._first, self._stop)
        self._check()

    def _check(self) -> None:
        if self._should_stop is not None and self._should_stop():
            raise RequestCancelledError(f"prefill was cancelled within tokens {self._first}..{self._stop}")
        if is_past(self._deadline):
            raise TransferTimeoutError(
                f"prefill was not done by its deadline: stopped within tokens {self._first}..{self._stop}; "
                "allow more time or send shorter prompts"
            )


def _begin(
    kv: PagedKV, tokens: int, namespace: Namespace | None, keys: list[BlockKey], deadline: float
) -> tuple[Sequence, int, frozenset[int]]:
    """A sequence for a prompt of ``tokens`` tokens with the blocks of ``keys`` that can be had in place.

    Returns:
        The sequence, how many blocks are good in place, and the numbers of those that have lost something.
    """
    usable = keys[: (tokens - 1) // kv.block_tokens]
    if namespace is None or not kv.keeps_prefixes:
        sequence = Sequence.allocate(kv, tokens)
        if namespace is None:
            return sequence, 0, _NONE
        try:
            return sequence, *_restore(namespace, usable, sequence, deadline)
        except BaseException:
            sequence.release()
            raise
    held = kv.space(namespace).restore(usable, deadline=deadline)
    try:
        return Sequence.allocate(kv, tokens, held.pages), len(held.pages), held.lossy
    except BaseException:
        kv.free(held.pages)
        raise


def _restore(
    namespace: Namespace, keys: list[BlockKey], sequence: Sequence, deadline: float
) -> tuple[int, frozenset[int]]:
    """Copy the stored prefix of ``keys`` into the sequence's pages.

    What cannot be read is computed instead.

    Returns:
        Blocks that are good in place, and the numbers of those that have lost something.
    """
    try:
        prefix = namespace.lookup(keys).prefix
        if prefix == 0:
            return 0, _NONE
        with namespace.load(keys[:prefix], deadline=deadline) as lease:
            count = min(len(lease), prefix)
            for index in range(count):
                sequence.kv.write_block(sequence.blocks[index], lease.view(index))
            lossy = frozenset(index for index in lease.lossy if index < count)
        return count, lossy  # the end of the lease has checked what was copied
    except StoreError as error:
        _log.warning("cached blocks could not be used and are computed again: %s", error)
        return 0, _NONE


def save_blocks(
    namespace: Namespace,
    sequence: Sequence,
    keys: list[BlockKey],
    *,
    deadline: float,
    lossy: frozenset[int] = frozenset(),
) -> tuple[int, str | None]:
    """Store those full blocks of a sequence that the namespace does not hold.

    Args:
        namespace: Where.
        sequence: Whose first ``len(keys)`` blocks are complete.
        keys: Their keys.
        deadline: By when there must be room.
        lossy: Numbers of those that are stored as having lost something; see :attr:`PrefillResult.lossy`.

    Returns:
        Blocks newly stored, and why the others were not (logged, no error: it is only a cache). Where paged
        KV keeps prefixes, they are shared there, and its pool stores them.
    """
    if sequence.kv.keeps_prefixes:
        return sequence.kv.publish(namespace, sequence, keys, lossy), None
    known = namespace.lookup(keys).prefix
    if known == len(keys):
        return 0, None
    number = {key: index for index, key in enumerate(keys)}
    try:
        parent = keys[known - 1] if known else None
        with namespace.reserve(keys[known:], parent=parent, deadline=deadline) as lease:
            for slot, key in enumerate(lease.keys):
                sequence.kv.read_block(sequence.blocks[number[key]], lease.view(slot))
            lease.mark_lossy(slot for slot, key in enumerate(lease.keys) if number[key] in lossy)
            return lease.commit(), None
    except StoreError as error:
        _log.warning("%d blocks of a prompt are not kept: %s", len(keys) - known, error)
        return 0, str(error)
