"""Drawing tokens: greedy, temperature, top-k, top-p, with a generator whose state can be handed on.

Each drawn token takes exactly one uniform number from a Philox generator, so the state after any token
is all that another process needs to draw the same tokens from there on.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.core.errors import KVFerryError, RequestError
from kvferry.wire.messages import RngState, SamplingParams

__all__ = ["Sampler", "check_sampling"]

_Float64 = npt.NDArray[np.float64]


def check_sampling(params: SamplingParams) -> None:
    """Refuse parameters that have no meaning.

    Raises:
        RequestError: Naming the field, its value and its range.
    """
    if params.max_tokens < 1:
        raise RequestError(f"max_tokens is {params.max_tokens}, must be at least 1")
    if not 0 <= params.temperature < math.inf:
        raise RequestError(f"temperature is {params.temperature}, must be a number from 0 (greedy) up")
    if params.top_k < 0:
        raise RequestError(f"top_k is {params.top_k}, must be 0 (off) or more")
    if not 0 < params.top_p <= 1:
        raise RequestError(f"top_p is {params.top_p}, must be above 0 and at most 1 (off)")


class Sampler:
    """Draws the tokens of one request, in order. Not thread safe.

    Args:
        params: How to draw.
        state: Where the generator stands, to go on from another sampler's :meth:`state`; ``None`` starts
            from ``params.seed``, or from the operating system's entropy if that is ``None``.

    Raises:
        RequestError: For parameters that have no meaning.
    """

    def __init__(self, params: SamplingParams, state: RngState | None = None) -> None:
        check_sampling(params)
        self.params = params
        self._rng: np.random.Philox | None = None
        if params.temperature > 0:
            # A seed may be negative (the HTTP interface allows any 64-bit integer), numpy's may not.
            self._rng = np.random.Philox(None if params.seed is None else params.seed % 2**64)
            if state is not None:
                self._rng.state = _to_numpy(state)

    def state(self) -> RngState | None:
        """Where the generator stands now; ``None`` if nothing is drawn at random (greedy)."""
        return None if self._rng is None else _from_numpy(self._rng.state)

    def draw(self, logits: torch.Tensor) -> int:
        """The next token, from logits over the vocabulary (``[vocab_size]``).

        Raises:
            KVFerryError: If the logits have no finite largest value: the model overflowed its dtype.
        """
        scores: _Float64 = logits.detach().cpu().to(torch.float64).numpy()
        best = int(scores.argmax())  # the first of equals; a NaN counts as the largest
        if not math.isfinite(scores[best]):
            raise KVFerryError(f"logits of the model are not finite ({scores[best]}); try dtype float32")
        if self._rng is None:
            return best
        with np.errstate(over="ignore"):  # a score far below the best, at a low temperature: never drawn
            scaled = (scores - scores[best]) / self.params.temperature
        return self._draw_at_random(scaled)

    def _draw_at_random(self, scores: _Float64) -> int:
        """By inversion of the distribution function, in float64, over candidates in a fixed order."""
        candidates: npt.NDArray[np.intp] | None = None
        top_k, top_p = self.params.top_k, self.params.top_p
        if 0 < top_k < len(scores) or top_p < 1:
            candidates = _descending(scores, top_k)
            scores = scores[candidates]
        cumulative = np.cumsum(np.exp(scores))
        if top_p < 1:
            kept = int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left")) + 1
            cumulative = cumulative[:kept]
        u = self._uniform() * cumulative[-1]
        # Rounding may put u on the last value itself: then the last candidate with any probability.
        last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
        index = min(int(np.searchsorted(cumulative, u, side="right")), last)
        return index if candidates is None else int(candidates[index])

    def _uniform(self) -> float:
        """One number in [0, 1), from the upper 53 bits of one output of the generator."""
        if self._rng is None:
            raise RuntimeError("a greedy sampler has no generator")
        return (int(self._rng.random_raw()) >> 11) * 2.0**-53


def _descending(scores: _Float64, top_k: int) -> npt.NDArray[np.intp]:
    """Indices by falling score, equals in rising order; only the ``top_k`` first, unless 0."""
    if not 0 < top_k < len(scores):
        return np.argsort(-scores, kind="stable")
    # Same result as sorting everything, but only what can be among the first k is sorted.
    threshold = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
    possible = np.flatnonzero(scores >= threshold)
    return possible[np.argsort(-scores[possible], kind="stable")][:top_k]


def _to_numpy(state: RngState) -> Any:  # noqa: ANN401 (numpy's type of it is private)
    if not 0 <= state.buffer_pos <= len(state.buffer):
        raise RequestError(
            f"generator state has buffer_pos {state.buffer_pos}, must lie in 0..{len(state.buffer)}"
        )
    words = (*state.key, *state.counter, *state.buffer)
    if any(not 0 <= word < 2**64 for word in words):
        raise RequestError("generator state holds a word outside 64 unsigned bits")
    return {
        "bit_generator": "Philox",
        "state": {"counter": np.array(state.counter, np.uint64), "key": np.array(state.key, np.uint64)},
        "buffer": np.array(state.buffer, np.uint64),
        "buffer_pos": state.buffer_pos,
        "has_uint32": 0,
        "uinteger": 0,
    }


def _from_numpy(state: Any) -> RngState:  # noqa: ANN401 (as above)
    inner = state["state"]
    key = [int(word) for word in inner["key"]]
    counter = [int(word) for word in inner["counter"]]
    buffer = [int(word) for word in state["buffer"]]
    return RngState(
        key=(key[0], key[1]),
        counter=(counter[0], counter[1], counter[2], counter[3]),
        buffer=(buffer[0], buffer[1], buffer[2], buffer[3]),
        buffer_pos=int(state["buffer_pos"]),
    )
