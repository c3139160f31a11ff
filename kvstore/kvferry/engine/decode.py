"""Decode: one token a step, from KV that is in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from kvferry.engine.model import Model
    from kvferry.engine.paged_kv import Sequence
    from kvferry.engine.sampling import Sampler
    from kvferry.wire.messages import SamplingParams

__all__ = ["DecodeSequence", "FinishReason"]

FinishReason: TypeAlias = Literal["stop", "length"]


class DecodeSequence:
    """One request's generation behind its prompt. Owned by one thread at a time.

    Args:
        model: Weights.
        sequence: Holds the KV of the whole prompt; stays the caller's, who releases it.
        first_token: Token 0, drawn by prefill, whose KV is computed by the first step.
        sampler: Stands after drawing token 0.
        params: Length and stop tokens.
    """

    def __init__(
        self, model: Model, sequence: Sequence, first_token: int, sampler: Sampler, params: SamplingParams
    ) -> None:
        self._model, self._sequence, self._sampler, self._params = model, sequence, sampler, params
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= set(model.config.eos_token_ids)
        self._stops = frozenset(stops)
        self.tokens = [first_token]
        self.finish_reason: FinishReason | None = self._finished()

    def step(self) -> int | None:
        """Draw the next token, or return ``None`` once :attr:`finish_reason` is set.

        A stop token is returned like any other and is the last. :attr:`tokens` has all of them, token 0
        first. Takes a page when the last one is full, unless the caller has grown the sequence before.

        Raises:
            CapacityError: If there is no page to take; the step may be tried again.
        """
        if self.finish_reason is not None:
            return None
        self._sequence.grow(self._sequence.length + 1)
        logits = self._model.forward(torch.tensor(self.tokens[-1:]), self._sequence)
        if logits is None:
            raise RuntimeError("the model gave no logits")
        token = self._sampler.draw(logits)
        self.tokens.append(token)
        self.finish_reason = self._finished()
        return token

    def _finished(self) -> FinishReason | None:
        if self.tokens[-1] in self._stops:
            return "stop"
        full = self._sequence.length >= self._model.max_model_len  # no room to put the last token in
        return "length" if full or len(self.tokens) >= self._params.max_tokens else None
