"""Case C136: tensor-parallel ranks share one address; no list of ports could be shorter than the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from kvferry.client import Client
from kvferry.core.clock import deadline_in
from kvferry.daemon import Daemon
from kvferry.testing.blocks import small_spec

Start = Callable[..., Daemon]

RANKS = 4


def test_four_ranks_take_one_address_and_find_their_own_blocks_alone(start: Start) -> None:
    daemon = start()
    spec = small_spec("ranks")
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(daemon.addresses[0])) for _ in range(RANKS)]
        specs = [replace(spec, tp_rank=rank, tp_size=RANKS) for rank in range(RANKS)]
        spaces = [client.namespace(own) for client, own in zip(clients, specs, strict=True)]
        keys = [space.keys([1] * spec.block_tokens) for space in spaces]
        for rank, space in enumerate(spaces[:-1]):
            data = bytes([rank + 1]) * spec.block_nbytes
            assert space.save([(keys[rank][0], data)], parent=None, deadline=deadline_in(20)) == 1
        for rank, space in enumerate(spaces[:-1]):
            with space.load(keys[rank], deadline=deadline_in(20)) as lease:
                assert bytes(lease.view(0)) == bytes([rank + 1]) * spec.block_nbytes
        assert spaces[-1].lookup(keys[-1]).prefix == 0
