import fcntl
import mmap
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from kvferry.core import arena as arena_module
from kvferry.core.arena import Arena, ArenaLayout, ArenaMap, MappedSegment, Segment, SegmentInfo, Slot
from kvferry.core.buffers import address_of
from kvferry.core.errors import CapacityError, ConfigError, ProtocolError, StoreError

PAGE = mmap.PAGESIZE


def test_slots_are_page_aligned_apart_and_counted() -> None:
    arena = Arena(16 * PAGE)
    sizes = [1, PAGE, PAGE + 1, 3 * PAGE, 0]
    slots = [arena.allocate(n) for n in sizes]
    views = []
    for number, slot in enumerate(slots):
        assert slot is not None
        assert slot.offset % PAGE == 0
        view = arena.view(slot)
        assert len(view) == sizes[number]
        view[:] = bytes([number + 1]) * len(view)
        views.append(view)
    for number, view in enumerate(views):
        assert view == bytes([number + 1]) * sizes[number]
    assert arena.used_nbytes == (1 + 1 + 2 + 3 + 1) * PAGE
    assert arena.free_nbytes == 8 * PAGE
    arena.close()


def test_a_limit_of_file_sizes_below_a_segment_is_refused_at_once() -> None:
    """And not with each save, for ever."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(ConfigError, match=rf"files of 40000 bytes.* takes {16 * PAGE}.*ulimit -f"):
            Arena(16 * PAGE)
        Arena(16 * PAGE, shared=False).close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_freed_slot_is_told_apart_and_freed_once() -> None:
    arena = Arena(2 * PAGE)
    first = arena.allocate(PAGE)
    assert first is not None
    assert arena.is_current(first)
    arena.free(first)
    assert not arena.is_current(first)
    with pytest.raises(StoreError, match="freed already"):
        arena.free(first)
    second = arena.allocate(2 * PAGE)
    assert second is not None
    assert second.offset == first.offset
    assert second.generation == first.generation + 1
    with pytest.raises(StoreError):
        arena.free(first)
    assert arena.is_current(second)
    assert arena.used_nbytes == 2 * PAGE
    arena.close()
    assert not arena.is_current(second)


def test_it_grows_by_segments_up_to_its_capacity() -> None:
    arena = Arena(100 * PAGE, segment_nbytes=32 * PAGE)
    assert arena.mapped_nbytes == 0
    slots = [arena.allocate(2 * PAGE) for _ in range(50)]
    assert None not in slots
    assert {s.segment for s in slots if s is not None} == {0, 1, 2}
    assert arena.mapped_nbytes == arena.capacity_nbytes == 100 * PAGE
    assert arena.allocate(1) is None
    assert arena.free_nbytes == 0
    with pytest.raises(CapacityError, match=str(101 * PAGE)):
        arena.allocate(101 * PAGE)
    with pytest.raises(ValueError, match="-1"):
        arena.allocate(-1)
    slot = slots[7]
    assert slot is not None
    arena.free(slot)
    assert arena.allocate(PAGE) is not None
    with pytest.raises(StoreError, match="3 segments"):
        arena.view(Slot(3, 0, 1, 0))
    with pytest.raises(StoreError, match="inside segment"):
        arena.view(Slot(0, 31 * PAGE, 2 * PAGE, 0))
    with pytest.raises(StoreError, match="inside segment"):
        arena.view(Slot(0, 1, 1, 0))
    with pytest.raises(StoreError, match="outside segment"):
        arena.is_current(Slot(0, -PAGE, 1, 0))
    arena.close()


def test_a_big_slot_gets_a_segment_that_holds_it() -> None:
    arena = Arena(64 * PAGE, segment_nbytes=4 * PAGE)
    slot = arena.allocate(40 * PAGE)
    assert slot is not None
    assert arena.allocate(24 * PAGE) is not None
    assert arena.allocate(1) is None


def test_sizes_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """C058: more than there is is not touched; wanted and available are named."""
    with pytest.raises(ConfigError, match="4095"):
        Arena(4095)
    with pytest.raises(ConfigError, match="segment_nbytes"):
        Arena(PAGE, segment_nbytes=0)
    available = arena_module.available_memory()
    with pytest.raises(ConfigError, match=str(1 << 60)) as caught:
        Arena(1 << 60)
    shown = [int(word) for word in str(caught.value).split() if word.isdigit()]
    assert any(abs(n - available) < available // 2 for n in shown if n != 1 << 60)
    other = tmp_path / "meminfo"
    other.write_text("MemTotal: 5 kB\n")
    monkeypatch.setattr(arena_module, "_MEMINFO", other)
    with pytest.raises(StoreError, match="MemAvailable"):
        Arena(PAGE)


def test_memory_that_ran_short_since_leaves_what_is_mapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena(100 * PAGE, segment_nbytes=50 * PAGE)
    for _ in range(50):
        assert arena.allocate(PAGE) is not None
    monkeypatch.setattr(arena_module, "available_memory", lambda: PAGE)
    assert arena.allocate(PAGE) is None
    assert arena.allocate(PAGE) is None
    assert len(caplog.records) == 1
    assert f"{50 * PAGE} of {100 * PAGE} bytes" in caplog.text
    monkeypatch.undo()
    assert arena.allocate(PAGE) is not None


def test_a_kernel_without_memory_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        arena = Arena(4 * PAGE)
        assert arena.allocate(PAGE) is None
    real, calls = fcntl.fcntl, []

    def refuse_second(fd: int, command: int, argument: int = 0) -> int:
        calls.append(command)
        if len(calls) == 2:
            raise OSError(1, "Operation not permitted")
        return int(real(fd, command, argument))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse_second)
        with pytest.raises(OSError, match="not permitted"):
            Segment(0, PAGE, "default")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_segment_is_sealed() -> None:
    segment = Segment(0, 2 * PAGE, "default")
    for fd in (segment.data_fd, segment.generations_fd):
        for size in (0, 64 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(fd)
    segment.close()
    segment.close()
    with pytest.raises(StoreError, match="closed"):
        segment.view(Slot(0, 0, 1, 0))


@pytest.mark.parametrize("shared", [True, False])
def test_nobody_else_can_write_generations_nor_unshared_data(shared: bool) -> None:
    segment = Segment(0, 2 * PAGE, "default", shared=shared)
    fds = [segment.generations_fd] if shared else [segment.generations_fd, segment.data_fd]
    for fd in fds:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        for descriptor in (fd, again):
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"x", 0)
        os.close(again)
    if not shared:
        with pytest.raises(PermissionError):
            MappedSegment(segment.info, segment.data_fd, segment.generations_fd, writable=True)
    mapped = MappedSegment(segment.info, segment.data_fd, segment.generations_fd)
    segment.view(Slot(0, PAGE, 3, 0))[:] = b"abc"
    segment.raise_generation(PAGE)
    assert mapped.view(Slot(0, PAGE, 3, 0)).tobytes() == b"abc"
    assert mapped.view(Slot(0, PAGE, 3, 0)).readonly
    assert (mapped.generation(0), mapped.generation(PAGE)) == (0, 1)
    segment.close()


def test_a_descriptor_that_could_kill_its_reader_is_refused(tmp_path: Path) -> None:
    segment = Segment(0, 2 * PAGE, "default")
    plain = os.memfd_create("plain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 2 * PAGE)
    with pytest.raises(ProtocolError, match="not sealed"):
        MappedSegment(segment.info, plain, segment.generations_fd)
    with pytest.raises(ProtocolError, match="generations memfd is not sealed"):
        MappedSegment(segment.info, segment.data_fd, plain)
    with pytest.raises(ProtocolError, match=f"{2 * PAGE} bytes, not {4 * PAGE}"):
        MappedSegment(SegmentInfo(0, 4 * PAGE, "default"), segment.data_fd, segment.generations_fd)
    with pytest.raises(ProtocolError, match="not 0"):
        MappedSegment(SegmentInfo(0, 0, "default"), segment.data_fd, segment.generations_fd)
    with (tmp_path / "file").open("w+b") as file, pytest.raises(ProtocolError, match="no memfd"):
        MappedSegment(segment.info, file.fileno(), segment.generations_fd)
    os.close(plain)
    segment.close()


def test_a_map_grows_and_stays_with_its_tenant() -> None:
    arena = Arena(32 * PAGE, tenant="a", segment_nbytes=16 * PAGE)
    first, *_ = [arena.allocate(PAGE) for _ in range(16)]
    assert first is not None
    mapped = ArenaMap.from_fds(arena.layout(), arena.descriptors())
    assert (mapped.tenant, mapped.epoch) == ("a", arena.epoch)
    second = arena.allocate(PAGE)
    assert second is not None
    arena.view(second)[:] = b"2" * PAGE
    with pytest.raises(StoreError, match="not mapped"):
        mapped.view(second)
    mapped.add(arena.layout().segments[1], *arena.descriptors()[1])
    assert mapped.view(second) == b"2" * PAGE
    assert mapped.is_current(second)
    arena.free(second)
    assert not mapped.is_current(second)
    with pytest.raises(ConfigError, match="tenant b"):
        mapped.add(SegmentInfo(2, PAGE, "b"), *arena.descriptors()[0])
    with pytest.raises(ValueError, match="zip"):
        ArenaMap.from_fds(arena.layout(), [])
    arena.close()
    with pytest.raises(StoreError, match="closed"):
        arena.allocate(1)
    arena.free(first)  # after the end nothing is left to do
    mapped.close()
    with pytest.raises(StoreError):
        mapped.is_current(first)


CHILD = """
import sys, msgspec
from kvferry.core.arena import ArenaLayout, ArenaMap, Slot
layout = msgspec.json.decode(sys.argv[1], type=ArenaLayout)
slot = msgspec.json.decode(sys.argv[2], type=Slot)
arena = ArenaMap.from_fds(layout, [tuple(map(int, sys.argv[3:5]))], writable=True)
assert arena.is_current(slot)
view = arena.view(slot)
assert view == b"from parent"
view[:] = b"from child!"
print("written", flush=True)
sys.stdin.readline()
print(arena.is_current(slot), flush=True)
"""


def test_another_process_reads_writes_and_sees_the_generation() -> None:
    arena = Arena(4 * PAGE)
    slot = arena.allocate(11)
    assert slot is not None
    arena.view(slot)[:] = b"from parent"
    (fds,) = arena.descriptors()
    layout, plain = (msgspec.json.encode(x).decode() for x in (arena.layout(), slot))
    assert msgspec.json.decode(layout, type=ArenaLayout) == arena.layout()
    command = [sys.executable, "-c", CHILD, layout, plain, *map(str, fds)]
    with subprocess.Popen(
        command, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        assert arena.view(slot).tobytes() == b"from child!"
        arena.free(slot)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "False\n"
        child.stdin.close()
        assert child.wait(30) == 0
    arena.close()


def test_many_mapped_slots_at_once() -> None:
    arena = Arena(256 * PAGE, segment_nbytes=8 * PAGE)
    slots = arena.allocate_many(40, PAGE + 1)
    assert slots is not None
    assert len({slot.segment for slot in slots}) > 1
    for number, slot in enumerate(slots):
        arena.view(slot)[:] = bytes([number]) * (PAGE + 1)
    words = [word for slot in slots for word in (slot.segment, slot.offset, slot.generation)]
    mapped = ArenaMap.from_fds(arena.layout(), arena.descriptors(), writable=True)
    found = mapped.slots(words, PAGE + 1)
    assert [bytes(found.view(n)) for n in range(40)] == [bytes([n]) * (PAGE + 1) for n in range(40)]
    assert (found.view(0).readonly, found.read_only().view(0).readonly) == (False, True)
    assert found.addresses() == [address_of(found.view(n)) for n in range(40)]
    assert found.first_stale() is None
    arena.free(slots[39])
    arena.free(slots[5])
    assert (found.first_stale(), found.read_only().first_stale()) == (5, 5)
    mapped.close()
    assert bytes(found.view(7)) == bytes([7]) * (PAGE + 1)  # the memory goes with the last that uses it
    arena.close()


@pytest.mark.parametrize("offset", [8 * PAGE - PAGE, 1 << 40, (1 << 64) - PAGE])
def test_mapped_slots_lie_inside_their_segment(offset: int) -> None:
    arena = Arena(8 * PAGE, segment_nbytes=8 * PAGE)
    arena.allocate(PAGE)
    mapped = ArenaMap.from_fds(arena.layout(), arena.descriptors(), writable=True)
    found = mapped.slots([0, 0, 0, 0, offset, 0], 2 * PAGE)
    assert len(found.view(0)) == 2 * PAGE
    for call in (lambda: found.view(1), found.addresses):
        with pytest.raises(StoreError, match=f"of {2 * PAGE} bytes at {offset} is not inside segment 0"):
            call()
    if offset >= 1 << 40:
        with pytest.raises(StoreError, match="is not inside segment 0"):
            found.first_stale()
    with pytest.raises(StoreError, match="segment 1 is not mapped here"):
        mapped.slots([1, 0, 0], PAGE)
    only_read = ArenaMap.from_fds(arena.layout(), arena.descriptors()).slots([0, 0, 0], PAGE)
    with pytest.raises(StoreError, match="segment 0 is mapped read-only"):
        only_read.addresses()
    arena.close()


def test_views_outlive_close() -> None:
    arena = Arena(PAGE)
    slot = arena.allocate(4)
    assert slot is not None
    view = arena.view(slot)
    arena.close()
    arena.close()
    view[:] = b"safe"
    assert view.tobytes() == b"safe"


def test_threads_share_an_arena() -> None:
    arena = Arena(64 * PAGE)
    failures: list[str] = []

    def work(mark: int) -> None:
        for round_ in range(200):
            slot = arena.allocate(1 + (mark * 7 + round_) % (3 * PAGE))
            if slot is None:
                continue
            view = arena.view(slot)
            view[:] = bytes([mark]) * len(view)
            if view != bytes([mark]) * len(view):
                failures.append(f"{slot} shared")
            arena.free(slot)

    threads = [threading.Thread(target=work, args=(n,), name=f"kvferry-test-{n}") for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert arena.used_nbytes == 0
    arena.close()


def test_many_slots_come_all_or_none() -> None:
    arena = Arena(8 * PAGE, segment_nbytes=4 * PAGE)
    slots = arena.allocate_many(5, PAGE)
    assert slots is not None
    assert len({(slot.segment, slot.offset) for slot in slots}) == 5
    arena.write(slots, [memoryview(bytes([n]) * PAGE) for n in range(5)])
    assert [bytes(arena.view(slot)[:1])[0] for slot in slots] == list(range(5))
    assert arena.allocate_many(4, PAGE) is None
    assert arena.free_nbytes == 3 * PAGE
    assert arena.allocate_many(0, 100 * PAGE) == []
    with pytest.raises(CapacityError):
        arena.allocate_many(1, 9 * PAGE)
    with pytest.raises(ValueError, match="copy of 1 bytes"):
        arena.write(slots[:1], [memoryview(b"x")])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        arena.write(slots, [])
    for slot in slots:
        arena.free(slot)
    whole = arena.allocate_many(2, 4 * PAGE)
    assert whole is not None
    arena.close()
    with pytest.raises(StoreError, match="closed"):
        arena.write(whole, [memoryview(bytes(4 * PAGE))] * 2)
    with pytest.raises(StoreError, match="closed"):
        arena.allocate_many(1, PAGE)
