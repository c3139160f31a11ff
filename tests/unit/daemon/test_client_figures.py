"""What the status tells of each client."""

from __future__ import annotations

import msgspec

from kvferry.client import Client
from kvferry.core.clock import deadline_in
from kvferry.daemon.status import ClientStatus
from kvferry.testing.blocks import save_blocks, small_spec, wait_until

from .conftest import Running

SPEC = small_spec("client-figures")


def test_c147_the_figures_of_each_worker_reach_the_endpoint(running: Running) -> None:
    """Two workers save 10 and 20 blocks: labels and total are right, and who is gone vanishes."""

    def figures() -> dict[str, tuple[int, int]]:
        found = running.port.status().clients
        return {c.session: (c.saved_blocks, c.loaded_blocks) for c in found if c.session in ("one", "two")}

    def total() -> int:
        return running.daemon.store_of("default").stats().saved_blocks

    url = running.daemon.addresses[0]
    with Client(url, session="one") as one:
        with Client(url, session="two") as two:
            for number, (client, blocks) in enumerate(((one, 10), (two, 20)), 1):
                ns = client.namespace(SPEC)
                save_blocks(ns, ns.keys([number] * blocks * SPEC.block_tokens))
            mine = one.namespace(SPEC)
            with mine.load(mine.keys([2] * 5 * SPEC.block_tokens), deadline=deadline_in(20)) as lease:
                assert len(lease) == 5
            wait_until(lambda: figures() == {"one": (10, 5), "two": (20, 0)})
            assert total() == 30
        wait_until(lambda: figures() == {"one": (10, 5)})
        assert total() == 30


def test_a_daemon_that_does_not_count_them_yet_is_understood() -> None:
    before = {"session": "engine-1", "tenant": "default", "connections": 1, "leases": 0, "processes": [7]}
    found = msgspec.convert(before, ClientStatus)
    assert (found.processes, found.loaded_blocks, found.saved_blocks) == ((7,), 0, 0)
