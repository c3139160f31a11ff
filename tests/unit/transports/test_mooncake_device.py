"""Windows into device memory, with a stand-in for the library: nothing may look at what lies there."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, TransportError
from kvferry.transports.mooncake import MooncakeRegions, device_memory, engine
from kvferry.transports.mooncake.grants import WindowGrant
from kvferry.transports.region import RegionPart

POINTER = 0x2000_0000_0000  # nothing is mapped there: whoever looks ends the process
NBYTES = 64 << 20


class Library:
    """Keeps what it is asked, and says that all is well."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.moved: list[tuple[str, int, int, int]] = []
        self._handles = itertools.count(1)

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        assert (protocol, devices) == ("rdma", "mlx5_0")
        return 0

    def get_rpc_port(self) -> int:
        return 4321

    def batch_register_memory(self, addresses: list[int], sizes: list[int]) -> int:
        self.registered |= dict(zip(addresses, sizes, strict=True))
        return 0

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        for address in addresses:
            del self.registered[address]
        return 0

    def send_probe(self, session: str) -> int:
        return 0

    def _move(self, what: str, local: list[int], remote: list[int], sizes: list[int]) -> int:
        (mine,), (theirs,), (nbytes,) = local, remote, sizes
        self.moved.append((what, mine, theirs, nbytes))
        return next(self._handles)

    def batch_transfer_async_write(self, _: str, *where: list[int]) -> int:
        return self._move("write", *where)

    def batch_transfer_async_read(self, _: str, *where: list[int]) -> int:
        return self._move("read", *where)

    def transfer_check_status(self, handle: int) -> int:
        return engine.DONE


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    found = Library()
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(engine, "_RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(engine, "_load", lambda: lambda: found)
    monkeypatch.setattr(engine, "_engines", {})
    return found


@pytest.fixture
def regions(library: Library) -> Iterator[MooncakeRegions]:
    found = MooncakeRegions(trusted_peers=["127.0.0.1"], wire="rdma", devices=["mlx5_0"])
    yield found
    found.close()
    assert library.registered == {}


def test_a_window_is_opened_on_device_memory_itself(regions: MooncakeRegions, library: Library) -> None:
    window = regions.open_window(device_memory(POINTER, NBYTES), "write")
    grant = WindowGrant.parse(window.grant)
    assert (grant.address, grant.nbytes) == (POINTER, NBYTES)
    assert library.registered == {POINTER: NBYTES}
    window.close()


@pytest.mark.parametrize("access", ["write", "read"])
def test_device_memory_is_moved_from_and_to_its_own_place(
    regions: MooncakeRegions, library: Library, access: str
) -> None:
    theirs, mine = POINTER + (1 << 40), device_memory(POINTER, NBYTES)
    window = WindowGrant.new("127.0.0.1:9", theirs, NBYTES, "write" if access == "write" else "read")
    move = regions.write if access == "write" else regions.read
    move(window.pack(), [RegionPart(mine[4096:8192], 100)]).wait(deadline_in(20))
    assert library.moved == [(access, POINTER + 4096, theirs + 100, 4096)]


def test_the_owner_is_kept_for_as_long_as_a_view() -> None:
    class Tensor:
        pass

    tensor = Tensor()
    ended = weakref.ref(tensor)
    view = device_memory(POINTER, NBYTES, tensor)[100:200]
    del tensor
    gc.collect()
    assert ended() is not None
    view.release()
    del view
    gc.collect()
    assert ended() is None


def test_without_rdma_it_is_refused(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(library, "initialize", lambda *_: 0)
    with closing(MooncakeRegions(trusted_peers=["127.0.0.1"])) as regions, pytest.raises(TransportError):
        regions.open_window(device_memory(POINTER, NBYTES), "write")


@pytest.mark.parametrize(("pointer", "nbytes"), [(0, 1), (-5, 1), (POINTER, 0), (POINTER, -1)])
def test_nothing_is_no_memory(pointer: int, nbytes: int) -> None:
    with pytest.raises(ConfigError, match="pointer"):
        device_memory(pointer, nbytes)
