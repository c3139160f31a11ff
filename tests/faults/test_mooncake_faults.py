"""What Mooncake's library lets a peer do that does not keep to our rules, and peers that hang or end.

The requests here go to the library with any address, past the checks that a ``MooncakeRegions`` makes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import TransferTimeoutError, TransportError
from kvferry.testing.blocks import stop_process
from kvferry.transports.mooncake import MooncakeRegions, shared_memory, unavailable
from kvferry.transports.mooncake.engine import DONE, FAILED
from kvferry.transports.mooncake.grants import WindowGrant
from kvferry.transports.region import Access, RegionPart, Window

pytestmark = pytest.mark.skipif(bool(unavailable()) and "CI" not in os.environ, reason=unavailable())

PAGE = 4096
NBYTES = 64 << 10
OWNER = """
import sys
import numpy as np
from kvferry.transports.mooncake import MooncakeRegions, shared_memory
memory = shared_memory(64 << 20)
endpoint = MooncakeRegions(trusted_peers=["127.0.0.1"])
window = endpoint.open_window(memory, "write")
print(window.grant.hex(), flush=True)
for line in sys.stdin:
    print(int(np.frombuffer(memory, np.uint8).sum()), flush=True)
"""


@contextlib.contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """A process with a window of 64 MiB, and its grant; for each line it says the sum of its bytes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], env=environment, stdin=pipe, stdout=pipe, text=True
    ) as child:
        try:
            assert child.stdout is not None
            yield child, bytes.fromhex(child.stdout.readline())
        finally:
            child.kill()


@pytest.fixture
def regions() -> Iterator[MooncakeRegions]:
    with closing(MooncakeRegions(trusted_peers=["127.0.0.1"])) as endpoint:
        yield endpoint


def raw(regions: MooncakeRegions, access: Access, address: int, nbytes: int, local: memoryview) -> int:
    """A request as the library takes it; how it ended."""
    engine = regions._engine
    handle = engine.submit(engine.session, access, _address(local), address, nbytes)
    limit = deadline_in(20)
    while handle and not is_past(limit):
        if (status := engine.status(handle)) in (DONE, FAILED):
            return status
        time.sleep(0.0005)
    return FAILED if not handle else 0


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _alias(window: Window) -> int:
    return WindowGrant.parse(window.grant).address


# ---- C130 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("access", ["read", "write"])
def test_raw_requests_outside_a_window(regions: MooncakeRegions, access: Access) -> None:
    """At 0, before, across and after it, at the memory's own address; then the process lives and idles."""
    memory, local = shared_memory(3 * NBYTES), memoryview(bytearray(b"\x09" * 2 * NBYTES))
    memory[:] = b"\x05" * len(memory)
    with closing(regions.open_window(memory[NBYTES : 2 * NBYTES], access)) as window:
        start = _alias(window)
        own = _address(memory)
        for address, nbytes in (
            (0, 8),
            (start - 8, 16),
            (start - PAGE, PAGE),
            (start + NBYTES - 1, 2),
            (start + NBYTES, 1),
            (start + (1 << 40), 64),
            (own + NBYTES, 64),
        ):
            assert raw(regions, access, address, nbytes, local) == FAILED, hex(address)
        assert bytes(local) == b"\x09" * len(local), "bytes came out"
        assert bytes(memory) == b"\x05" * len(memory), "bytes were changed"
        # after four refusals in a row the library may refuse, or hold up, what comes in the next second
        assert any(raw(regions, access, start, NBYTES, local) == DONE for _ in range(10)), "it works no more"
    assert any(_idles() for _ in range(50)), "it spins"


def _idles() -> bool:
    """Whether this process uses next to nothing of a core meanwhile; other threads may run now and then."""
    used, started = time.process_time(), time.monotonic()
    time.sleep(0.4)  # what is measured, not what is waited for
    return time.process_time() - used < 0.25 * (time.monotonic() - started)


def test_raw_writes_into_a_window_for_reading(regions: MooncakeRegions) -> None:
    """The library does not know what a window is for; the kernel does."""
    memory, local = shared_memory(NBYTES), memoryview(bytearray(b"\x09" * NBYTES))
    with closing(regions.open_window(memory, "read")) as window:
        assert raw(regions, "write", _alias(window), NBYTES, local) == FAILED
        assert bytes(memory) == bytes(NBYTES)
        assert raw(regions, "read", _alias(window), NBYTES, local) == DONE
        assert bytes(local) == bytes(NBYTES)


@pytest.mark.parametrize("access", ["read", "write"])
def test_raw_requests_with_the_address_of_a_closed_window(regions: MooncakeRegions, access: Access) -> None:
    """Also when the same memory is open again: that window has another address."""
    memory, local = shared_memory(NBYTES), memoryview(bytearray(b"\x09" * NBYTES))
    with closing(regions.open_window(memory, access)) as window:
        stale = _alias(window)
        assert raw(regions, access, stale, 16, local) == DONE
    memory[:] = b"\x05" * NBYTES
    local[:] = b"\x09" * NBYTES
    assert raw(regions, access, stale, 16, local) == FAILED
    with closing(regions.open_window(memory, access)):
        assert raw(regions, access, stale, 16, local) == FAILED
    assert bytes(memory) == b"\x05" * NBYTES
    assert bytes(local) == b"\x09" * NBYTES


# ---- peers that hang or end -------------------------------------------------------------------------


@pytest.mark.parametrize("met", [True, False])
def test_peer_that_is_stopped(regions: MooncakeRegions, *, met: bool) -> None:
    """Every call returns in time, others are not held up, and all is right once the peer goes on."""
    source = shared_memory(64 << 20)
    np.frombuffer(source, np.uint8)[:] = 1
    with owner() as (child, grant), owner() as (_, other):
        if met:
            regions.write(grant, [RegionPart(source[:10], 0)]).wait(deadline_in(20))
        stop_process(child.pid)
        started = time.monotonic()
        transfer = regions.write(grant, [RegionPart(source, 0)])
        with pytest.raises(TransferTimeoutError):
            transfer.wait(deadline_in(0.2))
        assert time.monotonic() - started < 15
        regions.write(other, [RegionPart(source[:100], 0)]).wait(deadline_in(20))
        child.send_signal(signal.SIGCONT)
        transfer.wait(deadline_in(60))
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        assert int(child.stdout.readline()) == 64 << 20


def test_peer_that_is_gone(regions: MooncakeRegions) -> None:
    source = shared_memory(PAGE)
    with owner() as (child, grant):
        regions.write(grant, [RegionPart(source, 0)]).wait(deadline_in(20))
        child.kill()
        child.wait()
    for _ in range(3):
        transfer = regions.write(grant, [RegionPart(source, 0)])
        with pytest.raises(TransportError) as caught:
            transfer.wait(deadline_in(20))
        assert not isinstance(caught.value, TransferTimeoutError)


def test_endpoint_closed_while_its_peer_hangs(
    regions: MooncakeRegions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.transports.mooncake.regions._CLOSE_S", 0.2)
    source = shared_memory(64 << 20)
    with owner() as (child, grant):
        regions.write(grant, [RegionPart(source[:10], 0)]).wait(deadline_in(20))
        stop_process(child.pid)
        transfer = regions.write(grant, [RegionPart(source, 0)])
        started = time.monotonic()
        regions.close()
        assert time.monotonic() - started < 20
        assert not transfer.poll()
        child.kill()
        with pytest.raises(TransportError, match="was closed"):
            transfer.wait(deadline_in(30))


def test_a_forked_child_is_told(regions: MooncakeRegions) -> None:
    code = (
        "import os, sys\n"
        "from kvferry.core.errors import TransportError\n"
        "from kvferry.transports.mooncake import MooncakeRegions, shared_memory\n"
        "endpoint = MooncakeRegions(trusted_peers=['127.0.0.1'])\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try:\n"
        "        endpoint.open_window(shared_memory(10), 'read')\n"
        "    except TransportError as error:\n"
        "        assert 'forked' in str(error)\n"
        "        endpoint.close()\n"
        "        os._exit(7)\n"
        "    os._exit(1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "endpoint.open_window(shared_memory(10), 'read').close()\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
