"""The gateway process: uvicorn in front of the router."""

from __future__ import annotations

import logging
import os
import socket

from kvferry.core.config import Config
from kvferry.core.http_port import HttpServer
from kvferry.engine.gateway.fleet import Fleet
from kvferry.engine.gateway.http import HttpLimits, create_app
from kvferry.engine.gateway.metrics import GatewayMetrics
from kvferry.engine.gateway.model import open_model
from kvferry.engine.gateway.router import Router, TimeLimits
from kvferry.engine.pools import ChannelPools
from kvferry.engine.process import StopSignal, print_ready
from kvferry.streaming.metrics import CodecMetrics
from kvferry.wire import ChannelOptions

__all__ = ["make_router", "serve"]

log = logging.getLogger(__name__)

_ROLE = "gateway"
_ANSWER_S = 3.0
"""For the last answers to leave after requests were cancelled."""


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
    gateway = config.gateway
    server = HttpServer(
        gateway.listen,
        "--listen (gateway.listen)",
        name="gateway-http",
        default_port=8400,
        trusted_network=config.wire.trusted_network,
    )
    router = make_router(config)
    metrics = GatewayMetrics()
    links = router.fleet.codec_links
    metrics.metrics.add(CodecMetrics(lambda: ((worker, link.address, link) for worker, link in links())))
    router.fleet.start()
    server.start(
        create_app(router, HttpLimits(max_body_nbytes=gateway.max_body), metrics),
        drain_s=gateway.drain + _ANSWER_S,
    )
    print_ready(_ROLE, listen=server.url, pid=os.getpid())
    try:
        stop.wait(server.is_alive)
    finally:
        server.stop()
        server.join(gateway.drain)
        router.close()  # requests that still run are answered with an error, not cut off
        server.join(2 * _ANSWER_S)
        server.close()
