from __future__ import annotations

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.metrics import CONTENT_TYPE, NBYTES_BUCKETS, Metrics


def test_metrics_are_rendered_with_help_and_values() -> None:
    metrics = Metrics()
    metrics.counter("kvferry_blocks_saved_total", "Blocks newly stored.", ["tier"]).labels("dram").inc(3)
    metrics.gauge("kvferry_queue_depth", "Requests waiting.").set(2)
    metrics.histogram("kvferry_block_bytes", "Sizes of blocks.", buckets=NBYTES_BUCKETS).observe(5000)
    text = metrics.render().decode()
    assert "# HELP kvferry_blocks_saved_total Blocks newly stored." in text
    assert 'kvferry_blocks_saved_total{tier="dram"} 3.0' in text
    assert 'kvferry_block_bytes_bucket{le="16384.0"} 1.0' in text
    assert "process_" not in text
    assert CONTENT_TYPE.startswith("text/plain")
    assert metrics.value("kvferry_blocks_saved_total", tier="dram") == 3
    assert metrics.value("kvferry_blocks_saved_total", tier="disk") is None
    assert metrics.value("kvferry_queue_depth") == 2


def test_the_same_metric_is_one_object_and_two_components_share_nothing() -> None:
    one, two = Metrics(), Metrics(process=True)
    assert one.counter("kvferry_a_total", "A.") is one.counter("kvferry_a_total", "A.")
    assert one.histogram("kvferry_b_seconds", "B.") is one.histogram("kvferry_b_seconds", "B.")
    one.counter("kvferry_a_total", "A.").inc()
    two.counter("kvferry_a_total", "A.")
    assert two.value("kvferry_a_total") == 0
    assert b"process_" in two.render()


def test_names_and_meanings_are_checked() -> None:
    metrics = Metrics()
    metrics.gauge("kvferry_a", "A.", ["x"])
    metrics.histogram("kvferry_h_seconds", "H.")
    with pytest.raises(ConfigError, match="ends in _total"):
        metrics.counter("kvferry_a", "A.")
    with pytest.raises(ConfigError, match="only a counter"):
        metrics.gauge("kvferry_a_total", "A.")
    with pytest.raises(ConfigError, match="small letters"):
        metrics.gauge("other_name", "A.")
    with pytest.raises(ConfigError, match="needs a description"):
        metrics.gauge("kvferry_b", "")
    with pytest.raises(ConfigError, match="no label name"):
        metrics.gauge("kvferry_b", "B.", ["Bad-Label"])
    for wrong in (
        lambda: metrics.gauge("kvferry_a", "Something else.", ["x"]),
        lambda: metrics.gauge("kvferry_a", "A."),
        lambda: metrics.histogram("kvferry_a", "A.", ["x"]),
        lambda: metrics.histogram("kvferry_h_seconds", "H.", buckets=[1.0]),
    ):
        with pytest.raises(ConfigError, match="already defined in another way"):
            wrong()


def test_no_series_of_creation_times() -> None:
    metrics = Metrics()
    metrics.counter("kvferry_a_total", "A.", ["x"]).labels(x="1").inc()
    metrics.histogram("kvferry_b_seconds", "B.").observe(0.3)
    rendered = metrics.render().decode()
    assert "_created" not in rendered
    assert '# TYPE kvferry_a_total counter\nkvferry_a_total{x="1"} 1.0\n' in rendered
    assert "kvferry_b_seconds_sum 0.3\n" in rendered
    assert 'kvferry_b_seconds_bucket{le="+Inf"} 1.0\n' in rendered
