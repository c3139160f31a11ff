"""The choice of a codec for each link, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.streaming.codec import StreamCodec

__all__ = ["CodecMetrics", "ShownCandidate", "ShownChoice", "stream_codec_metrics"]

_PREFIX: Final = "kvferry_stream_codec"
_OF_CANDIDATES: Final = {
    "ratio": ("ratio", "Bytes of KV before encoding over bytes after it."),
    "encode_rate": ("encode_bytes_per_second", "KV that one thread encodes, as measured on the traffic."),
    "decode_rate": ("decode_bytes_per_second", "KV that one thread of the other end decodes, as it reports."),
    "predicted_s_per_gb": (
        "predicted_seconds_per_gigabyte",
        "Time that 1e9 bytes of KV are predicted to take this way.",
    ),
}


class ShownCandidate(Protocol):
    """What is shown of one way to send; as :class:`~kvferry.codecs.choice.CandidateStatus`."""

    @property
    def name(self) -> str:
        """A pipeline, or ``raw``."""
        ...

    @property
    def ratio(self) -> float:
        """Before over after."""
        ...

    @property
    def encode_rate(self) -> float:
        """Bytes a second; 0 while unknown, as the others."""
        ...

    @property
    def decode_rate(self) -> float:
        """Bytes a second."""
        ...

    @property
    def predicted_s_per_gb(self) -> float:
        """Seconds."""
        ...


class ShownChoice(Protocol):
    """What is shown of one link; as :class:`~kvferry.codecs.choice.ChoiceStatus`."""

    @property
    def chosen(self) -> str:
        """The pipeline in use."""
        ...

    @property
    def link_rate(self) -> float:
        """Bytes a second; 0 while unknown."""
        ...

    @property
    def switches(self) -> int:
        """Changes of the choice."""
        ...

    @property
    def candidates(self) -> Sequence[ShownCandidate]:
        """All ways."""
        ...


class CodecMetrics(Collector):
    """Reads the choices anew whenever metrics are rendered; for :meth:`kvferry.core.metrics.Metrics.add`.

    Args:
        choices: Gives worker (empty: this process), address of the link and choice, of each link.
    """

    def __init__(self, choices: Callable[[], Iterable[tuple[str, str, ShownChoice]]]) -> None:
        self._choices = choices

    def collect(self) -> Iterator[Metric]:
        """One family a figure; what is not known yet is left out."""
        labels = ["worker", "link", "codec"]
        chosen = GaugeMetricFamily(
            f"{_PREFIX}_chosen", "1 for the codec that KV sent over the link goes through now.", labels=labels
        )
        link_rate = GaugeMetricFamily(
            f"{_PREFIX}_link_bytes_per_second",
            "Bytes that the link carries, as measured on what was sent raw.",
            labels=labels[:2],
        )
        switches = CounterMetricFamily(
            f"{_PREFIX}_switches_total", "Changes of the choice of a codec.", labels=labels[:2]
        )
        figures = {
            name: GaugeMetricFamily(f"{_PREFIX}_{suffix}", text, labels=labels)
            for name, (suffix, text) in _OF_CANDIDATES.items()
        }
        for worker, address, choice in self._choices():
            where = [worker, address]
            for name in dict.fromkeys([*(one.name for one in choice.candidates), choice.chosen]):
                chosen.add_metric([*where, name], float(name == choice.chosen))
            if choice.link_rate:
                link_rate.add_metric(where, choice.link_rate)
            switches.add_metric(where, choice.switches)
            for one in choice.candidates:
                for name, family in figures.items():
                    if value := float(getattr(one, name)):
                        family.add_metric([*where, one.name], value)
        yield from (chosen, link_rate, switches, *figures.values())


def stream_codec_metrics(codec: StreamCodec) -> CodecMetrics:
    """The choices of this process's own streams."""
    return CodecMetrics(lambda: (("", address, status) for address, status in codec.choices().items()))
