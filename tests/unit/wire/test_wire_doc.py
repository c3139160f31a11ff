"""docs/wire.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from kvferry.core import errors
from kvferry.transports.hashed import PIECE_NBYTES
from kvferry.wire import ChannelOptions, Limits
from kvferry.wire import messages as m
from kvferry.wire.protocol import PAYLOAD_TYPES, TYPE_NUMBERS, MessageReceived, Side, State, WireProtocol

DOC = (Path(__file__).parents[3] / "docs" / "wire.md").read_text()


def test_the_table_of_messages() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| [^|]+ \|([^|]*)\|", DOC, re.MULTILINE)
    documented = {(int(number), tag): bool(payload.strip()) for number, tag, payload in rows}
    assert documented == {
        (number, cls.__struct_config__.tag): cls in PAYLOAD_TYPES for cls, number in TYPE_NUMBERS.items()
    }


def test_the_table_of_errors() -> None:
    rows = dict(re.findall(r"\| `(\w+)` \| `(\w+Error)` ", DOC))
    known = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    assert rows == {cls.code: cls.__name__ for cls in known}


def test_the_example_is_a_ping() -> None:
    found = re.search(r"```\n([0-9A-F \n]+)```", DOC)
    assert found is not None
    data = bytes.fromhex(found.group(1))
    server = WireProtocol(Side.SERVER)
    server.state, server.version = State.OPEN, 1
    assert server.receive(data[:32]) is None
    assert server.receive(data[32:]) == MessageReceived(m.Ping(), 7, 0, True)


def test_the_limits() -> None:
    limits, options = Limits(), ChannelOptions(role="", session="")
    assert f"{limits.max_handshake_nbytes >> 10} KiB of meta, no payload" in DOC
    assert f"| meta | {limits.max_meta_nbytes >> 20} MiB | `max_meta_nbytes` |" in DOC
    assert f"| payload | {limits.max_payload_nbytes >> 30} GiB | `max_payload_nbytes` |" in DOC
    assert f"| handshake | {options.hello_timeout_s:g} s | `hello_timeout_s` |" in DOC
    assert f"pieces of {PIECE_NBYTES >> 10} KiB" in DOC
