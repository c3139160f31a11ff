"""The answer to a completion request as it grows, in the shape of the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvferry.engine.gateway.events import Done
from kvferry.engine.gateway.request import CompletionRequest, ServedModel
from kvferry.engine.gateway.stop import StopText
from kvferry.engine.gateway.timing import (
    TimeToFirstToken,
    overlap,
    time_to_first_token,
    transfer_rate,
    with_token_sent,
)

__all__ = ["Answer"]


class Answer:
    """Collects tokens and text of one request and writes the bodies that go to the client.

    Not thread safe. ``token_sent_at`` is set by the caller once token 0 has left.
    """

    def __init__(self, request: CompletionRequest, served: ServedModel) -> None:
        self._request = request
        self.id = request.id
        self._text = served.tokenizer.stream() if served.tokenizer is not None else None
        self._stop = StopText(request.stop)
        self._head = {
            "id": request.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }
        self.token_ids: list[int] = []
        self.text = ""
        self.token_sent_at: float | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.stopped

    def add(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; returns the text that can be shown now."""
        self.token_ids.extend(token_ids)
        if self._text is None:
            return ""
        return self._shown(self._stop.push("".join(map(self._text.push, token_ids))))

    def finish(self) -> str:
        """The last text, held back until now."""
        if self._text is None:
            return ""
        return self._shown(self._stop.push(self._text.finish()) + self._stop.finish())

    def _shown(self, text: str) -> str:
        self.text += text
        return text

    def timing(self, done: Done) -> TimeToFirstToken:
        """Where the time to the first token went."""
        marks = done.marks
        if self.token_sent_at is not None:
            marks = with_token_sent(marks, self.token_sent_at)
        return time_to_first_token(marks)

    def chunk(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """One event of a stream."""
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        return {**self._head, "choices": [{**choice, "token_ids": list(token_ids)}]}

    def last_chunk(self, text: str, done: Done) -> dict[str, Any]:
        """The last event before the end of a stream: why it ended, usage and figures."""
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": self._reason(done)}
        return {**self._head, "choices": [{**choice, "token_ids": []}], **self._figures(done)}

    def body(self, done: Done) -> dict[str, Any]:
        """The whole answer, for a request that does not stream."""
        choice = {"index": 0, "text": self.text, "logprobs": None, "finish_reason": self._reason(done)}
        return {**self._head, "choices": [choice], **self._figures(done)}

    def _reason(self, done: Done) -> str:
        return "stop" if self.stopped else done.reason

    def _figures(self, done: Done) -> dict[str, Any]:
        ttft = self.timing(done)
        generated = len(self.token_ids)
        return {
            "usage": {
                "prompt_tokens": done.prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": done.prompt_tokens + generated,
                "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
            },
            "kvferry": {
                "ttft_s": ttft.as_dict(),
                "kv_nbytes": done.kv_nbytes,
                "wire_s": done.wire_s,
                "transfer_gb_per_s": transfer_rate(done.kv_nbytes, done.wire_s),
                "overlap": overlap(ttft.transfer_exposed, done.wire_s),
                "computed_tokens": done.computed_tokens,
                "cached_tokens": done.cached_tokens,
                "generated_tokens": generated,
                "token_ids": list(self.token_ids),
            },
        }
