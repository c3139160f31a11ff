"""The mooncake tier passes the suite over a real Mooncake Store."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.keys import BlockKey
from kvferry.store.encoding import TierCodec
from kvferry.store.remote.mooncake import MooncakeOptions, MooncakeTier
from kvferry.store.remote.mooncake.backend import MooncakeBackend
from kvferry.store.remote.mooncake.client import give_client_back, take_client
from kvferry.store.tier import Tier, TierNamespace
from kvferry.testing.blocks import stop_process
from kvferry.testing.mooncake_pool import MooncakePool
from kvferry.testing.tiers import TierSuite
from kvferry.testing.tiers_common import Damage, Fault
from kvferry.transports.mooncake import unavailable

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())
VALUE_NBYTES = 10 << 10  # a block of the suite with its manifest and what a name is counted with


@pytest.fixture(scope="module")
def pool() -> Iterator[MooncakePool]:
    with MooncakePool() as pool:
        yield pool


@pytest.fixture(scope="module")
def plain(pool: MooncakePool) -> Iterator[Any]:
    """A client of the library alone, to look behind the tier's back."""
    client = pool.client()
    yield client
    client.close()


@pytest.fixture(scope="module", autouse=True)
def _client(pool: MooncakePool) -> Iterator[None]:
    """Holds the client that all tiers of this module share: ending one takes a second."""
    options = options_of(pool)
    take_client(options)
    yield
    give_client_back(options, ended=True)


def options_of(pool: MooncakePool, **more: Any) -> MooncakeOptions:
    return MooncakeOptions(master=pool.address, timeout_s=1.0, **more)


class MooncakeSuite(TierSuite):
    pool: MooncakePool
    plain: Any
    codec = "off"
    register = "auto"
    flipped = 777

    @pytest.fixture(autouse=True)
    def _pool(self, pool: MooncakePool, plain: Any) -> None:
        self.pool, self.plain = pool, plain

    def make_tier(self, medium: Path, blocks: int) -> Tier:
        options = options_of(
            self.pool,
            prefix=hashlib.sha256(str(medium).encode()).hexdigest()[:16],
            capacity_nbytes=blocks * VALUE_NBYTES,
            register=self.register,
        )
        return MooncakeTier("mooncake", options, TierCodec(self.codec))

    def name(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> str:
        assert isinstance(tier, MooncakeTier)
        return tier.names.block(tier.names.home(namespace), key)

    def data_name(self, name: str) -> str:
        """The value that has the data of a block."""
        return name

    def damage(
        self, tier: Tier, namespace: TierNamespace, key: BlockKey, how: Damage, other: BlockKey
    ) -> None:
        name = self.name(tier, namespace, key)
        value = self.plain.get(self.name(tier, namespace, other) if how == "swap" else name)
        if how == "flip":
            value = value[: -self.flipped] + bytes([value[-self.flipped] ^ 4]) + value[1 - self.flipped :]
        elif how != "swap":
            value = value[: len(value) // 2] if how == "truncate" else value[:1]  # it keeps no empty values
        assert self.plain.remove(name, True) == 0
        assert self.plain.put(name, value) == 0

    def lose(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> None:
        assert self.plain.remove(self.name(tier, namespace, key), True) == 0

    def fault(self, tier: Tier, kind: Fault) -> AbstractContextManager[object]:
        if kind in ("full", "write"):
            pytest.skip("the master fails for reads too: see test_mooncake_tier_faults")
        return self._master_hangs()

    @contextmanager
    def _master_hangs(self) -> Iterator[None]:
        stop_process(self.pool.master.pid)
        try:
            yield
        finally:
            os.kill(self.pool.master.pid, signal.SIGCONT)


class TestWhole(MooncakeSuite):
    pass


class TestParts(MooncakeSuite):
    """Every value is split; the suite damages manifests."""

    register = "always"
    flipped = 7

    @pytest.fixture(autouse=True)
    def _small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MooncakeBackend, "max_value_nbytes", lambda *_: 3000)


class TestEncoded(MooncakeSuite):
    codec = "zstd"
    flipped = 77
