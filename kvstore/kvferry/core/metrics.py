"""Prometheus metrics with stable names, in a registry of their own.

An engine that embeds kvferry has metrics of its own in the process-wide registry; these never mix with them,
and two components in one process (as in tests) do not share counters.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.core.errors import ConfigError

__all__ = ["CONTENT_TYPE", "NBYTES_BUCKETS", "SECONDS_BUCKETS", "Metrics"]

C = TypeVar("C", bound=MetricWrapperBase)

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The HTTP content type of :meth:`Metrics.render`."""

SECONDS_BUCKETS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
"""From half a millisecond (a round trip) to a minute (a long prefill)."""

NBYTES_BUCKETS = tuple(float(4**n) for n in range(6, 18))
"""From 4 KiB to 16 GiB in steps of four."""

_NAME = re.compile(r"kvferry(?:_[a-z0-9]+)+")
_LABEL = re.compile(r"[a-z][a-z0-9_]*")


class Metrics:
    """The metrics of one component.

    Asking twice for the same metric gives the same object, so the places that count need not pass it around.
    Thread safe.

    Args:
        process: Whether to add memory, CPU time and open files of this process (``process_…``).
    """

    def __init__(self, *, process: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._known: dict[str, tuple[MetricWrapperBase, tuple[object, ...]]] = {}
        if process:
            ProcessCollector(registry=self._registry)

    def counter(self, name: str, description: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows.

        Args:
            name: ``kvferry_…_total``, for sizes ``…_bytes_total``, for times ``…_seconds_total``.
            description: The HELP text: what is counted, in one sentence.
            labels: Label names; their values must be few, never a key, a peer's own word or a secret.

        Raises:
            ConfigError: For a name that breaks the rules, or one that is taken with another meaning.
        """
        if not name.endswith("_total"):
            raise ConfigError(f"metric {name}: a counter's name ends in _total")
        return self._get(Counter, name, description, labels)

    def gauge(self, name: str, description: str, labels: Sequence[str] = ()) -> Gauge:
        """A number that goes up and down; as :meth:`counter`, but without ``_total``."""
        if name.endswith("_total"):
            raise ConfigError(f"metric {name}: only a counter's name ends in _total")
        return self._get(Gauge, name, description, labels)

    def histogram(
        self,
        name: str,
        description: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> Histogram:
        """A distribution; the name ends in its unit, ``_seconds`` or ``_bytes`` or what is counted."""
        with self._lock:
            return self._find(Histogram, name, description, labels, tuple(buckets)) or self._add(
                Histogram(name, description, labels, registry=self._registry, buckets=buckets),
                (name, description, tuple(labels), tuple(buckets)),
            )

    def _get(self, kind: type[C], name: str, description: str, labels: Sequence[str]) -> C:
        with self._lock:
            return self._find(kind, name, description, labels, ()) or self._add(
                kind(name, description, labels, registry=self._registry),
                (name, description, tuple(labels), ()),
            )

    def _find(
        self, kind: type[C], name: str, description: str, labels: Sequence[str], buckets: tuple[float, ...]
    ) -> C | None:
        """The metric if it is known, after all checks; the caller holds the lock."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"metric {name}: names are kvferry_ and small letters, digits and underscores")
        if not description:
            raise ConfigError(f"metric {name}: needs a description")
        for label in labels:
            if not _LABEL.fullmatch(label):
                raise ConfigError(f"metric {name}: {label!r} is no label name")
        found, definition = self._known.get(name, (None, ()))
        if found is None:
            return None
        if not isinstance(found, kind) or definition != (name, description, tuple(labels), buckets):
            raise ConfigError(f"metric {name}: is already defined in another way")
        return found

    def _add(self, metric: C, definition: tuple[object, ...]) -> C:
        self._known[str(definition[0])] = (metric, definition)
        return metric

    def add(self, collector: Collector) -> None:
        """Families that are made whenever metrics are rendered, of what is counted elsewhere.

        Args:
            collector: Its names follow the rules of the other methods, and are not taken.
        """
        self._registry.register(collector)

    def value(self, name: str, **labels: str) -> float | None:
        """The present value of one sample, for tests and status pages; ``None`` if there is none yet.

        Args:
            name: That of a counter or gauge, or of a histogram with ``_count`` or ``_sum`` behind it.
            **labels: All labels of the sample.
        """
        return self._registry.get_sample_value(name, labels)

    def render(self) -> bytes:
        """All metrics in the text format of Prometheus, of type :data:`CONTENT_TYPE`."""
        return generate_latest(_WithoutCreated(self._registry))


class _WithoutCreated(Collector):
    """A registry without the ``_created`` series: a gauge more for every counter, which nobody asks for.

    The library's own switch is one for the whole process, which belongs to the engine that embeds us.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """All metrics, each as a copy."""
        for metric in self._registry.collect():
            kept = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            kept.samples = [s for s in metric.samples if s.name != f"{metric.name}_created"]
            yield kept
