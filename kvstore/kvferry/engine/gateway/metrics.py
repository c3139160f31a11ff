"""What the gateway counts."""

from __future__ import annotations

from kvferry.core.metrics import Metrics
from kvferry.engine.gateway.events import Done
from kvferry.engine.gateway.timing import TimeToFirstToken

__all__ = ["GatewayMetrics"]


class GatewayMetrics:
    """Counters and histograms of requests; thread safe."""

    def __init__(self) -> None:
        self.metrics = metrics = Metrics(process=True)
        self.requests = metrics.counter(
            "kvferry_gateway_requests_total",
            "Requests answered, by HTTP status (499: the client went away).",
            ["code"],
        )
        self.in_flight = metrics.gauge("kvferry_gateway_in_flight_requests", "Requests under way.")
        self._ttft = metrics.histogram(
            "kvferry_gateway_ttft_seconds", "Time to the first token: the total and its parts.", ["part"]
        )
        self._tokens = metrics.counter(
            "kvferry_gateway_tokens_total",
            "Tokens by kind: computed and cached prompt tokens, generated tokens.",
            ["kind"],
        )
        self._kv = metrics.counter(
            "kvferry_gateway_kv_bytes_total", "Bytes of KV moved from prefill to decode."
        )

    def observe(self, done: Done, ttft: TimeToFirstToken, generated_tokens: int) -> None:
        """Count one request that ended well."""
        for part, seconds in ttft.as_dict().items():
            self._ttft.labels(part=part).observe(seconds)
        self._tokens.labels(kind="computed").inc(done.computed_tokens)
        self._tokens.labels(kind="cached").inc(done.cached_tokens)
        self._tokens.labels(kind="generated").inc(generated_tokens)
        self._kv.inc(done.kv_nbytes)
