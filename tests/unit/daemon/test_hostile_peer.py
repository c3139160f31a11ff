"""What comes as from another daemon is bounded too."""

from __future__ import annotations

from contextlib import closing

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, ProtocolError
from kvferry.core.spec import KeyScope, namespace_id
from kvferry.testing.blocks import small_spec
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire import daemon_messages as d

from .conftest import Running

SPEC = small_spec("hostile-peer")


@pytest.mark.parametrize("position", [2**62, 2**31, -2, -(2**62)])
def test_a_number_in_a_chain_that_no_block_has_is_refused(running: Running, position: int) -> None:
    """It went down to the disk, whose headers have no room for it: the write of the whole batch failed."""
    with closing(
        Channel.connect(running.daemon.addresses[0], ChannelOptions("peer", "p"), deadline_in(20))
    ) as channel:
        opening = d.OpenNamespace(spec=SPEC, namespace_id=namespace_id(SPEC, KeyScope()))
        number = channel.call(opening, d.NamespaceOpened, deadline=deadline_in(20)).namespace
        request = d.WritePeer(
            namespace=number, keys=bytes(32), parents=(None,), positions=(position,), lossy=bytes(1),
            timeout_s=5.0,
        )  # fmt: skip
        with pytest.raises((ProtocolError, ConnectionClosedError)):  # the latter while it sends
            channel.call(request, d.PeerMarks, payload=[bytes(SPEC.block_nbytes)], deadline=deadline_in(20))
    assert running.client.stats().entries == 0
