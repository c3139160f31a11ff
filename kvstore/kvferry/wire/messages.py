"""The messages of the wire protocol: tagged ``msgspec`` structs, encoded as MessagePack.

Fields are added at the end with a default and never change their meaning, so that versions N and N−1
understand each other. Bulk bytes never travel in a message: they are the frame's payload.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from kvferry.core.errors import ConfigError, KVFerryError
from kvferry.core.keys import KEY_NBYTES
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.wire.link_status import CodecLink
from kvferry.wire.spec_check import check_spec

__all__ = [
    "AbortStream",
    "ArenaSegments",
    "AttachArena",
    "BeginStream",
    "Cancel",
    "Describe",
    "Description",
    "EncodedAck",
    "Failure",
    "FinishStream",
    "Finished",
    "Generate",
    "GenerateReady",
    "Handoff",
    "Hello",
    "LayerAck",
    "LayerPlaced",
    "Message",
    "Ping",
    "PlacedSlot",
    "Pong",
    "Prefill",
    "PrefillDone",
    "PutEncoded",
    "PutLayer",
    "RngState",
    "SamplingParams",
    "SharedSegment",
    "Status",
    "StatusReport",
    "StreamDone",
    "StreamReady",
    "StreamSlots",
    "StreamWindows",
    "TokensOut",
    "Welcome",
]


# Checked when a peer's message is decoded; not a number and infinity are refused with the rest.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Word: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""64 bits without sign."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""A time left may be negative: it is over."""
Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""A reading of a monotonic clock."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """Base of all messages."""


# ---- connection ------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First message of the connecting side.

    ``sent_at`` is its monotonic clock, from which the other side estimates the offset of the clocks.
    """

    min_version: Count
    max_version: Count
    session: str
    role: str = ""
    capabilities: tuple[str, ...] = ()
    credential: bytes | None = None
    checksum: bool = True
    sent_at: Moment = 0.0

    def __repr__(self) -> str:  # the credential must not get into a log by way of an f-string
        return (
            f"Hello(versions={self.min_version}..{self.max_version}, session={self.session!r}, "
            f"role={self.role!r}, credential={'***' if self.credential is not None else None})"
        )


class Welcome(Message, frozen=True, tag="welcome"):
    """Answer to :class:`Hello`; ``checksum`` is on unless both sides asked for off."""

    version: Count
    session: str
    epoch: str
    role: str = ""
    capabilities: tuple[str, ...] = ()
    checksum: bool = True
    received_at: Moment = 0.0
    sent_at: Moment = 0.0


class Failure(Message, frozen=True, tag="failure"):
    """The request failed; ``code`` is that of a :class:`kvferry.core.errors.KVFerryError`."""

    code: str
    message: str
    retryable: bool = False

    @classmethod
    def of(cls, error: KVFerryError) -> Failure:
        """What tells the peer of ``error``."""
        return cls(code=error.code, message=str(error)[:4000], retryable=error.retryable)


class Ping(Message, frozen=True, tag="ping"):
    """Asks for a :class:`Pong`."""


class Pong(Message, frozen=True, tag="pong"):
    """Answers a :class:`Ping` with the peer's monotonic clock."""

    at: Moment = 0.0


# ---- what prefill hands to decode ------------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

    max_tokens: Count = 16
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    top_k: Count = 0
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    seed: int | None = None
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False


class RngState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the Philox4x64-10 generator: key and counter, and draws left in its buffer."""

    key: tuple[Word, Word]
    counter: tuple[Word, Word, Word, Word]
    buffer: tuple[Word, Word, Word, Word]
    buffer_pos: Annotated[int, msgspec.Meta(ge=0, le=4)]


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """What decode needs beside the KV to go on from token 0 without the prompt.

    ``started_at`` and ``kv_written_at`` are on the clock of the prefill worker.
    """

    prompt_tokens: Count
    cached_tokens: Count
    first_token: TokenId
    sampling: SamplingParams
    rng: RngState | None = None
    started_at: Moment = 0.0
    kv_written_at: Moment = 0.0


# ---- layer streaming -------------------------------------------------------------------------


class BeginStream(Message, frozen=True, tag="begin_stream"):
    """Opens a stream of KV: the whole spec, the keys of the full blocks (32 bytes each), the tail.

    Blocks of a stream are numbered along the chain; block ``len(keys) / 32`` is the partial tail
    block of ``tail_tokens`` tokens, if there are any. ``codecs`` are the pipelines, in their text form, by
    which slices may be encoded (:class:`PutEncoded`), if any. With ``tells_lossy`` the sender heeds
    :attr:`StreamReady.takes_lossy`, and says at the end what has lost something.
    """

    stream: str
    spec: KVSpec
    keys: bytes
    tail_tokens: Count
    scope: KeyScope = KeyScope()
    timeout_s: Seconds = 60.0
    codecs: tuple[str, ...] = ()
    tells_lossy: bool | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_spec(self.spec)
        if len(self.keys) % KEY_NBYTES:
            raise ConfigError(f"keys of {len(self.keys)} bytes, each has {KEY_NBYTES}")
        if not 0 <= self.tail_tokens < self.spec.block_tokens:
            raise ConfigError(f"tail of {self.tail_tokens} tokens in blocks of {self.spec.block_tokens}")


class StreamReady(Message, frozen=True, tag="stream_ready"):
    """The receiver holds slots for ``missing`` (block numbers); it holds the other blocks already.

    ``ring`` is how many layer frames may be under way unacknowledged. Without ``takes_lossy`` the sender
    must send only KV that was computed from the tokens, not from blocks that have lost something.
    """

    missing: tuple[Count, ...]
    ring: Count = 8
    takes_lossy: bool | msgspec.UnsetType = msgspec.UNSET


class PutLayer(Message, frozen=True, tag="put_layer"):
    """Payload: the layer slices of ``blocks`` in order, each whole and padded.

    The tail block sends only its ``tail_tokens`` rows of each tensor, unpadded.
    """

    layer: Count
    blocks: tuple[Count, ...]


class LayerAck(Message, frozen=True, tag="layer_ack"):
    """``count`` more layer frames are in place at the receiver."""

    count: Count = 1


class FinishStream(Message, frozen=True, tag="finish_stream"):
    """All layers of all missing blocks were sent; ``wire_s`` is how long the sender was sending them.

    ``lossy`` are the numbers of the full blocks, missing or not, that are not what the tokens alone give:
    they had lost something at the sender, or were computed behind such a block.
    """

    handoff: Handoff
    wire_s: Seconds = 0.0
    lossy: tuple[Count, ...] | msgspec.UnsetType = msgspec.UNSET


class StreamDone(Message, frozen=True, tag="stream_done"):
    """All KV is in place and published. ``wire_s`` is the busy time on the wire, as the slower end saw it."""

    stored_blocks: Count
    kv_nbytes: Count
    wire_s: Seconds
    complete_at: Moment = 0.0


class AbortStream(Message, frozen=True, tag="abort_stream"):
    """The sender gives up; nothing of the stream becomes visible."""

    reason: str = ""


class PlacedSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Where one block of a stream lies in the receiver's arena."""

    block: Count
    segment: Count
    offset: Count
    generation: Word


class StreamSlots(Message, frozen=True, tag="stream_slots"):
    """Receiver → sender, before :class:`StreamReady`: the slots of missing blocks, which it may write itself.

    The segments were announced on this connection. From here on the receiver does not use the slots
    again before the sender's :class:`FinishStream` or :class:`AbortStream`, or the end of its process.
    """

    epoch: str
    slots: tuple[PlacedSlot, ...]


class LayerPlaced(Message, frozen=True, tag="layer_placed"):
    """In place of :class:`PutLayer`: the layer slices of ``blocks`` are written into their slots."""

    layer: Count
    blocks: tuple[Count, ...]


class PutEncoded(Message, frozen=True, tag="put_encoded"):
    """Payload: one frame of a codec pipeline that holds the layer slices of ``blocks``, in order.

    The tail block goes alone, as a slice of its ``tail_tokens`` rows of each tensor, padded to 64 bytes.
    """

    layer: Count
    blocks: tuple[Count, ...]


class EncodedAck(Message, frozen=True, tag="encoded_ack"):
    """A :class:`PutEncoded` was decoded into its slots, which took ``decode_s``; in the order of sending."""

    decode_s: Seconds = 0.0


class StreamWindows(Message, frozen=True, tag="stream_windows"):
    """Receiver → sender, before :class:`StreamReady`: windows of a region transport onto its slots.

    The sender may write them itself. They are closed when the stream ends, whatever the sender does.
    """

    transport: str
    grants: tuple[bytes, ...]
    slots: tuple[tuple[Count, Count, Count], ...]  # block, number of its window, offset in it


# ---- engine: gateway and workers -------------------------------------------------------------


class Describe(Message, frozen=True, tag="describe"):
    """Asks a worker what it serves."""


class Description(Message, frozen=True, tag="description"):
    """What a worker serves, so that a gateway refuses a pair that does not fit before any request."""

    role: str
    model: str
    revision: str
    spec: KVSpec
    vocab_size: Count
    max_model_len: Count
    eos_token_ids: tuple[TokenId, ...] = ()
    kv_address: str = ""
    running: Count = 0
    queued: Count = 0
    max_prompt_tokens: Count = 0

    def __post_init__(self) -> None:
        check_spec(self.spec)


class Prefill(Message, frozen=True, tag="prefill"):
    """Gateway → prefill: compute ``tokens`` (payload: u32 little-endian), stream KV to ``kv_address``."""

    request: str
    stream: str
    kv_address: str
    sampling: SamplingParams
    scope: KeyScope = KeyScope()
    timeout_s: Seconds = 60.0
    queue_timeout_s: Seconds = 60.0


class PrefillDone(Message, frozen=True, tag="prefill_done"):
    """Prefill → gateway: all KV was taken over by decode. Times are on the worker's clock."""

    prompt_tokens: Count
    cached_tokens: Count
    computed_tokens: Count
    first_token: TokenId
    started_at: Moment
    kv_written_at: Moment
    wire_s: Seconds
    kv_nbytes: Count


class Generate(Message, frozen=True, tag="generate"):
    """Gateway → decode: expect ``stream`` and generate from it.

    ``timeout_s`` bounds the whole generation, ``kv_timeout_s`` the time until all KV is there,
    ``queue_timeout_s`` the time until there is room.
    """

    request: str
    stream: str
    prompt_tokens: Count
    sampling: SamplingParams
    timeout_s: Seconds = 60.0
    kv_timeout_s: Seconds = 60.0
    scope: KeyScope = KeyScope()
    queue_timeout_s: Seconds = 60.0


class GenerateReady(Message, frozen=True, tag="generate_ready"):
    """Decode → gateway: admitted; KV is expected at ``kv_address``."""

    kv_address: str


class TokensOut(Message, frozen=True, tag="tokens"):
    """Decode → gateway: the next tokens, the first of them number ``index``."""

    index: Count
    token_ids: tuple[TokenId, ...]


class Finished(Message, frozen=True, tag="finished"):
    """Decode → gateway: the end of a generation. Times are on the worker's clock.

    ``cached_tokens``, ``prefill_started_at`` and ``kv_written_at`` are passed on from the handoff, the
    last two on the clock of the prefill worker.

    ``reason`` is ``stop`` (a stop token), ``length``, or ``cancelled`` (asked for by the gateway).
    """

    reason: str
    generated_tokens: Count
    kv_complete_at: Moment
    first_token_at: Moment
    kv_nbytes: Count
    wire_s: Seconds
    finished_at: Moment = 0.0
    cached_tokens: Count = 0
    prefill_started_at: Moment = 0.0
    kv_written_at: Moment = 0.0


class Cancel(Message, frozen=True, tag="cancel"):
    """Gateway → worker: stop the request of this connection.

    Decode answers with :class:`Finished` of reason ``cancelled`` if generation had begun, else both
    workers answer with :class:`Failure` of code ``cancelled``.
    """


class Status(Message, frozen=True, tag="status"):
    """Asks a worker how it stands."""


class StatusReport(Message, frozen=True, tag="status_report"):
    """How a worker stands: paged KV blocks, requests, and its in-memory store.

    ``waiting`` counts requests that were taken but do not run yet, ``streams`` the KV streams open, which
    have brought ``streams_nbytes`` so far. A worker that dials or listens on ``auto`` addresses also sends
    ``choices``, what was chosen for each of them and why (and how UCX is set, where it is in use), and
    ``connections``, how many peers are connected to its ports by transport.
    ``stream_codec`` says how streams are encoded, and why; ``codec_links`` has the figures behind it.
    """

    role: str
    free_blocks: Count
    total_blocks: Count
    running: Count = 0
    waiting: Count = 0
    streams: Count = 0
    draining: bool = False
    store_entries: Count = 0
    store_used_nbytes: Count = 0
    store_capacity_nbytes: Count = 0
    store_pinned_nbytes: Count = 0
    store_quarantined_nbytes: Count = 0
    store_leases: Count = 0
    streams_nbytes: Count = 0
    choices: dict[str, str] = {}
    connections: dict[str, Count] = {}
    stream_codec: str = ""
    codec_links: tuple[CodecLink, ...] = ()


# ---- shared memory ---------------------------------------------------------------------------


class AttachArena(Message, frozen=True, tag="attach_arena"):
    """Asks the owner of an arena for its segments; only over a connection that passes descriptors.

    ``known`` segments of ``epoch`` are mapped here already: the first ones, since segments are only added.
    """

    epoch: str = ""
    known: Count = 0


class SharedSegment(msgspec.Struct, frozen=True, kw_only=True):
    """Number and size of one segment."""

    segment: Count
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**48)]


class ArenaSegments(Message, frozen=True, tag="arena_segments"):
    """Owner → client: segments of its arena, asked for or because it has grown.

    The frame is followed by two descriptors a segment, in order: its data, its table of generations.
    ``first`` is the number of the first segment named here, ``total`` how many there are. ``writable``
    says whether the client may map the data so.
    """

    tenant: str
    epoch: str
    first: Count
    total: Count
    segments: tuple[SharedSegment, ...] = ()
    writable: bool = False


AnyMessage: TypeAlias = (
    Hello | Welcome | Failure | Ping | Pong | BeginStream | StreamReady | PutLayer | LayerAck
    | FinishStream | StreamDone | AbortStream | StreamSlots | LayerPlaced | PutEncoded | EncodedAck
    | StreamWindows | Describe | Description | Prefill | PrefillDone | Generate | GenerateReady
    | TokensOut | Finished | Cancel | Status | StatusReport | AttachArena | ArenaSegments
)  # fmt: skip
