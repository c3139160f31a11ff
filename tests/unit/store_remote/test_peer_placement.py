"""Where keys lie among peers, and what a list of peers must be."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey
from kvferry.store.remote.peer.options import PeerOptions, peer_id
from kvferry.store.remote.peer.placement import Placement

GOLDEN = [2, 1, 0, 1, 1, 0, 1, 2, 1, 0, 1, 0, 1, 2, 1, 0, 0, 1, 0, 1, 2, 2, 2, 1]
PEERS = ["a:8450", "b:8450", "c:8450"]
KEYS = [BlockKey(blake2b(number.to_bytes(4, "little"), digest_size=32).digest()) for number in range(3000)]


def test_placement_is_pinned() -> None:
    """Golden: a change would make nodes of different versions look in different places."""
    assert [Placement(PEERS).owner(key) for key in KEYS[:24]] == GOLDEN


def test_shares_are_even_and_a_lost_peer_moves_only_its_own() -> None:
    before = [PEERS[Placement(PEERS).owner(key)] for key in KEYS]
    counts = Counter(before)
    assert min(counts.values()) > 900
    assert max(counts.values()) < 1100
    left = [PEERS[0], PEERS[2]]
    after = [left[Placement(left).owner(key)] for key in KEYS]
    assert all(b == a for b, a in zip(before, after, strict=True) if b != PEERS[1])


def test_order_and_writing_of_peers_are_no_matter() -> None:
    turned = PEERS[::-1]
    for key in KEYS[:50]:
        assert turned[Placement(turned).owner(key)] == PEERS[Placement(PEERS).owner(key)]
    ids = {peer_id(a) for a in PeerOptions(peers=("tcp://Host", "tcp://host2:8450?rate=1MiB/s")).addresses()}
    assert ids == {"host:8450", "host2:8450"}


@pytest.mark.parametrize(
    ("peers", "what"),
    [
        (("tcp://a", "tls://a:8450"), "twice"),
        (("http://a",), "a daemon is reached at"),
        (("tcp://a:0",), "a daemon is reached at"),
        ((), "one or more"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(peers: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        PeerOptions(peers=peers)
