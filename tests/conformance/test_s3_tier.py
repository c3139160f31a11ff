"""The s3 tier passes the suite over a real server, SeaweedFS."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import obstore
import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.store.remote.s3 import S3Options, S3Tier
from kvferry.store.tier import Tier, TierNamespace
from kvferry.testing.fault_proxy import FaultProxy, Faults
from kvferry.testing.s3_server import S3Server
from kvferry.testing.tiers import TierSuite
from kvferry.testing.tiers_common import Damage, Fault

VALUE_NBYTES = 10 << 10  # a block of the suite with its manifest and what a name is counted with


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


class TestS3(TierSuite):
    server: S3Server
    proxy: FaultProxy

    @pytest.fixture(autouse=True)
    def _server(self, server: S3Server) -> Iterator[None]:
        self.server = server
        with FaultProxy(server.endpoint.replace("http", "tcp")) as self.proxy:
            yield

    def make_tier(self, medium: Path, blocks: int) -> Tier:
        options = S3Options(
            bucket=self.server.bucket,
            endpoint=self.proxy.address.replace("tcp", "http"),
            access_key_id=self.server.access_key_id,
            secret_access_key=self.server.secret_access_key,
            prefix=hashlib.sha256(str(medium).encode()).hexdigest()[:16],
            capacity_nbytes=blocks * VALUE_NBYTES,
            retries=0,
        )
        tier = S3Tier("s3", options)
        assert tier.wait_found(deadline=deadline_in(20))
        return tier

    def name(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> str:
        assert isinstance(tier, S3Tier)
        return tier.names.block(tier.names.home(namespace), key)

    def damage(
        self, tier: Tier, namespace: TierNamespace, key: BlockKey, how: Damage, other: BlockKey
    ) -> None:
        store, name = self.server.store(), self.name(tier, namespace, key)
        source = self.name(tier, namespace, other) if how == "swap" else name
        value = bytes(obstore.get(store, source).bytes())
        if how == "flip":
            value = value[:-777] + bytes([value[-777] ^ 4]) + value[-776:]
        elif how != "swap":
            value = value[: len(value) // 2] if how == "truncate" else b""
        obstore.put(store, name, value, use_multipart=False)

    def lose(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> None:
        obstore.delete(self.server.store(), self.name(tier, namespace, key))

    def fault(self, tier: Tier, kind: Fault) -> AbstractContextManager[object]:
        if kind in ("full", "write"):
            pytest.skip("the link fails for reads too: see test_s3_faults")
        return self._link("reset" if kind != "stall" else "cut")

    @contextmanager
    def _link(self, link: str) -> Iterator[None]:
        self.proxy.faults = Faults(link=link)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self.proxy.faults = Faults()
