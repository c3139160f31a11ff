"""The peer tier passes the suite over two real daemons, each with its share of the keys."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kvferry.client import Client
from kvferry.client.peer import PeerClient
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.store.remote.peer import AskedPeer, PeerOptions, PeerTier
from kvferry.store.tier import Tier, TierNamespace
from kvferry.testing.blocks import stop_process, wait_until
from kvferry.testing.tiers import TierSuite
from kvferry.testing.tiers_common import SPEC, Fault, chain, opened, read

# Both daemons in one process, which starts sooner than two.
HOST = """
import sys
from kvferry.core.config_sources import load_config
from kvferry.daemon import Daemon
more = ["daemon.listen=none", "daemon.disk=none", "store.dram_capacity=32MiB"]
daemons = [
    Daemon(load_config(None, assignments=[f"daemon.socket={sys.argv[1]}/{name}.sock", *more]).config)
    for name in "ab"
]
print(*[daemon.addresses[0] for daemon in daemons], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    command = [sys.executable, "-c", HOST, str(tmp_path_factory.mktemp("peers"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()
        process.kill()


def make_peer(url: str, *, connections: int, timeout_s: float) -> AskedPeer:
    return PeerClient(url, connections=connections, timeout_s=timeout_s, own_epoch=lambda: "another")


class TestPeers(TierSuite):
    process: subprocess.Popen[str]
    urls: tuple[str, ...]

    @pytest.fixture(autouse=True)
    def _peers(self, daemons: tuple[subprocess.Popen[str], list[str]]) -> Iterator[None]:
        self.process, self.urls, self.made = daemons[0], tuple(daemons[1]), list[PeerTier]()
        yield
        with self._away_from_tests() as tier:
            for old in self.made:
                for (space, key), _ in list(old._written.items()):
                    opened(tier, space.spec, space.tenant, space.scope)
                    tier.remove(space, [key], deadline=deadline_in(20))

    @pytest.fixture
    def keys(self, namespace: TierNamespace, tier: Tier) -> list[BlockKey]:
        """A chain of which each peer keeps a part: where a key goes depends on the names of the sockets."""
        assert isinstance(tier, PeerTier)
        chains = (chain(namespace, number, 6) for number in range(1, 100))
        return next(keys for keys in chains if len({tier.placement.owner(key) for key in keys}) == 2)

    @contextmanager
    def _away_from_tests(self) -> Iterator[PeerTier]:
        tier = PeerTier("clean", PeerOptions(peers=self.urls), make_peer)
        try:
            yield tier
        finally:
            tier.close()

    def make_tier(self, medium: Path, blocks: int) -> Tier:
        del medium, blocks
        tier = PeerTier("peer", PeerOptions(peers=self.urls, timeout_s=5), make_peer)
        self.made.append(tier)
        return tier

    def lose(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> None:
        assert isinstance(tier, PeerTier)
        with Client(self.urls[tier.placement.owner(key)]) as client:
            assert client.namespace(namespace.spec, namespace.scope).remove([key]) == 1

    def fault(self, tier: Tier, kind: Fault) -> AbstractContextManager[object]:
        if kind != "stall":
            pytest.skip("a daemon fails as a whole")
        return self.hanging(tier)

    @contextmanager
    def hanging(self, tier: Tier) -> Iterator[None]:
        stop_process(self.process.pid)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)
            known = opened(tier, SPEC)
            keys = [BlockKey(bytes([number]) * 32) for number in range(16)]

            def healed() -> bool:
                return not any(result.reason for result in read(tier, known, keys, seconds=1))

            wait_until(healed)
