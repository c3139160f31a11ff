"""Pages of a device on their way into a stream that does not move."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from typing import cast

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, DeviceError, KVFerryError, TransferTimeoutError
from kvferry.core.head_shards import HeadShard
from kvferry.core.keys import BlockKey
from kvferry.core.regions import Region, RegionPlan
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.device import CopyEngine
from kvferry.streaming import LayerSender, PageSender
from kvferry.testing.blocks import wait_until
from kvferry.testing.devices_pages import host_regions, on_device, pages_spec
from kvferry.testing.sim_device import SimDevice
from kvferry.wire.messages import Handoff, SamplingParams, StreamDone

HANDOFF = Handoff(prompt_tokens=12, cached_tokens=0, first_token=7, sampling=SamplingParams())
DONE = StreamDone(stored_blocks=3, kv_nbytes=1, wire_s=0.1)


class Network:
    """In place of a LayerSender: keeps what it was given until the test has it sent."""

    def __init__(self) -> None:
        self.missing: frozenset[int] = frozenset()
        self.error: KVFerryError | None = None
        self.put: list[tuple[int, list[int]]] = []
        self.unsent: list[Callable[[], None]] = []
        self.finished = self.aborted = False

    def begin(
        self, stream: str, keys: Sequence[bytes], tail_tokens: int, *, deadline: float
    ) -> frozenset[int]:
        self.missing = frozenset(range(len(keys)))
        return self.missing

    def put_layer(
        self, layer: int, blocks: Sequence[tuple[int, object]], *, sent: Callable[[], None]
    ) -> None:
        self.put.append((layer, [number for number, _ in blocks]))
        self.unsent.append(sent)

    def finish(self, handoff: Handoff, deadline: float, *, lossy: Collection[int]) -> StreamDone:
        self.finished = True
        return DONE

    def abort(self, reason: str) -> None:
        self.aborted = True
        while self.unsent:
            self.unsent.pop()()


@pytest.fixture
def device() -> Iterator[SimDevice]:
    made = SimDevice()
    yield made
    made.close()


def _begun(device: SimDevice, engine: CopyEngine, network: Network) -> PageSender:
    spec = pages_spec("stacked_nhd")
    plan = RegionPlan(spec, [on_device(device, region) for region in host_regions(spec, "stacked_nhd")])
    sender = PageSender(cast("LayerSender", network), engine, plan)
    keys = [BlockKey(bytes([n]) * 32) for n in range(3)]
    assert sender.begin("s", keys, 0, deadline=deadline_in(20)) == {0, 1, 2}
    return sender


def test_the_model_never_waits_for_a_slot(device: SimDevice) -> None:
    """All layers are queued while the only slot is with the network."""
    network = Network()
    with closing(CopyEngine(device, slots=1, slot_nbytes=4096)) as engine:
        sender = _begun(device, engine, network)
        reads = [sender.put_layer(layer, [(0, 5), (1, 0), (2, 3)]) for layer in (0, 1)]
        wait_until(lambda: len(network.put) == 1, 20)
        assert reads[0].wait(deadline_in(20))
        assert not reads[1].query()
        with pytest.raises(TransferTimeoutError, match="1 copies"):
            sender.finish(HANDOFF, deadline_in(0.01))
        assert network.aborted
        assert reads[1].query()


def test_what_was_sent_makes_room_for_the_next(device: SimDevice) -> None:
    network = Network()
    with closing(CopyEngine(device, slots=1, slot_nbytes=4096)) as engine:
        sender = _begun(device, engine, network)
        for layer in (0, 1):
            sender.put_layer(layer, [(0, 5), (1, 0), (2, 3)])
        for layer in (0, 1):
            wait_until(lambda: bool(network.unsent), 20)
            assert network.put[layer:] == [(layer, [0, 1, 2])]
            network.unsent.pop()()
        assert sender.finish(HANDOFF, deadline_in(20)) == DONE
        assert sender.put_layer(0, []).query()


def test_a_dead_device_ends_the_stream_with_the_cause(device: SimDevice) -> None:
    network = Network()
    with closing(CopyEngine(device, slots=1, slot_nbytes=4096)) as engine:
        sender = _begun(device, engine, network)
        device.fail(RuntimeError("an illegal memory access"))
        device.errors.append(RuntimeError("an illegal memory access"))
        sender.put_layer(0, [(0, 5)])
        with pytest.raises(DeviceError, match="illegal memory access"):
            sender.finish(HANDOFF, deadline_in(20))
        assert network.aborted
        assert sender.put_layer(1, [(0, 5)]).query()  # the model is not broken in the middle of a layer


def test_a_plan_of_a_shard_is_refused(device: SimDevice) -> None:
    """Its pages have not what the blocks of the stream have."""
    spec = pages_spec("stacked_nhd")
    regions = [on_device(device, region) for region in host_regions(spec, "stacked_nhd")]
    whole = HeadShard(kv_heads=spec.layers[0].tensors[0].shape[1], tp_rank=0, tp_size=1)
    with (
        closing(CopyEngine(device, slots=1, slot_nbytes=4096)) as engine,
        pytest.raises(ConfigError, match="make its plan without a shard"),
    ):
        PageSender(cast("LayerSender", Network()), engine, RegionPlan(spec, regions, shard=whole))


def test_a_layer_larger_than_a_slot_is_refused(device: SimDevice) -> None:
    layer = LayerSpec((TensorSpec("k", (16, 1, 512), DType.UINT8),))
    spec = KVSpec(model="large", revision="r", layers=(layer,), block_tokens=16)
    memory = device.empty(8192)
    region = Region(
        layer=0, layout="nhd", address=memory.data_ptr(), shape=(1, 16, 1, 512), strides=(8192, 512, 512, 1),
        itemsize=1, device="sim", owner=memory,
    )  # fmt: skip
    with (
        closing(CopyEngine(device, slots=1, slot_nbytes=4096)) as engine,
        pytest.raises(ConfigError, match="8192 bytes, a pinned slot 4096; raise slot_nbytes"),
    ):
        PageSender(cast("LayerSender", Network()), engine, RegionPlan(spec, [region]))
