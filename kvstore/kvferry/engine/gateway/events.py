"""What the router reports of a running request, and what the HTTP side asks of the router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvferry.core.errors import KVFerryError
from kvferry.engine.gateway.request import CompletionRequest, ServedModel
from kvferry.engine.gateway.timing import Marks

__all__ = ["Done", "Event", "Failed", "OnEvent", "RequestRouter", "Run", "Tokens"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next tokens; the first of them is number ``index`` of the answer."""

    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The request ended well.

    Attributes:
        reason: ``stop``, ``length``, or ``cancelled`` after :meth:`Run.stop`.
        marks: Moments up to token 0, on the gateway's clock; ``token_sent`` is when the router had it.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those of them whose KV the prefill worker had.
        computed_tokens: Those that it computed.
        generated_tokens: Tokens of the answer.
        kv_nbytes: Bytes of KV that moved from prefill to decode.
        wire_s: Seconds in which the wire was busy with them.
    """

    reason: str
    marks: Marks
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    kv_nbytes: int
    wire_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed; nothing follows."""

    error: KVFerryError


Event: TypeAlias = Tokens | Done | Failed
OnEvent: TypeAlias = Callable[[Event], None]


class Run(Protocol):
    """A request under way. Methods may be called from any thread, more than once, and never block."""

    def stop(self) -> None:
        """Enough text: end generation; :class:`Done` follows."""
        ...

    def cancel(self) -> None:
        """Nobody wants the answer: end the request on both workers; no event is needed any more."""
        ...


class RequestRouter(Protocol):
    """What the HTTP side needs: the router, or a fake of it."""

    def served(self) -> ServedModel:
        """What can be asked for.

        Raises:
            NoWorkerError: If no matching pair of workers is up; the message says why.
        """
        ...

    def submit(self, request: CompletionRequest, arrived: float, on_event: OnEvent) -> Run:
        """Start a request; ``on_event`` is called from the router's threads and must not block.

        Raises:
            OverloadedError: If as many requests as allowed are under way.
            NoWorkerError: If no matching pair of workers is up.
        """
        ...
