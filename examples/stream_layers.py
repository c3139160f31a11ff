"""Stream the KV cache of one prompt layer by layer, from a prefill side to a decode side over TCP.

Both sides run in this process here, on two threads; nothing would change between two machines but the
address. The KV is random: an engine would pass views of its paged cache instead. Run it with
``python examples/stream_layers.py``.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.core import Buf, DType, KVSpec, LayerSpec, TensorSpec, deadline_in
from kvferry.core.memory import MemoryStore
from kvferry.streaming import LayerReceiver, LayerSender
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire.messages import BeginStream, Handoff, SamplingParams

LAYERS, BLOCK_TOKENS, HEADS, HEAD_DIM = 12, 16, 4, 64
PROMPT_TOKENS = 1000  # 62 full blocks and a tail of 8 tokens


def make_spec() -> KVSpec:
    """What both sides must agree on: a stream between sides that differ is refused before any KV moves."""
    shape = (BLOCK_TOKENS, HEADS, HEAD_DIM)
    layer = LayerSpec((TensorSpec("k", shape, DType.FLOAT16), TensorSpec("v", shape, DType.FLOAT16)))
    return KVSpec(model="example", revision="1", layers=(layer,) * LAYERS, block_tokens=BLOCK_TOKENS)


def blocks_of(layer: npt.NDArray[np.float16]) -> list[tuple[int, Sequence[Buf]]]:
    """The K and V rows of each block of a layer, as views; of the last, partial block the rows there are."""
    k, v = layer
    starts = range(0, PROMPT_TOKENS, BLOCK_TOKENS)
    return [(b, (k[i : i + BLOCK_TOKENS], v[i : i + BLOCK_TOKENS])) for b, i in enumerate(starts)]


def use_layers(receiver: LayerReceiver, kv: npt.NDArray[np.float16]) -> int:
    """The decode side: each layer can be used as soon as it is there. Compares it with what was sent."""
    for layer in range(LAYERS):
        receiver.wait_layer(layer, deadline_in(10))
        for block, first in enumerate(range(0, PROMPT_TOKENS, BLOCK_TOKENS)):
            got = np.frombuffer(receiver.view(layer, block), np.uint16)
            sent = kv[layer, :, first : first + BLOCK_TOKENS].reshape(-1).view(np.uint16)
            assert np.array_equal(got, sent), f"layer {layer} of block {block} differs"
    return receiver.wait(deadline_in(10)).first_token


def main() -> None:
    """Start a decode side, stream one prompt to it, and compare every byte."""
    spec = make_spec()
    store = MemoryStore(64 << 20)
    namespace = store.namespace(spec)
    streams: queue.SimpleQueue[LayerReceiver] = queue.SimpleQueue()

    def receive(channel: Channel) -> None:
        """The decode side's thread of one connection: received bytes land in slots of the store."""
        begin = channel.receive(deadline_in(10)).message
        assert isinstance(begin, BeginStream)
        receiver = LayerReceiver(channel, namespace, begin)
        receiver.start()
        streams.put(receiver)
        receiver.run(deadline_in(30))

    server = ChannelServer(
        "tcp://127.0.0.1:0", ChannelOptions(role="decode", session="decode-0"), receive, name="example"
    )

    # The prefill side: token ids give the keys of the blocks, the model would give the KV.
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32000, PROMPT_TOKENS, dtype=np.uint32)
    keys, tail_tokens = namespace.keys(tokens), PROMPT_TOKENS % BLOCK_TOKENS
    kv = rng.standard_normal((LAYERS, 2, PROMPT_TOKENS, HEADS, HEAD_DIM)).astype(np.float16)

    options = ChannelOptions(role="prefill", session="prefill-0")
    channel = Channel.connect(server.address, options, deadline_in(10))
    with LayerSender(channel, spec) as sender:
        missing = sender.begin("request-1", keys, tail_tokens, deadline=deadline_in(30))
        for layer in range(LAYERS):
            # ... here the model would compute this layer, while the one before is on its way ...
            sender.put_layer(layer, blocks_of(kv[layer]))  # queues views: nothing is copied or waits
        handoff = Handoff(
            prompt_tokens=PROMPT_TOKENS, cached_tokens=0, first_token=42, sampling=SamplingParams()
        )
        done = sender.finish(handoff, deadline_in(30))

    with streams.get(timeout=10) as receiver:
        token = use_layers(receiver, kv)

    print(f"streamed {LAYERS} layers of {PROMPT_TOKENS} tokens over {server.address}: every byte as sent")
    print(f"{done.kv_nbytes} bytes, {done.kv_nbytes / done.wire_s / 1e9:.2f} GB/s while on the wire")
    print(f"{len(missing)} blocks were missing; {namespace.lookup(keys).prefix} are stored now")
    print(f"decode goes on from token {token}")
    channel.close()
    server.close()
    store.close()


if __name__ == "__main__":
    main()
