from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from kvferry.core import placement
from kvferry.core.arena import Arena, ArenaMap
from kvferry.core.errors import ConfigError
from kvferry.core.placement import HUGEPAGE_NBYTES, Placement, free_hugepages, numa_nodes


def can_place(wanted: Placement, nbytes: int) -> bool:
    try:
        wanted.check(nbytes)
    except ConfigError:
        return False
    return True


def test_hugepages_that_are_not_there_are_refused_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_POOL", tmp_path / "none")
    with pytest.raises(ConfigError, match="turn hugepages off"):
        Arena(4 << 20, placement=Placement(hugepages=True))
    monkeypatch.setattr(placement, "_POOL", tmp_path)
    (tmp_path / "free_hugepages").write_text("5\n")
    (tmp_path / "resv_hugepages").write_text("2\n")
    assert free_hugepages() == 3
    Placement(hugepages=True).check(3 * HUGEPAGE_NBYTES)
    for nbytes in (3 * HUGEPAGE_NBYTES + 1, HUGEPAGE_NBYTES - 1):
        with pytest.raises(ConfigError, match=rf"{nbytes} bytes .* 3 free pages .* vm.nr_hugepages"):
            Placement(hugepages=True).check(nbytes)


def test_a_node_that_is_not_there_is_refused_with_those_that_are() -> None:
    missing = max(numa_nodes()) + 1
    with pytest.raises(ConfigError, match=rf"numa_node is {missing}, this host has"):
        Arena(1 << 20, placement=Placement(numa_node=missing))


def test_a_machine_whose_calls_are_not_known_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    with pytest.raises(ConfigError, match="abacus"):
        Placement(numa_node=numa_nodes()[0]).check(1 << 20)


def test_an_arena_on_a_node() -> None:
    wanted = Placement(numa_node=numa_nodes()[0])
    if not can_place(wanted, 1 << 20):
        pytest.skip("this kernel or container does not place memory (mbind)")
    arena = Arena(1 << 20, placement=wanted)
    slot = arena.allocate(100_000)
    assert slot is not None
    arena.view(slot)[:] = b"x" * 100_000
    client = ArenaMap.from_fds(arena.layout(), arena.descriptors())
    assert client.view(slot) == b"x" * 100_000
    client.close()
    arena.close()


def test_an_arena_of_hugepages() -> None:
    wanted = Placement(hugepages=True)
    if not can_place(wanted, 4 << 20):
        pytest.skip("this kernel has no two free pages of 2 MiB (vm.nr_hugepages)")
    arena = Arena((4 << 20) + mmap.PAGESIZE, placement=wanted)
    assert arena.capacity_nbytes == 4 << 20
    slot = arena.allocate(3 << 20)
    assert slot is not None
    arena.view(slot)[:] = b"x" * (3 << 20)
    client = ArenaMap.from_fds(arena.layout(), arena.descriptors())
    assert client.view(slot)[-1] == ord("x")
    client.close()
    arena.close()
