"""What a later release has stored in a shared store is left to those who can read it."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kvferry.core.clock import deadline_in
from kvferry.store.remote.manifest import CHECKSUM_NBYTES, HEAD_NBYTES
from kvferry.testing.redis_server import RedisServer
from kvferry.testing.tiers_common import HIT, MISS, PRESENT, outcomes, read, write
from kvferry.testing.tiers_common import write_outcomes as written

from .conftest import MakeTier


def of_version_2(value: bytes, added: bytes) -> bytes:
    """A value whose manifest says that it is of version 2, with a field that version 1 does not have."""
    rest = struct.unpack_from("<I", value, 12)[0]
    end = HEAD_NBYTES + rest - CHECKSUM_NBYTES
    manifest = value[:8] + struct.pack("<HHI", 2, 0x31, rest + len(added)) + value[16:end] + added
    return manifest + struct.pack("<Q", xxhash.xxh3_64_intdigest(manifest)) + value[end + CHECKSUM_NBYTES :]


@pytest.mark.parametrize("added", [b"", b"a new field"])  # as long as a value of ours, and longer
def test_what_a_later_release_has_stored_is_left_alone(
    server: RedisServer, make: MakeTier, added: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    it = make(server.url)
    write(it.tier, it.space, it.keys)
    name = it.name(it.keys[1])
    value = server.call("GET", name)
    assert isinstance(value, bytes)
    newer = of_version_2(value, added)
    server.call("SET", name, newer)
    assert outcomes(read(it.tier, it.space, it.keys)) == [HIT, MISS, HIT, HIT]
    assert it.tier.contains(it.space, it.keys, deadline=deadline_in(20)) == [True, False, True, True]
    assert written(write(it.tier, it.space, it.keys)) == [PRESENT] * 4
    assert outcomes(read(it.tier, it.space, it.keys)) == [HIT, MISS, HIT, HIT]
    assert server.call("GET", name) == newer
    assert it.tier.usage().counters["corrupt_reads"] == 0
    assert sum("blocks of a later release" in record.getMessage() for record in caplog.records) == 1
    assert it.tier.remove(it.space, it.keys[1:2], deadline=deadline_in(20)) == [True], "whoever wants it gone"
