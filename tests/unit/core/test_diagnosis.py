from __future__ import annotations

import ctypes
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.core import diagnosis_host as host
from kvferry.core.diagnosis import Finding, Probe, collect
from kvferry.core.native import Native


def _found(name: str, **asked: object) -> list[Finding]:
    defaults: dict[str, object] = {"dram_nbytes": 1 << 20, "hugepages": False, "numa_node": None}
    probes = host.host_probes(**{**defaults, **asked})  # type: ignore[arg-type]
    return [one for _, label, probe in probes if label == name for one in probe()]


# -- collecting ----------------------------------------------------------------------------------------


def test_a_probe_that_hangs_or_fails_is_a_finding_and_the_others_stand() -> None:
    never = threading.Event()

    def hang() -> list[Finding]:
        never.wait(60)
        return []

    def fail() -> Iterator[Finding]:
        yield Finding("a", "begun", "")
        raise ZeroDivisionError("in a library")

    good: Probe = lambda: [Finding("a", "good", "yes")]  # noqa: E731
    started = time.monotonic()
    found = collect(
        [("a", "hang", hang), ("a", "fail", fail), ("a", "good", good), ("b", "asked", hang)],
        asked=["b"], timeout_s=0.2,
    )  # fmt: skip
    assert time.monotonic() - started < 30
    never.set()
    assert [(one.name, one.level) for one in found] == [
        ("hang", "warn"), ("fail", "warn"), ("good", "ok"), ("asked", "fail"),
    ]  # fmt: skip
    assert "within 0.2 s" in found[0].value
    assert "ZeroDivisionError: in a library" in found[1].value
    assert all(one.remedy for one in found if one.level != "ok")


# -- the host --------------------------------------------------------------------------------------------


def test_what_is_not_well_has_a_reason_and_a_remedy() -> None:
    probes = host.host_probes(dram_nbytes=1 << 62, hugepages=True, numa_node=1000)
    found = [one for _, _, probe in probes for one in probe()]
    assert {one.area for one in found} == {"versions", "cpu", "limits", "memory"}
    for one in found:
        assert one.value, one
        assert one.level == "ok" or (one.why and one.remedy), one
    assert {one.name for one in found if one.level == "fail"} == {"2 MiB pages", "NUMA nodes"}


def test_versions_are_known_without_importing_torch() -> None:
    before = "torch" in sys.modules
    found = {one.name: one.value for one in _found("versions")}
    assert found["Python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert set(found) == {"kvferry", "Python", "kernel", "torch"}
    assert ("torch" in sys.modules) == before


@pytest.mark.parametrize(("soft", "level"), [(1024, "warn"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, level: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (soft, resource.RLIM_INFINITY))
    (found,) = _found("open files")
    assert found.level == level
    assert found.remedy == ("ulimit -n 65536" if level == "warn" else "")


def test_a_hard_limit_of_files_is_no_remedy_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (64, 64))
    (found,) = _found("open files")
    assert found.level == "warn"
    assert "LimitNOFILE=65536" in found.remedy


def test_a_limit_of_the_size_of_files_is_one_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (100 << 10, 100 << 10))
    memfd = next(one for one in _found("shared memory") if one.name == "memfd")
    assert (memfd.level, "100 KiB" in memfd.value) == ("warn", True)
    assert memfd.remedy.startswith("ulimit -f unlimited")


def test_a_low_memlock_limit_matters_where_there_is_rdma(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (65536, 65536))
    monkeypatch.setattr(host, "_RDMA", tmp_path)
    assert _found("locked memory")[0].level == "ok"
    (tmp_path / "mlx5_0").mkdir()
    limit = _found("locked memory")[0]
    assert limit.level == "warn"
    assert "64 KiB" in limit.value
    assert "ulimit -l unlimited" in limit.remedy


@pytest.mark.parametrize("works", [True, False])
def test_pinning_is_tried(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    class Libc:
        def mlock(self, _address: object, _nbytes: object) -> int:
            ctypes.set_errno(12)
            return 0 if works else -1

        def munlock(self, _address: object, _nbytes: object) -> int:
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_args, **_kwargs: Libc())
    found = _found("locked memory")[1]
    assert found.level == ("ok" if works else "warn")
    assert ("Cannot allocate memory" in found.value) != works


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/a/b", {"a/memory.max": "900", "a/memory.current": "500", "a/b/memory.max": "max"}, (900, 500)),
        (
            "0::/a/b",
            {
                "a/memory.max": "900",
                "a/memory.current": "850",
                "a/b/memory.max": "500",
                "a/b/memory.current": "100",
            },
            (900, 850),
        ),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "5"}, None),
        (
            "4:memory:/p/c\n0::/",
            {
                "memory/p/memory.limit_in_bytes": "1000",
                "memory/p/memory.usage_in_bytes": "100",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "100",
            },
            (1000, 100),
        ),
        ("", {}, None),
    ],
)
def test_the_tightest_control_group_counts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lines: str,
    files: dict[str, str],
    expected: tuple[int, int] | None,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "cgroup").write_text(lines)
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_V1_ROOT", tmp_path / "memory")
    monkeypatch.setattr(host, "_V2_ROOT", tmp_path)
    assert host.memory_limit() == expected


def test_memory_that_cannot_be_had_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 8 << 30)
    monkeypatch.setattr(host, "memory_limit", lambda: (2 << 30, 1 << 30))
    levels = [_found("memory", dram_nbytes=n << 30, other_nbytes=1 << 30)[-1].level for n in (1, 2, 9)]
    assert levels == ["ok", "fail", "fail"]
    assert "store.dram_capacity" in _found("memory", dram_nbytes=9 << 30)[-1].remedy


def test_without_native_kernels_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "native", lambda: Native(None, reason="it was not built: install gcc"))
    found = _found("native kernels")[0]
    assert (found.level, found.remedy) == ("warn", "it was not built: install gcc")


def test_a_slow_clock_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "clock").write_text("hpet\n")
    monkeypatch.setattr(host, "_CLOCK", tmp_path / "clock")
    (found,) = _found("clock")
    assert (found.value, found.level) == ("hpet", "warn")


def test_a_small_shm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_SHM", tmp_path / "none")
    assert [one.level for one in _found("shared memory")] == ["ok", "warn"]
