"""What both workers are made of: the model with its memory, a port, and answers about itself."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from kvferry.core.clock import deadline_in
from kvferry.core.config import Config
from kvferry.core.errors import (
    CapacityError,
    ConfigError,
    ConnectError,
    DeviceError,
    RequestError,
    UnknownPluginError,
)
from kvferry.core.memory import MemoryStore
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.device import Device, open_device
from kvferry.engine.config import ModelConfig
from kvferry.engine.device_link import DeviceLink
from kvferry.engine.model import Model
from kvferry.engine.model_folder import KNOWN_MODELS, resolve_model_folder
from kvferry.engine.paged_kv import PagedKV, Sequence
from kvferry.engine.process import listening, require_loopback
from kvferry.engine.weights import load_model, revision
from kvferry.store import open_store
from kvferry.store.device import PoolOptions
from kvferry.streaming import STREAM_CAPABILITIES, STREAM_WINDOWS, StreamCodec, codec_capabilities
from kvferry.transports import RegionTransport, recent_choices, region_registry, require_scheme
from kvferry.transports import registry as transports
from kvferry.transports.choices import uses
from kvferry.wire import Channel, ChannelOptions, ChannelServer, Incoming
from kvferry.wire.link_status import CodecCandidate, CodecLink
from kvferry.wire.messages import Description, SamplingParams, StatusReport

__all__ = [
    "SEND_TIMEOUT_S",
    "Engine",
    "channel_options",
    "check_lengths",
    "listen",
    "load_engine",
    "open_regions",
    "stream_codec",
]

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0
"""For a small message to a peer that reads."""

_WARM_UP_SCOPE = KeyScope(salt=b"kvferry warm-up")
_WARM_UP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Engine:
    """A loaded model with its paged KV and the store of what was computed or received."""

    config: Config
    model: Model
    shape: ModelConfig
    kv: PagedKV
    store: MemoryStore
    spec: KVSpec
    max_model_len: int
    link: DeviceLink | None = None
    """Between paged KV on a device and streams; ``None`` where it is on the host."""

    def close(self) -> None:
        """End its memory and its store, when nobody uses them any more."""
        if self.link is not None:
            self.link.close()
        self.kv.close()
        self.store.close()

    def description(
        self, role: str, *, kv_address: str = "", running: int = 0, queued: int = 0
    ) -> Description:
        """What this worker serves."""
        return Description(
            role=role,
            model=self.spec.model,
            revision=self.spec.revision,
            spec=self.spec,
            vocab_size=self.shape.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.shape.eos_token_ids,
            kv_address=kv_address,
            running=running,
            queued=queued,
            max_prompt_tokens=self.max_model_len - 1,
        )

    def status(
        self,
        role: str,
        *,
        running: int,
        waiting: int,
        draining: bool,
        streams: int = 0,
        streams_nbytes: int = 0,
        servers: tuple[ChannelServer, ...] = (),
        codec: StreamCodec | None = None,
    ) -> StatusReport:
        """How this worker stands."""
        stats = self.store.stats()
        choices = {url: str(choice) for url, choice in recent_choices().items()}
        connections = sum((server.transports() for server in servers), Counter[str]())
        return StatusReport(
            role=role,
            free_blocks=self.kv.free_blocks,
            total_blocks=self.kv.num_blocks,
            running=running,
            waiting=waiting,
            streams=streams,
            draining=draining,
            store_entries=stats.entries,
            store_used_nbytes=stats.used_nbytes,
            store_capacity_nbytes=stats.capacity_nbytes,
            store_pinned_nbytes=stats.pinned_nbytes,
            store_quarantined_nbytes=stats.quarantined_nbytes,
            store_leases=stats.leases,
            streams_nbytes=streams_nbytes,
            choices=choices | uses(),
            connections=dict(connections) if choices else {},
            stream_codec="" if codec is None else codec.describe(),
            codec_links=() if codec is None else _codec_links(codec),
        )

    def takes_lossy(self, codec: StreamCodec) -> bool:
        """Whether this worker's reader takes what has lost something: its streams or its own tiers may."""
        return codec.accepts_lossy or self.store.allows_lossy

    def use_threads(self) -> None:
        """Give the calling thread, the model's, the number of threads that is configured."""
        if self.config.model.threads is not None:
            torch.set_num_threads(self.config.model.threads)

    def warm_up(self) -> None:
        """Pay now what the first request would pay: first passes of the model, memory of the store.

        For the model's thread, before it is said that the worker is ready.
        """
        self.use_threads()
        sequence = Sequence.allocate(self.kv, min(2 * self.kv.block_tokens, self.max_model_len))
        try:
            tokens = torch.zeros(sequence.capacity_tokens - 1, dtype=torch.int64)
            self.model.forward(tokens, sequence)
            self.model.forward(tokens[:1], sequence)
        finally:
            sequence.release()
        namespace = self.store.namespace(self.spec, _WARM_UP_SCOPE)
        key = namespace.keys([0] * self.kv.block_tokens)
        with contextlib.suppress(CapacityError):  # too small for a block: requests will say so
            namespace.reserve(key, parent=None, deadline=deadline_in(_WARM_UP_TIMEOUT_S)).abort()


def _codec_links(codec: StreamCodec) -> tuple[CodecLink, ...]:
    return tuple(
        CodecLink(
            address=address,
            chosen=choice.chosen,
            link_rate=choice.link_rate,
            switches=choice.switches,
            candidates=tuple(CodecCandidate(**dataclasses.asdict(one)) for one in choice.candidates),
        )
        for address, choice in codec.choices().items()
    )


def load_engine(config: Config) -> Engine:
    """Load the model of ``config.model`` and allocate its memory.

    Raises:
        ConfigError: Without a model, with one that cannot be run, or memory that does not fit it.
    """
    if not config.model.path:
        raise ConfigError("no model given: use --model DIR (model.path)")
    path = resolve_model_folder(config.model.path, log.info)
    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    device = _device(config)
    model = load_model(path, config.model.dtype)
    if device is not None:
        model = model.to(device.name)
    known = KNOWN_MODELS.get(config.model.path)
    name = config.model.name or known or path.resolve().name  # after loading: a loop of links has no name
    found = revision(path) if config.model.revision == "auto" else config.model.revision
    if not found:
        log.warning("model %s has no revision: entries are keyed by name only", name)
    kv = _paged_kv(config, model, device)
    limit = _max_model_len(config, model.config, kv)
    spec = kv.spec(name, found)
    store = open_store(config.store)  # last: it may have threads and files, which only its close() ends
    link = None if kv.on_host else DeviceLink(kv)
    return Engine(config, model, model.config, kv, store, spec, limit, link)


def _device(config: Config) -> Device | None:
    """Where the model computes; ``None``: on the host."""
    if config.model.device == "cpu":
        return None
    try:
        return open_device(config.model.device)
    except (ConfigError, DeviceError) as error:
        raise ConfigError(f"model.device is {config.model.device!r}: {error}; cpu always works") from error


def _paged_kv(config: Config, model: Model, device: Device | None) -> PagedKV:
    shape, block_tokens = model.config, config.model.block_tokens
    one = PagedKV(shape, num_blocks=1, block_tokens=block_tokens, dtype=model.dtype).nbytes
    num_blocks = config.kv.num_blocks or config.kv.memory // one
    if num_blocks < 1:
        raise ConfigError(f"kv.memory is {config.kv.memory} bytes, one block of this model needs {one}")
    return PagedKV(
        shape,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        dtype=model.dtype,
        device=device,
        keep_prefixes=config.kv.keep_prefixes,
        options=PoolOptions(write="commit"),  # others of the store wait for them
    )


def _max_model_len(config: Config, shape: ModelConfig, kv: PagedKV) -> int:
    room = kv.num_blocks * kv.block_tokens
    asked = config.model.max_model_len
    if asked is None:
        if room < shape.max_position_embeddings:
            log.warning(
                "paged KV has room for %d tokens, the model for %d: the limit is %d; kv.memory raises it",
                room,
                shape.max_position_embeddings,
                room,
            )
        return min(room, shape.max_position_embeddings)
    if asked > shape.max_position_embeddings:
        raise ConfigError(
            f"model.max_model_len is {asked}, the model has positions for {shape.max_position_embeddings}"
        )
    if asked > room:
        raise ConfigError(
            f"model.max_model_len is {asked}, paged KV has room for {room} tokens: raise kv.memory"
        )
    return asked


def open_regions(config: Config) -> RegionTransport | None:
    """The endpoint of the region transport that is configured; ``None`` if there is none.

    Raises:
        ConfigError: If it does not exist, lacks a library, or trusts nobody.
        TransportError: If it does not start.
    """
    stream = config.stream
    if not stream.regions:
        return None
    if not stream.trusted_peers:
        raise ConfigError(
            f"stream.regions={stream.regions} needs stream.trusted_peers: name the hosts or networks of the "
            "other workers"
        )
    make = cast("Callable[..., RegionTransport]", region_registry.load(stream.regions))
    return make(trusted_peers=stream.trusted_peers, host=stream.region_host, wire=stream.region_wire)


def channel_options(config: Config, role: str) -> ChannelOptions:
    """What this process says of itself on every connection."""
    regions = (f"{STREAM_WINDOWS}:{config.stream.regions}",) if config.stream.regions else ()
    wire = config.wire
    session = f"{role}-{socket.gethostname()}-{threading.get_native_id()}-{time.time_ns():x}"
    return ChannelOptions(
        role=role,
        session=session,
        checksum=wire.checksum,
        hello_timeout_s=wire.hello_timeout,
        max_meta_nbytes=wire.max_meta,
        max_payload_nbytes=wire.max_payload,
        capabilities=STREAM_CAPABILITIES + codec_capabilities() + regions,
    )


def stream_codec(config: Config) -> StreamCodec:
    """The codec of this worker's streams; what is lossy is said in one line.

    Raises:
        ConfigError: If ``stream.codec`` is none.
    """
    try:
        codec = StreamCodec(config.stream.codec, allow_lossy=config.stream.allow_lossy)
    except ConfigError as error:
        raise ConfigError(f"stream.codec is {config.stream.codec!r}: {error}") from error
    if line := codec.lossy_line():
        log.warning("%s", line)
    return codec


def listen(
    url: str, option: str, config: Config, role: str, handler: Callable[[Channel], None], *, name: str
) -> ChannelServer:
    """A port of this worker.

    Raises:
        ConfigError: If it is taken, cannot be bound, or is open to other hosts without leave: names the
            address and the option that moves it.
    """
    require_scheme(url, option)
    require_loopback(url, option, trusted_network=config.wire.trusted_network)
    try:
        return ChannelServer(
            url,
            channel_options(config, role),
            handler,
            name=name,
            max_connections=config.wire.max_connections,
            idle_timeout_s=config.wire.idle_timeout,
        )
    except ConnectError as error:
        raise listening(error, url, option) from error
    except UnknownPluginError as error:
        schemes = ", ".join(f"{name}://" for name in transports.names() if name != "inproc")
        raise ConfigError(
            f"{url} ({option}): no transport has this scheme; a {role} worker listens on {schemes}"
        ) from error


def check_lengths(prompt_tokens: int, sampling: SamplingParams, limit: int) -> None:
    """Refuse a request that can never fit.

    Raises:
        RequestError: With the length and the limit.
    """
    if prompt_tokens < 1 or sampling.max_tokens < 1:
        raise RequestError(
            f"a request needs a prompt and a token to generate, got {prompt_tokens} and {sampling.max_tokens}"
        )
    if prompt_tokens + sampling.max_tokens > limit:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {sampling.max_tokens}, together "
            f"{prompt_tokens + sampling.max_tokens}: over the limit of {limit} (max_model_len)"
        )


def answer(channel: Channel, incoming: Incoming, message: Description | StatusReport) -> None:
    """Send a small answer."""
    channel.reply(incoming, message, deadline=deadline_in(SEND_TIMEOUT_S))
