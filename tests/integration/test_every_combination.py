"""Ways to a daemon, its arena, codecs of a tier below and ways of a call: all go round together (case C084).

None may be left out: one that was never begun came to light at a user's. What does not fit together is
refused when it is configured, with both options named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest

from kvferry.client import AsyncClient, Client, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey
from kvferry.core.regions import Region
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.daemon import Daemon
from kvferry.testing.blocks import wait_until

LAYERS, TOKENS, PAGES, DIM = 3, 8, 9, 64
_TENSOR: Final = (TOKENS, 1, DIM)
SPEC: Final = KVSpec(
    model="combined",
    revision="r1",
    layers=(LayerSpec((TensorSpec("k", _TENSOR, DType.BFLOAT16), TensorSpec("v", _TENSOR, DType.BFLOAT16))),)
    * LAYERS,
    block_tokens=TOKENS,
)
WAYS: Final = {
    "unix": ((), ClientOptions()),
    "inline": ((), ClientOptions(share_memory=False)),
    "copy": (("daemon.arena=copy",), ClientOptions()),
    "tcp": (("daemon.socket=none", "daemon.listen=tcp://127.0.0.1:0"), ClientOptions()),
}
TIERS: Final = ("none", "off", "ebp", "split", "zstd", "int8", "int4")
LOSSY: Final = ("int8", "int4")
VERBS: Final = ("call", "async", "layers")
Place: TypeAlias = tuple[str, ClientOptions]


@pytest.fixture(params=list(product(WAYS, TIERS)), ids="-".join)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Daemon, ClientOptions, str]]:
    way, codec = request.param
    settings, options = WAYS[way]
    own = [f"daemon.socket={tmp_path}/d.sock", "daemon.listen=none", "daemon.disk=none"]
    if codec != "none":
        loss = "&allow_lossy=true" if codec in LOSSY else ""
        own += [f"store.tiers=disk:{tmp_path}/kv?capacity=16MiB&codec={codec}{loss}"]
    daemon = Daemon(load_config(None, assignments=[*own, "store.dram_capacity=1MiB", *settings]).config)
    try:
        yield daemon, options, codec
    finally:
        daemon.close()


class Engine:
    """Paged memory of one process: pages of a block each, all layers in one array."""

    def __init__(self) -> None:
        values = np.random.default_rng(84).normal(size=(LAYERS, 2, PAGES, TOKENS, 1, DIM))
        self.pages = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)  # bfloat16
        self.regions = [Region.of(self.pages[n], layer=n, layout="stacked_nhd") for n in range(LAYERS)]

    def block(self, page: int) -> bytes:
        """What a call takes of it: layer by layer, K and V."""
        return self.pages[:, :, page].tobytes()


def save(
    verb: str, client: Client, place: Place, engine: Engine, keys: Sequence[BlockKey], ids: Sequence[int]
) -> int:
    ns = client.namespace(SPEC)
    blocks = [(key, memoryview(engine.block(page))) for key, page in zip(keys, ids, strict=True)]
    if verb == "call":
        return ns.save(blocks, parent=None, deadline=deadline_in(20))
    if verb == "async":

        async def save_it() -> int:
            async with await AsyncClient.connect(*place) as other:
                return int(await other.namespace(SPEC).save(blocks, parent=None, deadline=deadline_in(20)))

        return asyncio.run(save_it())
    with ns.register(engine.regions) as registration:
        job = registration.save("s", keys, ids, parent=None, deadline=deadline_in(20))
        for layer in range(LAYERS):
            job.layer(layer)
            assert job.wait_layer(layer, deadline=deadline_in(20))
        assert job.wait(deadline=deadline_in(20))
        assert job.ok
        return job.stored or 0


def load(
    verb: str, client: Client, place: Place, keys: Sequence[BlockKey], *, takes_lossy: bool
) -> list[bytes]:
    ns = client.namespace(SPEC, takes_lossy=takes_lossy)
    if verb == "call":
        with ns.load(keys, deadline=deadline_in(20)) as lease:
            return [bytes(lease.view(index)) for index in range(len(lease))]
    if verb == "async":

        async def load_it() -> list[bytes]:
            async with await AsyncClient.connect(*place) as other:
                space: Any = other.namespace(SPEC, takes_lossy=takes_lossy)
                async with await space.load(keys, deadline=deadline_in(20)) as lease:
                    return [bytes(lease.view(index)) for index in range(len(lease))]

        return asyncio.run(load_it())
    engine, ids = Engine(), list(range(len(keys)))
    engine.pages[:] = 0
    with ns.register(engine.regions) as registration:
        lease = ns.load(keys, deadline=deadline_in(20))
        job = registration.load("l", lease, ids, deadline=deadline_in(20))
        for layer in range(LAYERS):
            job.wait_layer(layer, deadline=deadline_in(20))
        assert job.wait(deadline=deadline_in(20))
        return [engine.block(page) for page in ids if page not in job.failed_blocks()]


def values_of(blocks: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.float32]]:
    bits = np.frombuffer(b"".join(blocks), np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


def test_every_combination_goes_round(site: tuple[Daemon, ClientOptions, str]) -> None:
    daemon, options, codec = site
    engine = Engine()
    place = (daemon.addresses[0], options)
    with Client(*place) as client:
        for number, verb in enumerate(VERBS):
            keys = client.namespace(SPEC).keys([number + 1] * 3 * TOKENS)
            ids = [3 * number + page for page in range(3)]
            given = [engine.block(page) for page in ids]
            assert save(verb, client, place, engine, keys, ids) == 3
            for way in VERBS:
                assert load(way, client, place, keys, takes_lossy=False) == given, f"{verb} then {way}"
            for way in VERBS if codec != "none" else ():
                assert client.flush(deadline=deadline_in(20))
                daemon.store_of("default").evict(1 << 30)
                found = load(way, client, place, keys, takes_lossy=True)
                if codec not in LOSSY:
                    assert found == given, f"{verb}, {codec}, then {way}"
                    continue
                near, far = values_of(found), values_of(given)
                assert len(near) == len(far)
                assert 0 < np.linalg.norm(near - far) / np.linalg.norm(far) < 0.1
                assert load(way, client, place, keys, takes_lossy=False) == []
        wait_until(lambda: client.stats().leases == 0)


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_together_is_refused_by_name(way: str, tmp_path: Path) -> None:
    settings, _ = WAYS[way]
    tier = f"store.tiers=disk:{tmp_path}/kv?capacity=16MiB&codec=int8"
    own = [f"daemon.socket={tmp_path}/d.sock", "daemon.listen=none", "daemon.disk=none", *settings]
    with pytest.raises(ConfigError, match=r"codec.*int8.*allow_lossy"):
        Daemon(load_config(None, assignments=[*own, tier]).config)
