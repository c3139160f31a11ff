"""The choice of a codec as Prometheus metrics."""

from __future__ import annotations

from kvferry.codecs.choice import CandidateStatus, ChoiceStatus
from kvferry.core.metrics import Metrics
from kvferry.streaming import StreamCodec
from kvferry.streaming.metrics import CodecMetrics, stream_codec_metrics

CHOICE = ChoiceStatus(
    chosen="ebp",
    reason="",
    link_rate=5e8,
    candidates=(CandidateStatus("raw", 1.0, 0.0, 0.0, 2.0), CandidateStatus("ebp", 1.42, 2e9, 3e9, 1.41)),
    switches=3,
)


def test_every_figure_of_a_choice_has_a_name_and_a_help_text() -> None:
    metrics = Metrics()
    metrics.add(CodecMetrics(lambda: [("tcp://p:1", "tcp://d:2", CHOICE)]))
    link = {"worker": "tcp://p:1", "link": "tcp://d:2"}
    found = {
        "chosen": [0.0, 1.0],
        "ratio": [1.0, 1.42],
        "encode_bytes_per_second": [None, 2e9],
        "decode_bytes_per_second": [None, 3e9],
        "predicted_seconds_per_gigabyte": [2.0, 1.41],
    }
    for name, values in found.items():
        got = [metrics.value(f"kvferry_stream_codec_{name}", **link, codec=codec) for codec in ("raw", "ebp")]
        assert got == values, name
    assert metrics.value("kvferry_stream_codec_switches_total", **link) == 3
    assert metrics.value("kvferry_stream_codec_link_bytes_per_second", **link) == 5e8
    text = metrics.render().decode()
    assert text.count("# HELP kvferry_stream_codec_") == 7
    assert "# TYPE kvferry_stream_codec_switches_total counter" in text


def test_own_streams_have_an_empty_worker() -> None:
    metrics, codec = Metrics(), StreamCodec("ebp")
    metrics.add(stream_codec_metrics(codec))
    assert metrics.value("kvferry_stream_codec_chosen", worker="", link="tcp://d:2", codec="raw") is None
    codec.link("tcp://d:2")
    assert metrics.value("kvferry_stream_codec_chosen", worker="", link="tcp://d:2", codec="raw") == 1
