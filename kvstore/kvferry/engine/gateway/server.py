"""The gateway process: uvicorn in front of the router."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from kvferry.core.address import Address, parse_url
from kvferry.core.config import Config
from kvferry.core.errors import ConfigError
from kvferry.engine.gateway.fleet import Fleet
from kvferry.engine.gateway.http import HttpLimits, create_app
from kvferry.engine.gateway.metrics import GatewayMetrics
from kvferry.engine.gateway.model import open_model
from kvferry.engine.gateway.router import Router, TimeLimits
from kvferry.engine.pools import ChannelPools
from kvferry.engine.process import StopSignal, print_ready, require_loopback
from kvferry.streaming.metrics import CodecMetrics
from kvferry.wire import ChannelOptions

__all__ = ["make_router", "serve"]

log = logging.getLogger(__name__)

_ROLE = "gateway"
_BACKLOG = 256
_ANSWER_S = 3.0
"""For the last answers to leave after requests were cancelled."""


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling, which would end the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not used: see :meth:`capture_signals`."""


def make_router(config: Config) -> Router:
    """The router of a configuration; its fleet is not started yet.

    Raises:
        ConfigError: If the model's folder does not exist.
    """
    model = open_model(config)
    gateway, wire = config.gateway, config.wire
    options = ChannelOptions(
        role=_ROLE,
        session=f"{_ROLE}-{socket.gethostname()}-{os.getpid()}",
        checksum=wire.checksum,
        hello_timeout_s=min(wire.hello_timeout, gateway.connect_timeout),
        max_meta_nbytes=wire.max_meta,
        max_payload_nbytes=wire.max_payload,
    )
    pools = ChannelPools(options)
    fleet = Fleet(
        gateway.prefill,
        gateway.decode,
        pools,
        connect_timeout_s=gateway.connect_timeout,
        refusal=None if model is None else model.refusal,
    )
    limits = TimeLimits(
        gateway.connect_timeout, gateway.queue_timeout, gateway.prefill_timeout, gateway.total_timeout
    )
    return Router(fleet, pools, model=model, limits=limits, max_in_flight=gateway.max_in_flight)


def serve(config: Config, stop: StopSignal) -> None:
    """Serve until a signal asks to stop.

    Raises:
        ConfigError: If the address cannot be bound, or the model's folder does not exist.
    """
    address = parse_url(config.gateway.listen, default_scheme="http", default_port=8400)
    require_loopback(address.url, "--listen (gateway.listen)", trusted_network=config.wire.trusted_network)
    bound = _bind(address)
    router = make_router(config)
    limits = HttpLimits(max_body_nbytes=config.gateway.max_body)
    metrics = GatewayMetrics()
    links = router.fleet.codec_links
    metrics.metrics.add(CodecMetrics(lambda: ((worker, link.address, link) for worker, link in links())))
    server = _Server(
        uvicorn.Config(
            create_app(router, limits, metrics),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=math.ceil(config.gateway.drain + _ANSWER_S),
        )
    )
    thread = threading.Thread(target=server.run, args=([bound],), name="kvferry-gateway-http", daemon=True)
    router.fleet.start()
    thread.start()
    print_ready(_ROLE, listen=_url(address, bound), pid=os.getpid())
    try:
        stop.wait(thread.is_alive)
    finally:
        server.should_exit = True
        thread.join(config.gateway.drain)
        router.close()  # requests that still run are answered with an error, not cut off
        thread.join(2 * _ANSWER_S)
        bound.close()


def _bind(address: Address) -> socket.socket:
    """A listening socket, made here so that the real port is known and a taken one has a clear error."""
    if address.scheme != "http" or address.port is None:
        raise ConfigError(f"gateway.listen is {address.url}, must be http://host:port")
    try:
        family, kind, number, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, number)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address.url}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {address.url}: {error.strerror or error}; choose another address with "
            "--listen (gateway.listen)"
        ) from error
    return bound


def _url(address: Address, bound: socket.socket) -> str:
    return Address("http", address.host, bound.getsockname()[1]).url
