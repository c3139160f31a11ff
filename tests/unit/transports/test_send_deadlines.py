"""A call that could not send all by its deadline says how much has gone, whatever the way that it took."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import TransferTimeoutError
from kvferry.core.native import native
from kvferry.testing.transports_common import blocking_buffer
from kvferry.transports import connect, listen
from kvferry.transports.base import Connection
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.messages import PutLayer

from .conftest import Files

LONG_S = 30.0
SHORT_S = 0.2
LINKS = ["tcp", "lanes", "paced", "unix", "tls", "paced-tls", "inproc", "auto"]
Ends = tuple[Connection, Connection]


@pytest.fixture
def ends(request: pytest.FixtureRequest, files: Files) -> Iterator[Ends]:
    """Who sends, and a peer that takes nothing."""
    link: str = request.param
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-"))
        url = {
            "lanes": "tcp://127.0.0.1:0?lanes=4",
            "paced": "tcp://127.0.0.1:0?rate=10MB/s",
            "paced-tls": f"{files.listen_url()}&rate=10MB/s",
            "tls": files.listen_url(),
            "unix": f"unix://{Path(folder) / 's'}",
            "inproc": "inproc://send-deadlines",
        }.get(link, f"{link}://127.0.0.1:0")
        listener = stack.enter_context(contextlib.closing(listen(url)))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        accepting = pool.submit(listener.accept, deadline_in(LONG_S))
        one = connect(listener.address, deadline_in(LONG_S))
        stack.callback(one.abort)
        other = accepting.result(LONG_S)
        stack.callback(other.abort)
        yield one, other


def gone(text: str) -> tuple[int, int]:
    found = re.search(r"the deadline passed while sending, (\d+) of (\d+) bytes had gone", text)
    assert found, text
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("cuts", [(), (1, 5 << 20)], ids=["whole", "parts"])
@pytest.mark.parametrize("ends", LINKS, indirect=True)
def test_a_late_send_says_how_much_has_gone(ends: Ends, cuts: Sequence[int]) -> None:
    data = blocking_buffer()
    parts = [data[start:end] for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True)]
    with pytest.raises(TransferTimeoutError) as late:
        ends[0].send(parts, deadline_in(SHORT_S))
    done, total = gone(str(late.value))
    assert total == len(data)
    if "inproc" not in ends[1].peer_address:  # which lends what is large, and has no buffer for it
        assert 0 < done < total


@pytest.mark.parametrize("ends", ["tcp", "unix"], indirect=True)
def test_a_send_that_is_late_before_it_begins_says_so_too(ends: Ends) -> None:
    with pytest.raises(TransferTimeoutError) as late:
        ends[0].send([bytes(7)], deadline_in(-1))
    assert gone(str(late.value)) == (0, 7)


@pytest.mark.parametrize("ends", ["lanes", "paced", "tls", "inproc"], indirect=True)
def test_a_late_payload_in_pieces_says_so_of_its_piece_and_of_all(ends: Ends) -> None:
    data = blocking_buffer()
    with pytest.raises(TransferTimeoutError) as late:
        ends[0].send_hashed(b"head", [data], deadline_in(SHORT_S))
    done, total = gone(str(late.value))
    assert 0 <= done < total < len(data)
    assert re.search(rf"gone.*, behind \d+ of a payload of {len(data)}$", str(late.value))


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("ends", ["tcp", "unix"], indirect=True)
def test_a_late_frame_says_how_much_has_gone(ends: Ends, *, checksum: bool) -> None:
    options = ChannelOptions(role="peer", session="s", checksum=checksum)
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(Channel.accept, ends[1], options, deadline_in(LONG_S))
        channel = Channel.open(ends[0], options, deadline_in(LONG_S))
        accepting.result(LONG_S)
    for _ in range(2):  # the first is for the long way: the kernel's limit was meant for the handshake
        with contextlib.suppress(TransferTimeoutError):
            channel.send(PutLayer(layer=0, blocks=(0,)), [bytes(7)], deadline=deadline_in(SHORT_S))
    data = blocking_buffer()
    with pytest.raises(TransferTimeoutError) as late:
        channel.send(PutLayer(layer=0, blocks=(0,)), [data], deadline=deadline_in(SHORT_S))
    done, total = gone(str(late.value))
    if checksum and native().library is None:  # then it goes in pieces, and hashed between them
        assert 0 <= done < total < len(data)
        assert str(late.value).endswith(f"of a payload of {len(data)}")
    else:
        assert 0 < done < total
        assert 0 < total - len(data) < 4096
