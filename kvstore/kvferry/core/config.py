"""The configuration of every part of kvferry, as one tree.

Values come from the defaults here, a TOML file, the environment and flags, the later over the earlier
(:func:`load_config`). Unknown keys are errors that name the nearest one. To add a field, write it in its
section: an annotation, a safe default, bounds and a description.

Import this module only where the configuration is used: it brings pydantic.
"""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from kvferry.core.address import same_place
from kvferry.core.config_tiers import TierConfig
from kvferry.core.config_types import Kind, Nbytes, Policy, Seconds, Section, Url
from kvferry.core.errors import ConfigError
from kvferry.core.trusted_peers import TrustedPeers

__all__ = [
    "Config",
    "DaemonConfig",
    "DecodeConfig",
    "GatewayConfig",
    "KVConfig",
    "LogConfig",
    "ModelConfig",
    "PrefillConfig",
    "StoreConfig",
    "StreamConfig",
    "TierConfig",
    "WireConfig",
]

_KIB, _MIB, _GIB, _TIB = 2**10, 2**20, 2**30, 2**40
_DAY = 86400.0


class LogConfig(Section):
    """Log lines, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The lowest level that is written."
    )
    format: Literal["text", "json"] = Field(
        default="text", description="Lines for people, or a JSON object each."
    )


class WireConfig(Section):
    """Connections between kvferry processes."""

    checksum: bool = Field(
        default=True, description="Whether payloads carry a checksum; off only if both sides agree."
    )
    hello_timeout: Seconds = Field(
        default=5.0, ge=0.05, le=300, description="For the handshake of a connection."
    )
    idle_timeout: Seconds = Field(
        default=600.0, ge=1, le=7 * _DAY, description="After which a connection without traffic is closed."
    )
    max_meta: Nbytes = Field(
        default=4 * _MIB, ge=4 * _KIB, le=256 * _MIB, description="The largest message, without payload."
    )
    max_payload: Nbytes = Field(
        default=4 * _GIB, ge=4 * _KIB, le=64 * _GIB, description="The largest payload of a message."
    )
    max_connections: int = Field(
        default=256, ge=1, le=65536, description="Connections served at once by one listener."
    )
    trusted_network: bool = Field(
        default=False,
        description="Whether addresses beyond loopback may be used without credentials or without TLS.",
    )


class StreamConfig(Section):
    """Layers streamed from prefill to decode."""

    ring: int = Field(
        default=8, ge=1, le=1024, description="Layers in flight before the sender waits for the receiver."
    )
    timeout: Seconds = Field(
        default=60.0, ge=0.1, le=3600, description="For the transfer of one prompt's KV."
    )
    codec: str = Field(
        default="raw",
        min_length=1,
        max_length=200,
        description="How KV is encoded on its way: raw, auto (by the link), or a pipeline such as ebp.",
    )
    allow_lossy: bool = Field(
        default=False,
        description="Whether auto may take lossy codecs, and decode accepts them; a lossy codec implies it.",
    )
    regions: str = Field(
        default="",
        max_length=64,
        description="Region transport that prefill writes into decode's memory with: mooncake.",
    )
    trusted_peers: tuple[str, ...] = Field(
        default=(),
        max_length=1024,
        description="Hosts and networks that windows are opened to, and whose windows are written.",
    )
    region_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        max_length=255,
        description="Where peers reach the region transport.",
    )
    region_wire: Literal["tcp", "rdma"] = Field(
        default="tcp", description="What the region transport moves bytes over."
    )

    @field_validator("trusted_peers")
    @classmethod
    def _hosts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return TrustedPeers(names).names


class StoreConfig(Section):
    """Blocks kept for reuse."""

    dram_capacity: Nbytes = Field(
        default=1 * _GIB, ge=1 * _MIB, le=64 * _TIB, description="Host memory for blocks."
    )
    lease: Seconds = Field(
        default=30.0, ge=0.1, le=3600, description="How long a reader or writer may hold a block."
    )
    write_quota: Annotated[int | None, Kind.SIZE] = Field(
        default=None,
        ge=1 * _MIB,
        le=64 * _TIB,
        description="Memory that one session may have reserved; all of it if none.",
    )
    eviction: Annotated[str, Policy("eviction")] = Field(
        default="lru", min_length=1, max_length=64, description="What memory evicts first: lru or s3fifo."
    )
    low_watermark: float = Field(
        default=0.85, ge=0, le=1, description="Share of memory at which eviction in the background ends."
    )
    high_watermark: float = Field(
        default=1.0, ge=0, le=1, description="Share of memory at which it begins; at 1 there is none."
    )
    hugepages: bool = Field(
        default=False, description="Memory from the kernel's pool of 2 MiB pages (vm.nr_hugepages)."
    )
    numa_node: int | None = Field(
        default=None, ge=0, le=1023, description="Node that the memory lies on; as the kernel likes if none."
    )
    prefetch_jobs: int = Field(
        default=256, ge=1, le=65536, description="Prefetches waiting before further ones are dropped."
    )
    close_timeout: Seconds = Field(
        default=10.0, ge=0, le=3600, description="For writing what is on its way to slower tiers at the end."
    )
    tiers: tuple[TierConfig, ...] = Field(
        default=(), max_length=8, description="Slower tiers, fastest first; text is kind:path?option=value."
    )

    @field_validator("high_watermark")
    @classmethod
    def _above_low(cls, high: float, info: ValidationInfo) -> float:
        low = float(info.data.get("low_watermark", 0))  # not there if it is wrong itself
        if low > high or low == high < 1:
            raise ConfigError(
                f"must be above low_watermark, which is {low:g}: eviction in the background goes from the "
                "high one down to the low one"
            )
        return high

    @field_validator("tiers")
    @classmethod
    def _apart(cls, tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        names = ["dram", *(tier.name or tier.kind for tier in tiers)]
        if len(set(names)) < len(names):
            raise ConfigError(f"tiers need different names, got {', '.join(names)}; give one of them a name")
        for name in names:
            if not name.isprintable():
                raise ConfigError(f"a tier is called {name!r}: take characters that can be printed")
        return tiers


class ModelConfig(Section):
    """The model that the reference engine runs."""

    path: str | None = Field(default=None, max_length=4096, description="Folder of the checkpoint.")
    name: str | None = Field(
        default=None, max_length=256, description="Its name in keys and answers; the folder's if none."
    )
    revision: str = Field(
        default="auto",
        max_length=256,
        description="Its revision in keys; auto: a hash of its files; empty: not given, keyed by name only.",
    )
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        default="float32", description="What the model computes in."
    )
    device: str = Field(
        default="cpu",
        max_length=64,
        description="Where it computes and its paged KV lies: cpu, or a device such as musa:0 or cuda.",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="Threads of the model; all cores if none."
    )
    block_tokens: int = Field(default=16, ge=1, le=4096, description="Tokens of one block.")
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=16 * _MIB,
        description="Longest prompt and answer in tokens; the model's own limit if none.",
    )


class KVConfig(Section):
    """The engine's own paged KV memory."""

    memory: Nbytes = Field(default=1 * _GIB, ge=1 * _MIB, le=64 * _TIB, description="Memory for paged KV.")
    num_blocks: int | None = Field(
        default=None, ge=1, le=2**31, description="Blocks of paged KV; from kv.memory if none."
    )
    keep_prefixes: bool = Field(
        default=False,
        description="Keep prompts in paged KV after their requests, shared with those that follow.",
    )


class PrefillConfig(Section):
    """The prefill worker."""

    listen: Annotated[str, Url(8410)] = Field(
        default="tcp://127.0.0.1:8410", description="Where it takes requests."
    )
    chunk_tokens: int = Field(default=512, ge=1, le=_MIB, description="Tokens computed at once.")
    max_queue: int = Field(default=64, ge=1, le=65536, description="Requests waiting before one is refused.")
    drain: Seconds = Field(
        default=3.0, ge=0.1, le=3600, description="For requests under way to end when it is stopped."
    )


class DecodeConfig(Section):
    """The decode worker."""

    listen: Annotated[str, Url(8430)] = Field(
        default="tcp://127.0.0.1:8430", description="Where it takes requests."
    )
    kv_listen: Annotated[str | None, Url(0)] = Field(
        default=None,
        description="Where it takes KV; a free port beside decode.listen if none (unix: its path with .kv).",
    )

    @field_validator("kv_listen")
    @classmethod
    def _elsewhere(cls, url: str | None, info: ValidationInfo) -> str | None:
        listen = info.data.get("listen")  # not there if it is wrong itself
        if url is not None and listen is not None and same_place(url, listen):
            raise ConfigError(
                f"{url} (--kv-listen) is the place where decode.listen (--listen) takes requests already: "
                "take another port or path for one of the two"
            )
        return url

    max_running: int = Field(default=16, ge=1, le=4096, description="Requests decoded side by side.")
    max_queue: int = Field(default=64, ge=1, le=65536, description="Requests waiting before one is refused.")
    drain: Seconds = Field(
        default=3.0, ge=0.1, le=3600, description="For requests under way to end when it is stopped."
    )


class GatewayConfig(Section):
    """The HTTP gateway."""

    listen: Annotated[str, Url(8400, "http")] = Field(
        default="http://127.0.0.1:8400", description="Where it takes requests."
    )
    prefill: Annotated[tuple[str, ...], Url(8410)] = Field(
        default=("tcp://127.0.0.1:8410",), min_length=1, max_length=1024, description="The prefill workers."
    )
    decode: Annotated[tuple[str, ...], Url(8430)] = Field(
        default=("tcp://127.0.0.1:8430",), min_length=1, max_length=1024, description="The decode workers."
    )
    connect_timeout: Seconds = Field(default=5.0, ge=0.05, le=300, description="For reaching a worker.")
    queue_timeout: Seconds = Field(
        default=60.0, ge=0.1, le=3600, description="How long a request may wait for a worker."
    )
    prefill_timeout: Seconds = Field(
        default=300.0, ge=0.1, le=_DAY, description="Until the decode worker holds all KV of a request."
    )
    total_timeout: Seconds = Field(
        default=600.0, ge=0.1, le=_DAY, description="How long a request may take in all."
    )
    max_in_flight: int = Field(
        default=256, ge=1, le=65536, description="Requests at once before one is refused."
    )
    max_body: Nbytes = Field(
        default=8 * _MIB, ge=1 * _KIB, le=1 * _GIB, description="The largest request body."
    )
    drain: Seconds = Field(
        default=3.0, ge=0.1, le=3600, description="For requests under way to end when it is stopped."
    )


class DaemonConfig(Section):
    """The cache daemon of a node; its blocks are in the section ``store``."""

    listen: Annotated[tuple[str, ...] | None, Url(8450)] = Field(
        default=("tcp://127.0.0.1:8450",),
        min_length=1,
        max_length=16,
        description="Where it takes clients, beside its socket.",
    )
    socket: str = Field(
        default="auto",
        min_length=1,
        max_length=107,
        description="Path of its socket for this machine: auto (in $XDG_RUNTIME_DIR/kvferry), or none.",
    )
    arena: Literal["shared", "copy"] = Field(
        default="shared",
        description="Whether clients of this machine write blocks into its memory, or only read there.",
    )
    disk: str = Field(
        default="auto",
        min_length=1,
        max_length=4096,
        description="Folder of a disk tier where store.tiers is empty: auto (in the cache folder), or none.",
    )
    disk_capacity: Nbytes = Field(
        default=16 * _GIB, ge=1 * _MIB, le=1024 * _TIB, description="What daemon.disk may take."
    )
    drain: Seconds = Field(
        default=10.0, ge=0.1, le=3600, description="For what is under way to end when it is stopped."
    )
    http: Annotated[str | None, Url(8451, "http")] = Field(
        default="http://127.0.0.1:8451",
        description="Where it serves status, metrics and the live page, or none.",
    )
    token_file: str = Field(
        default="auto",
        min_length=1,
        max_length=4096,
        description="File with the token of admin requests: auto (beside the socket), or none.",
    )
    credentials: str = Field(
        default="none",
        min_length=1,
        max_length=4096,
        description="File of tenants and tokens, made by kvferry credentials; none: no token is needed.",
    )
    peer_tokens: str = Field(
        default="none",
        min_length=1,
        max_length=4096,
        description="Folder with TENANT.token, shown to peers for that tenant's blocks, or none.",
    )


class Config(Section):
    """The whole tree: one section a part."""

    log: LogConfig = Field(default_factory=LogConfig)
    wire: WireConfig = Field(default_factory=WireConfig)
    stream: StreamConfig = Field(default_factory=StreamConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    kv: KVConfig = Field(default_factory=KVConfig)
    prefill: PrefillConfig = Field(default_factory=PrefillConfig)
    decode: DecodeConfig = Field(default_factory=DecodeConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    daemon: DaemonConfig = Field(default_factory=DaemonConfig)
