"""Prometheus metrics of the gateway, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.engine.gateway.events import Done
from kvferry.engine.gateway.timing import TimeToFirstToken

__all__ = ["GatewayMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """Counters and histograms of requests; thread safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry_gateway_requests",
            "Requests answered, by HTTP status (499: the client went away).",
            ["code"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvferry_gateway_in_flight_requests", "Requests under way.", registry=self.registry
        )
        self._ttft = Histogram(
            "kvferry_gateway_ttft_seconds",
            "Time to the first token: the total and its parts.",
            ["part"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._tokens = Counter(
            "kvferry_gateway_tokens",
            "Tokens by kind: computed and cached prompt tokens, generated tokens.",
            ["kind"],
            registry=self.registry,
        )
        self._kv = Counter(
            "kvferry_gateway_kv_bytes", "Bytes of KV moved from prefill to decode.", registry=self.registry
        )

    def observe(self, done: Done, ttft: TimeToFirstToken, generated_tokens: int) -> None:
        """Count one request that ended well."""
        for part, seconds in ttft.as_dict().items():
            self._ttft.labels(part=part).observe(seconds)
        self._tokens.labels(kind="computed").inc(done.computed_tokens)
        self._tokens.labels(kind="cached").inc(done.cached_tokens)
        self._tokens.labels(kind="generated").inc(generated_tokens)
        self._kv.inc(done.kv_nbytes)

    def exposition(self) -> bytes:
        """All samples in the text format."""
        return generate_latest(self.registry)
