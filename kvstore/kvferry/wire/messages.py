"""The messages of the wire protocol: tagged ``msgspec`` structs, encoded as MessagePack.

Fields are added at the end with a default and never change their meaning, so that versions N and N−1
understand each other. Bulk bytes never travel in a message: they are the frame's payload.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvferry.core.spec import KeyScope, KVSpec

__all__ = [
    "AbortStream",
    "BeginStream",
    "Cancel",
    "Describe",
    "Description",
    "Failure",
    "FinishStream",
    "Finished",
    "Generate",
    "GenerateReady",
    "Handoff",
    "Hello",
    "LayerAck",
    "Message",
    "Ping",
    "Pong",
    "Prefill",
    "PrefillDone",
    "PutLayer",
    "RngState",
    "SamplingParams",
    "Status",
    "StatusReport",
    "StreamDone",
    "StreamReady",
    "TokensOut",
    "Welcome",
]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """Base of all messages."""


# ---- connection ------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First message of the connecting side.

    ``sent_at`` is its monotonic clock, from which the other side estimates the offset of the clocks.
    """

    min_version: int
    max_version: int
    session: str
    role: str = ""
    capabilities: tuple[str, ...] = ()
    credential: bytes | None = None
    checksum: bool = True
    sent_at: float = 0.0


class Welcome(Message, frozen=True, tag="welcome"):
    """Answer to :class:`Hello`; ``checksum`` is on unless both sides asked for off."""

    version: int
    session: str
    epoch: str
    role: str = ""
    capabilities: tuple[str, ...] = ()
    checksum: bool = True
    received_at: float = 0.0
    sent_at: float = 0.0


class Failure(Message, frozen=True, tag="failure"):
    """The request failed; ``code`` is that of a :class:`kvferry.core.errors.KVFerryError`."""

    code: str
    message: str
    retryable: bool = False


class Ping(Message, frozen=True, tag="ping"):
    """Asks for a :class:`Pong`."""


class Pong(Message, frozen=True, tag="pong"):
    """Answers a :class:`Ping` with the peer's monotonic clock."""

    at: float = 0.0


# ---- what prefill hands to decode ------------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class RngState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the Philox4x64-10 generator: key and counter, and draws left in its buffer."""

    key: tuple[int, int]
    counter: tuple[int, int, int, int]
    buffer: tuple[int, int, int, int]
    buffer_pos: int


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """What decode needs beside the KV to go on from token 0 without the prompt.

    ``started_at`` and ``kv_written_at`` are on the clock of the prefill worker.
    """

    prompt_tokens: int
    cached_tokens: int
    first_token: int
    sampling: SamplingParams
    rng: RngState | None = None
    started_at: float = 0.0
    kv_written_at: float = 0.0


# ---- layer streaming -------------------------------------------------------------------------


class BeginStream(Message, frozen=True, tag="begin_stream"):
    """Opens a stream of KV: the whole spec, the keys of the full blocks (32 bytes each), the tail.

    Blocks of a stream are numbered along the chain; block ``len(keys) / 32`` is the partial tail
    block of ``tail_tokens`` tokens, if there are any.
    """

    stream: str
    spec: KVSpec
    keys: bytes
    tail_tokens: int
    scope: KeyScope = KeyScope()
    timeout_s: float = 60.0


class StreamReady(Message, frozen=True, tag="stream_ready"):
    """The receiver holds slots for ``missing`` (block numbers); it holds the other blocks already.

    ``ring`` is how many layer frames may be under way unacknowledged.
    """

    missing: tuple[int, ...]
    ring: int = 8


class PutLayer(Message, frozen=True, tag="put_layer"):
    """Payload: the layer slices of ``blocks`` in order, each whole and padded.

    The tail block sends only its ``tail_tokens`` rows of each tensor, unpadded.
    """

    layer: int
    blocks: tuple[int, ...]


class LayerAck(Message, frozen=True, tag="layer_ack"):
    """``count`` more layer frames are in place at the receiver."""

    count: int = 1


class FinishStream(Message, frozen=True, tag="finish_stream"):
    """All layers of all missing blocks were sent."""

    handoff: Handoff


class StreamDone(Message, frozen=True, tag="stream_done"):
    """All KV is in place and published. ``wire_s`` is the receiver's busy time on the wire."""

    stored_blocks: int
    kv_nbytes: int
    wire_s: float
    complete_at: float = 0.0


class AbortStream(Message, frozen=True, tag="abort_stream"):
    """The sender gives up; nothing of the stream becomes visible."""

    reason: str = ""


# ---- engine: gateway and workers -------------------------------------------------------------


class Describe(Message, frozen=True, tag="describe"):
    """Asks a worker what it serves."""


class Description(Message, frozen=True, tag="description"):
    """What a worker serves, so that a gateway refuses a pair that does not fit before any request."""

    role: str
    model: str
    revision: str
    spec: KVSpec
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    kv_address: str = ""
    running: int = 0
    queued: int = 0
    max_prompt_tokens: int = 0


class Prefill(Message, frozen=True, tag="prefill"):
    """Gateway → prefill: compute ``tokens`` (payload: u32 little-endian), stream KV to ``kv_address``."""

    request: str
    stream: str
    kv_address: str
    sampling: SamplingParams
    scope: KeyScope = KeyScope()
    timeout_s: float = 60.0


class PrefillDone(Message, frozen=True, tag="prefill_done"):
    """Prefill → gateway: all KV was taken over by decode. Times are on the worker's clock."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    first_token: int
    started_at: float
    kv_written_at: float
    wire_s: float
    kv_nbytes: int


class Generate(Message, frozen=True, tag="generate"):
    """Gateway → decode: expect ``stream`` and generate from it.

    ``timeout_s`` bounds the whole generation, ``kv_timeout_s`` the time until all KV is there.
    """

    request: str
    stream: str
    prompt_tokens: int
    sampling: SamplingParams
    timeout_s: float = 60.0
    kv_timeout_s: float = 60.0
    scope: KeyScope = KeyScope()


class GenerateReady(Message, frozen=True, tag="generate_ready"):
    """Decode → gateway: admitted; KV is expected at ``kv_address``."""

    kv_address: str


class TokensOut(Message, frozen=True, tag="tokens"):
    """Decode → gateway: the next tokens, the first of them number ``index``."""

    index: int
    token_ids: tuple[int, ...]


class Finished(Message, frozen=True, tag="finished"):
    """Decode → gateway: the end of a generation. Times are on the worker's clock.

    ``reason`` is ``stop`` (a stop token), ``length``, or ``cancelled`` (asked for by the gateway).
    """

    reason: str
    generated_tokens: int
    kv_complete_at: float
    first_token_at: float
    kv_nbytes: int
    wire_s: float
    finished_at: float = 0.0


class Cancel(Message, frozen=True, tag="cancel"):
    """Gateway → worker: stop the request of this connection.

    Decode answers with :class:`Finished` of reason ``cancelled`` if generation had begun, else both
    workers answer with :class:`Failure` of code ``cancelled``.
    """


class Status(Message, frozen=True, tag="status"):
    """Asks a worker how it stands."""


class StatusReport(Message, frozen=True, tag="status_report"):
    """How a worker stands: paged KV blocks, requests, and its in-memory store.

    ``waiting`` counts requests that were taken but do not run yet, ``streams`` the KV streams open.
    """

    role: str
    free_blocks: int
    total_blocks: int
    running: int = 0
    waiting: int = 0
    streams: int = 0
    draining: bool = False
    store_entries: int = 0
    store_used_nbytes: int = 0
    store_capacity_nbytes: int = 0
    store_pinned_nbytes: int = 0
    store_quarantined_nbytes: int = 0
    store_leases: int = 0


AnyMessage: TypeAlias = (
    Hello
    | Welcome
    | Failure
    | Ping
    | Pong
    | BeginStream
    | StreamReady
    | PutLayer
    | LayerAck
    | FinishStream
    | StreamDone
    | AbortStream
    | Describe
    | Description
    | Prefill
    | PrefillDone
    | Generate
    | GenerateReady
    | TokensOut
    | Finished
    | Cancel
    | Status
    | StatusReport
)
