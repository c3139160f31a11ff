"""The engine in a single process: the same prefill and decode code, with nothing in between.

It is what split answers are compared with, and the shortest way to see the engine work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import RequestCancelledError, TransferTimeoutError
from kvferry.core.keys import Tokens
from kvferry.core.memory import MemoryStore
from kvferry.core.spec import KeyScope
from kvferry.device.registry import open_device
from kvferry.engine.decode import DecodeSequence, FinishReason
from kvferry.engine.paged_kv import PagedKV
from kvferry.engine.prefill import SAVE_WAIT_S, PrefillResult, prefill, save_blocks
from kvferry.engine.sampling import check_sampling

if TYPE_CHECKING:
    from kvferry.core.blockstore import BlockStore
    from kvferry.engine.model import Model
    from kvferry.wire.messages import SamplingParams

__all__ = ["Generation", "LocalEngine"]

_DEFAULT_TIMEOUT_S = 600.0
_DEFAULT_KV_TOKENS = 8192


class Generation:
    """The answer to one prompt, token by token. Iterated over once; prefill runs with the first token.

    Attributes:
        tokens: Those that were drawn so far; a stop token is the last.
        finish_reason: ``stop`` or ``length`` once it has ended.
        prefill: What prefill did, once it has run.
        first_token_at: Monotonic time of token 0.
    """

    def __init__(self, steps: Callable[[Generation], Iterator[int]]) -> None:
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.prefill: PrefillResult | None = None
        self.started_at = time.monotonic()
        self.first_token_at = 0.0
        self._steps: Callable[[Generation], Iterator[int]] | None = steps

    def __iter__(self) -> Iterator[int]:
        # The iterator refers to this object and not the other way round: a loop that is left early drops
        # it at once, and with it the pages.
        steps, self._steps = self._steps, None
        if steps is None:
            raise RuntimeError("a generation is iterated over once; ask the engine for another one")
        return steps(self)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from the store."""
        return 0 if self.prefill is None else self.prefill.cached_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were computed."""
        return 0 if self.prefill is None else self.prefill.computed_tokens

    def run(self) -> list[int]:
        """Generate to the end; returns all tokens."""
        for _ in self:
            pass
        return self.tokens


class LocalEngine:
    """Prefill and decode in one process, one request at a time, with a store of computed prompts.

    Args:
        model: Weights.
        kv: Pages, where the model is; made for the longest sequence, at most 8,192 tokens, if not given.
        store: Where the blocks of prompts are kept; an own in-memory store if not given.
        store_nbytes: Size of that one.
        model_name: Name in the identity of the blocks.
        revision: Of the weights; empty means not given.
        scope: Adapter and salt of the blocks.
        block_tokens: Tokens of a block, if ``kv`` is not given.
        chunk_tokens: Tokens of a prompt computed in one pass.
        takes_lossy: Whether blocks of the store that have lost something are used: answers may differ.
    """

    def __init__(
        self,
        model: Model,
        *,
        kv: PagedKV | None = None,
        store: BlockStore | None = None,
        store_nbytes: int | None = None,
        model_name: str = "local",
        revision: str = "",
        scope: KeyScope = KeyScope(),  # noqa: B008 (frozen)
        block_tokens: int = 16,
        chunk_tokens: int = 512,
        takes_lossy: bool = False,
    ) -> None:
        self._own_kv = kv is None
        if kv is None:
            longest = min(model.max_model_len, _DEFAULT_KV_TOKENS)
            kv = PagedKV(
                model.config,
                num_blocks=-(-longest // block_tokens),
                block_tokens=block_tokens,
                dtype=model.dtype,
                device=None if model.device.type == "cpu" else open_device(str(model.device)),
            )
        self.model, self.kv, self._chunk_tokens = model, kv, chunk_tokens
        self._own_store = store is None
        self._store = MemoryStore(store_nbytes or kv.nbytes) if store is None else store
        spec = kv.spec(model_name, revision)
        self._namespace = self._store.namespace(spec, scope, takes_lossy=takes_lossy)

    def generate(
        self,
        tokens: Tokens,
        sampling: SamplingParams,
        *,
        should_stop: Callable[[], bool] | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Start a generation; nothing is computed before its first token is asked for.

        Iterating raises what :func:`~kvferry.engine.prefill.prefill` raises, and ``CapacityError`` if the
        pages do not hold the prompt and the answer. Its pages are given back when it ends, fails or is
        dropped.

        Raises:
            RequestError: For sampling parameters that have no meaning.
        """
        check_sampling(sampling)
        until = deadline_in(_DEFAULT_TIMEOUT_S) if deadline is None else deadline
        return Generation(lambda generation: self._steps(generation, tokens, sampling, should_stop, until))

    def _steps(
        self,
        generation: Generation,
        tokens: Tokens,
        sampling: SamplingParams,
        should_stop: Callable[[], bool] | None,
        deadline: float,
    ) -> Iterator[int]:
        generation.prefill = result = prefill(
            self.model,
            self.kv,
            tokens,
            sampling,
            namespace=self._namespace,
            chunk_tokens=self._chunk_tokens,
            should_stop=should_stop,
            deadline=deadline,
            save=False,
        )
        sequence = result.sequence
        try:
            # The last token drawn is never put in.
            sequence.grow(min(len(tokens) + sampling.max_tokens - 1, self.model.max_model_len))
            decode = DecodeSequence(self.model, sequence, result.first_token, result.sampler, sampling)
            generation.first_token_at = time.monotonic()
            token: int | None = result.first_token
            while token is not None:
                generation.tokens.append(token)
                generation.finish_reason = decode.finish_reason
                yield token
                if len(generation.tokens) == 1:  # as in a split deployment, token 0 does not wait for it
                    until = min(deadline, deadline_in(SAVE_WAIT_S))
                    keys = self._namespace.keys(tokens)
                    save_blocks(self._namespace, sequence, keys, deadline=until, lossy=result.lossy)
                if should_stop is not None and should_stop():
                    raise RequestCancelledError(
                        f"generation was cancelled after {len(generation.tokens)} tokens"
                    )
                if is_past(deadline):
                    raise TransferTimeoutError(
                        f"generation was not done by its deadline, after {len(generation.tokens)} tokens"
                    )
                token = decode.step()
        finally:
            sequence.release()

    def close(self) -> None:
        """Close the engine's own pages and store; those that were given stay open."""
        if self._own_kv:
            self.kv.close()
        if self._own_store:
            self._store.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
