from __future__ import annotations

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import RequestCancelledError, RequestError
from kvferry.core.memory import MemoryStore
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, TensorSpec
from kvferry.engine.workers.streams import ExpectedStream, StreamTable
from kvferry.streaming import LayerReceiver
from kvferry.wire.messages import BeginStream

LAYER = LayerSpec(tuple(TensorSpec(name, (4, 1, 8), DType.FLOAT32) for name in ("k", "v")))
SPEC = KVSpec(model="m", revision="r", layers=(LAYER,), block_tokens=4)


@pytest.fixture
def table() -> StreamTable:
    return StreamTable(MemoryStore(1 << 20), SPEC, ring=2)


def expect(table: StreamTable, name: str = "s", tokens: int = 5) -> ExpectedStream:
    return table.expect(name, tokens, KeyScope(), deadline_in(20))


def test_a_name_is_expected_once_at_a_time(table: StreamTable) -> None:
    first = expect(table)
    with pytest.raises(RequestError, match="'s' is expected already"):
        expect(table)
    assert len(table) == 1
    table.forget(first)
    table.forget(expect(table))
    assert len(table) == 0


def test_a_stream_is_opened_once(table: StreamTable) -> None:
    expected = expect(table)
    expected.take()
    with pytest.raises(RequestError, match="opened before"):
        expected.take()


def test_waiting_ends_with_the_first_reason(table: StreamTable) -> None:
    expected = expect(table)
    assert expected.receiver(deadline_in(0.01)) is None
    expected.fail(RequestError("first"))
    expected.fail(RequestError("second"))
    with pytest.raises(RequestError, match="first"):
        expected.receiver(deadline_in(1))


def test_who_comes_after_the_end_is_sent_away(table: StreamTable) -> None:
    expected = expect(table)
    table.forget(expected)
    receiver = LayerReceiver.__new__(LayerReceiver)  # never used: it is refused
    with pytest.raises(RequestCancelledError, match="not wanted any more"):
        expected.attach(receiver)


def test_another_length_than_announced_is_refused(table: StreamTable) -> None:
    expected = expect(table, tokens=5)
    table._check(BeginStream(stream="s", spec=SPEC, keys=bytes(32), tail_tokens=1), expected)
    with pytest.raises(RequestError, match="brings KV of 6 tokens, not 5"):
        table._check(BeginStream(stream="s", spec=SPEC, keys=bytes(32), tail_tokens=2), expected)
