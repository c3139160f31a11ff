"""Grants, aliases and trust; what the library itself does is in tests/faults/test_mooncake_faults.py."""

from __future__ import annotations

import ctypes
import ipaddress
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvferry.core.arena import Arena
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import AuthError, ConfigError, ProtocolError, TransportError
from kvferry.core.trusted_peers import TrustedPeers
from kvferry.transports.choices import announced_regions
from kvferry.transports.mooncake import MooncakeRegions, shared_memory, unavailable
from kvferry.transports.mooncake.admission import Network, admit_only, listening
from kvferry.transports.mooncake.aliases import AliasArea
from kvferry.transports.mooncake.engine import Engine
from kvferry.transports.mooncake.grants import MAX_GRANT_NBYTES, Move, WindowGrant
from kvferry.transports.region import Access, RegionPart

PAGE = mmap.PAGESIZE
needs_library = pytest.mark.skipif(bool(unavailable()) and "CI" not in os.environ, reason=unavailable())


def _part(nbytes: int, offset: int) -> RegionPart:
    return RegionPart(memoryview(bytes(nbytes)), offset)


# ---- grants -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("access", ["read", "write"])
def test_a_grant_says_what_was_granted(access: Access) -> None:
    grant = WindowGrant.new("10.0.0.1:12345", 0x7000_0000_0000, 1 << 40, access)
    packed = grant.pack()
    assert len(packed) < 128
    assert WindowGrant.parse(packed) == grant
    assert grant.host == "10.0.0.1"
    assert WindowGrant.new(grant.session, grant.address, grant.nbytes, access).pack() != packed


def test_the_format_of_grants_is_pinned() -> None:
    packed = bytes.fromhex(
        "4b564d4301010b0000100000000000000020000000000000000102030405060708090a0b0c0d0e0f683a3132333435363738393a"
    )
    head = struct.pack("<4sBBHQQ16s", b"KVMC", 1, 1, 11, 0x1000, 0x2000, bytes(range(16))) + b"h:123456789"
    assert head[:40] == packed[:40]
    grant = WindowGrant("h:123456789", 0x1000, 0x2000, "write", bytes(range(16)))
    assert grant.pack() == head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def test_grants_of_other_versions_and_nonsense_are_refused() -> None:
    good = WindowGrant.new("h:1", PAGE, PAGE, "write").pack()[:-8]

    def summed(body: bytes) -> bytes:
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))

    assert WindowGrant.parse(summed(good)).nbytes == PAGE
    for place, value, said in (
        (4, 2, "version 2"),
        (5, 2, "no sense"),
        (6, 9, "no sense"),
        (-1, 200, "no sense"),
    ):
        body = bytearray(good)
        body[place] = value
        with pytest.raises(ProtocolError, match=said):
            WindowGrant.parse(summed(bytes(body)))
    beyond = good[:8] + struct.pack("<QQ", (1 << 64) - 1, PAGE) + good[24:]
    with pytest.raises(ProtocolError, match="no sense"):
        WindowGrant.parse(summed(beyond))
    with pytest.raises(ProtocolError):
        WindowGrant.parse(summed(good + b"x" * MAX_GRANT_NBYTES))
    with pytest.raises(TransportError, match="bytes, at most"):
        WindowGrant.new("h" * 600, 0, 1, "read").pack()


def test_moves_are_checked_joined_and_never_empty() -> None:
    grant = WindowGrant.new("h:1", 1000, 100, "write")
    parts = [_part(10, 0), _part(0, 10), _part(20, 10), _part(5, 30), _part(5, 90)]
    found = grant.moves(parts, [500, 510, 510, 600, 605])
    assert found == [Move(500, 1000, 30), Move(600, 1030, 5), Move(605, 1090, 5)]
    assert grant.moves([_part(100, 0), _part(0, 100)], [1, 1]) == [Move(1, 1000, 100)]
    for nbytes, offset in ((1, 100), (2, 99), (1, -1), (0, 101), (0, -1), (101, 0), (1, 1 << 64)):
        with pytest.raises(TransportError, match="part 1: "):
            grant.moves([_part(1, 0), _part(nbytes, offset)], [0, 0])


# ---- aliases ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def area() -> AliasArea:
    return AliasArea()


def _at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _mapping_of(address: int) -> str:
    """Permissions of the mapping that an address lies in."""
    with Path("/proc/self/maps").open() as lines:
        for line in lines:
            bounds, mode, *_ = line.split()
            start, stop = (int(one, 16) for one in bounds.split("-"))
            if start <= address < stop:
                return mode
    return ""


@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, 1), (0, PAGE), (100, PAGE), (PAGE - 1, 2), (5, 3 * PAGE - 5)]
)
def test_an_alias_shows_the_same_bytes(area: AliasArea, start: int, nbytes: int) -> None:
    memory = shared_memory(4 * PAGE)
    memory[:] = random.Random(1).randbytes(4 * PAGE)
    alias = area.map(_address(memory) + start, nbytes, writable=True)
    assert _at(alias, nbytes) == bytes(memory[start : start + nbytes])
    ctypes.memset(alias, 7, nbytes)
    assert bytes(memory[start : start + nbytes]) == b"\7" * nbytes
    assert _mapping_of(alias) == "rw-s"
    area.unmap(alias)
    assert _mapping_of(alias) == "---p", "the place must stay taken, so that nothing else comes to lie there"
    area.unmap(alias)


def test_an_alias_for_reading_cannot_be_written(area: AliasArea) -> None:
    memory = shared_memory(PAGE)
    alias = area.map(_address(memory), PAGE, writable=False)
    assert _mapping_of(alias) == "r--s"
    assert _mapping_of(_address(memory)) == "rw-s"
    area.unmap(alias)


def test_slots_of_an_arena_have_aliases(area: AliasArea) -> None:
    with closing(Arena(1 << 20)) as arena:
        slot = arena.allocate(3 * PAGE)
        assert slot is not None
        view = arena.view(slot)
        alias = area.map(_address(view), len(view), writable=True)
        view[:5] = b"hello"
        assert _at(alias, 5) == b"hello"
        area.unmap(alias)


def test_private_memory_has_no_alias(area: AliasArea) -> None:
    before = len(area._taken)
    with pytest.raises(TransportError, match="must be shared"):
        area.map(_address(page_aligned(PAGE)), PAGE, writable=True)
    with pytest.raises(TransportError, match="no room"):
        area.map(_address(shared_memory(PAGE)), 1 << 45, writable=True)
    assert len(area._taken) == before


def test_addresses_are_not_used_again_soon(area: AliasArea) -> None:
    memory = shared_memory(PAGE)
    seen = set()
    for _ in range(500):
        alias = area.map(_address(memory), PAGE, writable=True)
        assert alias not in seen
        seen.add(alias)
        area.unmap(alias)


# ---- trust ------------------------------------------------------------------------------------------


def test_trusted_peers() -> None:
    peers = TrustedPeers(["10.1.0.0/16", "192.168.0.5", "Node-7", "fd00::/8"])
    for host in (
        "10.1.255.255",
        "192.168.0.5",
        "node-7",
        "NODE-7",
        "fd00::1",
        "[fd00::1]",
        "::ffff:10.1.2.3",
    ):
        assert host in peers
    for other in ("10.2.0.1", "192.168.0.50", "node-77", "::1", "", "127.0.0.1", 5):
        assert other not in peers
    assert not TrustedPeers([])
    for wrong in (
        "",
        "10.1.0.1/16",
        "10.1.0.0/99",
        "name/8",
        '["10.1.0.1"]',
        "two names",
        "256.1.1.1",
        "10.1.0",
    ):
        with pytest.raises(ConfigError, match="trusted_peers"):
            TrustedPeers([wrong])
    for text in ("localhost", "10.1.0.1"):  # whose letters would be host names
        with pytest.raises(ConfigError, match=f"trusted_peers is the text '{text}': write a list"):
            TrustedPeers(text)


@needs_library
def test_nothing_without_trusted_peers() -> None:
    with pytest.raises(ConfigError, match="trusted_peers"):
        MooncakeRegions()


@needs_library
@pytest.mark.parametrize("host", ["::1", "0.0.0.0"])
def test_hosts_that_peers_cannot_dial(host: str) -> None:
    with pytest.raises(ConfigError, match="IPv4"):
        MooncakeRegions(trusted_peers=["10.0.0.1"], host=host)


@needs_library
def test_rdma_without_a_device() -> None:
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this machine has RDMA")
    with pytest.raises(TransportError, match="no RDMA device"):
        MooncakeRegions(trusted_peers=["127.0.0.1"], wire="rdma")


@pytest.fixture
def regions() -> Iterator[MooncakeRegions]:
    with closing(MooncakeRegions(trusted_peers=["127.0.0.1"])) as endpoint:
        yield endpoint


@needs_library
def test_grants_of_strangers_are_refused(regions: MooncakeRegions) -> None:
    memory = shared_memory(PAGE)
    with (
        closing(MooncakeRegions(trusted_peers=["10.0.0.1"])) as other,
        closing(regions.open_window(memory, "write")) as window,
    ):
        assert other.trusts("10.0.0.1")
        assert not other.trusts("127.0.0.1")
        with pytest.raises(AuthError, match=r"127\.0\.0\.1 is not among the trusted_peers.*10\.0\.0\.1"):
            other.write(window.grant, [_part(10, 0)])
    assert bytes(memory[:10]) == bytes(10)


@needs_library
def test_auto_names_it_while_an_endpoint_is_open(regions: MooncakeRegions) -> None:
    assert "mooncake" in announced_regions()
    with closing(MooncakeRegions(trusted_peers=["127.0.0.1"])) as other:
        regions.close()
        assert "mooncake" in announced_regions()
        other.close()
    assert "mooncake" not in announced_regions()


# ---- the rest ---------------------------------------------------------------------------------------


@needs_library
def test_the_environment_stays_as_it_was() -> None:
    code = (
        "import os; before = dict(os.environ)\n"
        "from kvferry.transports.mooncake import MooncakeRegions\n"
        "MooncakeRegions(trusted_peers=['127.0.0.1'])\n"
        "assert dict(os.environ) == before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@needs_library
def test_local_memory_is_registered_where_the_wire_needs_it(
    regions: MooncakeRegions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over rdma; here over tcp, which does not need it."""
    monkeypatch.setattr(Engine, "registers_locals", True)
    memory, local = shared_memory(4 * PAGE), page_aligned(PAGE)
    local[:] = b"x" * PAGE
    engine = regions._engine
    with closing(regions.open_window(memory, "write")) as window:
        parts = [RegionPart(local, 0), RegionPart(local, 2 * PAGE)]
        regions.write(window.grant, parts).wait(deadline_in(20))
        taken = WindowGrant.parse(window.grant)
        outside = WindowGrant.new(taken.session, taken.address - PAGE, PAGE, "write")
        transfer = regions.write(outside.pack(), [RegionPart(local, 0)])
        with pytest.raises(TransportError, match="not moved"):
            transfer.wait(deadline_in(20))
    assert bytes(memory) == b"x" * PAGE + bytes(PAGE) + b"x" * PAGE + bytes(PAGE)
    assert not engine._locals


@needs_library
def test_memory_is_held_until_the_transfer_is_over(regions: MooncakeRegions) -> None:
    memory = shared_memory(32 << 20)
    local = page_aligned(32 << 20)
    with closing(regions.open_window(memory, "write")) as window:
        transfer = regions.write(window.grant, [RegionPart(local, 0)])
        mapping = local.obj
        local.release()
        assert isinstance(mapping, mmap.mmap)
        if not transfer.poll():
            with pytest.raises(BufferError):
                mapping.close()
        transfer.wait(deadline_in(30))
        mapping.close()


@needs_library
def test_more_pieces_than_may_be_under_way(regions: MooncakeRegions) -> None:
    memory, local = shared_memory(1 << 20), page_aligned(1 << 20)
    local[:] = random.Random(2).randbytes(1 << 20)
    parts = [RegionPart(local[at : at + 1024], at) for at in range(0, 1 << 20, 2048)]
    with closing(regions.open_window(memory, "write")) as window:
        regions.write(window.grant, parts).wait(deadline_in(30))
    for at in range(0, 1 << 20, 2048):
        assert memory[at : at + 1024] == local[at : at + 1024]
        assert bytes(memory[at + 1024 : at + 2048]) == bytes(1024)


# ---- who reaches the library's ports ------------------------------------------------------------------


def _reach(port: int, source: str, host: str = "127.0.0.1", seconds: float = 20) -> None:
    """A connection from ``source`` comes about."""
    socket.create_connection((host, port), seconds, source_address=(source, 0)).close()


def _shut_out(port: int, source: str, host: str = "127.0.0.1") -> bool:
    """Whether none comes about: what the kernel drops is waited for in vain."""
    try:
        _reach(port, source, host, 0.2)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_only_some_networks_reach_a_port_that_listens_everywhere(family: int, host: str) -> None:
    def networks(*names: str) -> list[Network]:
        return [ipaddress.ip_network(name) for name in names]

    dual = family == socket.AF_INET6
    everywhere = "::" if dual else "0.0.0.0"
    with socket.create_server((everywhere, 0), family=family, dualstack_ipv6=dual) as server:
        port = server.getsockname()[1]
        assert port in listening().values()
        _reach(port, host, host)
        admit_only(networks("10.1.0.0/16", "127.0.0.2", "fd00::/8"), [port])
        _reach(port, "127.0.0.2")
        assert _shut_out(port, "127.0.0.3")
        assert _shut_out(port, host, host)
        admit_only(networks("127.0.0.0/30", "::1", "0.0.0.0/32"), [port])
        _reach(port, "127.0.0.3")
        _reach(port, host, host)
        assert _shut_out(port, "127.0.0.4")
    with pytest.raises(ValueError, match="the kernel takes 4096"):
        admit_only(networks(*(f"10.0.{n // 256}.{n % 256}" for n in range(1100))), [])


@needs_library
def test_strangers_do_not_reach_the_librarys_ports() -> None:
    """In a process of its own: an engine goes on letting in whom it let in."""
    code = (
        "import socket, logging\n"
        "from kvferry.transports.mooncake import MooncakeRegions\n"
        "logging.basicConfig(format='%(message)s')\n"
        "def reach(port, source, seconds=20):\n"
        "    socket.create_connection(('127.0.0.1', port), seconds, source_address=(source, 0)).close()\n"
        "def shut_out(port, source):\n"
        "    try:\n"
        "        reach(port, source, 0.2)\n"
        "    except TimeoutError:\n"
        "        return True\n"
        "    return False\n"
        "first = MooncakeRegions(trusted_peers=['127.0.0.7'])\n"
        "ports = first._engine._ports\n"
        "assert len(ports) == 2 and int(first._engine.session.partition(':')[2]) in ports, ports\n"
        "for port in ports:\n"
        "    reach(port, '127.0.0.1'), reach(port, '127.0.0.7')\n"
        "    assert shut_out(port, '127.0.0.8')\n"
        "MooncakeRegions(trusted_peers=['127.0.0.8/31'])\n"
        "reach(ports[0], '127.0.0.8'), reach(ports[0], '127.0.0.7')\n"
        "assert shut_out(ports[0], '127.0.0.10')\n"
        "MooncakeRegions(trusted_peers=['node-7'])\n"
        "reach(ports[0], '127.0.0.10')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "open to every host" in done.stderr
    assert "node-7" in done.stderr
