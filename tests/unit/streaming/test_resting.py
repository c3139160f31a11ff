"""Parts where the choice rests on raw: they go like those of a link without a codec, until it may change."""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import cast

import pytest

from kvferry.codecs.adaptive import RAW
from kvferry.core import DType, KVSpec
from kvferry.streaming import StreamCodec, encoding
from kvferry.streaming.codec import FixedChoice
from kvferry.streaming.delivery import Delivery, LayerPart
from kvferry.streaming.encoding import PartEncoder
from kvferry.streaming.layout import StreamLayout
from kvferry.testing.prompt_kv import kv_spec
from kvferry.wire import Channel
from kvferry.wire.messages import LayerAck

SPEC = kv_spec(4, kv_heads=2, head_dim=32, dtype=DType.BFLOAT16)


class Choice(FixedChoice):
    """Raw; counts what it is asked, and what it is told."""

    def __init__(self) -> None:
        super().__init__(RAW, "")
        self.resting, self.until = True, -math.inf
        self.asked = self.told = 0

    @property
    def rests(self) -> bool:
        return self.resting

    @property
    def quiet_until(self) -> float:
        return self.until

    def choose(self) -> str:
        self.asked += 1
        return RAW

    def moved(self, name: str, nbytes: int, seconds: float) -> None:
        assert name == RAW
        self.told += nbytes


class Sender:
    """What a sender does with an encoder, in one thread."""

    def __init__(self, choice: Choice, spec: KVSpec = SPEC) -> None:
        self.ready: deque[LayerPart] = deque()
        lock = threading.RLock()
        link = StreamCodec("auto").link("somewhere")
        assert link is not None
        link._choice = choice
        self.encoder = PartEncoder(
            link, StreamLayout(spec, 4, 0), cast("Channel", None), lock, threading.Condition(lock),
            ready=self.ready, start=lambda _: pytest.fail("nothing is to be encoded"), failed=lambda _: None,
        )  # fmt: skip
        self.parts = [LayerPart(cast("Delivery", None), n, (0,), [], nbytes=1) for n in range(40)]
        self.encoder.put(self.parts)
        self.sent: list[LayerPart] = []

    def send(self, count: int) -> None:
        for _ in range(count):
            part = self.ready.popleft() if self.ready else self.encoder.pull()
            assert part is not None
            self.encoder.sending(part)
            self.sent.append(part)

    def answer(self, count: int) -> None:
        for _ in range(count):
            assert self.encoder.acknowledged(LayerAck(), 1)


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> Choice:
    monkeypatch.setattr(encoding, "_REPORT_S", 0.0)  # each piece that tells something is told at once
    return Choice()


def test_nothing_is_asked_while_the_choice_rests_and_what_waits_comes_back(choice: Choice) -> None:
    sender = Sender(choice)
    sender.send(12)
    assert choice.asked == 1
    assert len(sender.ready) == 28
    sender.answer(4)  # behind a pause, and behind something else
    assert choice.told == 0
    choice.resting = False
    sender.answer(1)
    assert choice.told == 1
    assert not sender.ready, "a choice is made for each part again"
    sender.send(20)
    assert choice.asked == 22, "and one more, whether anything is to come back"
    choice.resting = True
    sender.send(8)
    assert choice.asked == 23
    assert sender.sent == sender.parts, "in order"


def test_nothing_is_learnt_while_the_link_is_known(choice: Choice) -> None:
    choice.until = math.inf
    sender = Sender(choice)
    assert len(sender.ready) == 40
    sender.send(20)
    sender.answer(10)
    assert (choice.asked, choice.told) == (0, 0)
    choice.until = sender.encoder._quiet_until = -math.inf  # it is time
    sender.answer(1)
    assert not sender.ready
    sender.answer(9)
    sender.send(20)
    assert choice.asked == 1
    sender.answer(20)
    assert choice.told == 16
    assert sender.sent == sender.parts
    assert not sender.encoder.acknowledged(LayerAck(), 1), "nothing is under way"


def test_it_goes_on_without_learning_when_the_link_was_seen_to_be_the_same(choice: Choice) -> None:
    sender = Sender(choice)
    sender.send(20)
    choice.until = math.inf
    sender.answer(20)
    assert choice.told == 1
    sender.send(20)
    assert choice.asked == 1
    assert sender.encoder.acknowledged(LayerAck(), 20)
    assert choice.told == 1
    assert not sender.encoder.acknowledged(LayerAck(), 1)


def test_a_look_that_ends_with_a_part_kept_as_it_is_tells_of_the_others(choice: Choice) -> None:
    """Their bytes were left out, and their time was not: the link seemed slower than it is."""
    sender = Sender(choice)
    sender.send(20)
    sender.answer(20)
    before = choice.told
    sender.send(2)
    sender.encoder.sending(LayerPart(cast("Delivery", None), 0, (0,), [], codec=encoding._KEPT))
    sender.encoder._acks_a_look = 3
    sender.answer(3)
    assert choice.told == before + 2


@pytest.mark.parametrize(("seconds", "told"), [(0.0, 40 - 1 - 3), (3600.0, 40 - 1 - 16)])
def test_what_a_limited_link_saved_up_is_not_taken_for_its_rate(
    choice: Choice, monkeypatch: pytest.MonkeyPatch, seconds: float, told: int
) -> None:
    """The first pieces pass at once; of a short prompt no more than a quarter says nothing."""
    monkeypatch.setattr(encoding, "_SETTLE_S", seconds)
    sender = Sender(choice, kv_spec(64, kv_heads=2, head_dim=32, dtype=DType.BFLOAT16))
    sender.send(40)
    sender.answer(40)
    assert choice.told == told
