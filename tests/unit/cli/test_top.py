"""``kvferry top`` in narrow terminals and pipes: nothing is cut, and a pipe gets every look."""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from kvferry.cli import top as top_module
from kvferry.cli.daemon_http import Port
from kvferry.daemon.status import (
    DaemonStatus,
    OperationStatus,
    ProcessStatus,
    SlowStatus,
    TenantStatus,
    TierStatus,
)


def status(uptime_s: float = 1.0) -> DaemonStatus:
    tiers = tuple(
        TierStatus(name=name, entries=1_000_000, used_nbytes=10 << 30, capacity_nbytes=64 << 30, hit_blocks=5)
        for name in ("dram", "disk")
    )
    counts: Any = dict.fromkeys(
        ("pinned_nbytes", "quarantined_nbytes", "leases", "saved_blocks", "evicted_blocks", "expired_leases"),
        0,
    )
    tenant = TenantStatus(
        name="default", used_nbytes=1, capacity_nbytes=2, entries=1, lookups=10, lookup_blocks=10,
        hit_blocks=5, tiers=tiers, namespaces=(), **counts,
    )  # fmt: skip
    operation = OperationStatus(
        verb="end_leases", count=123_456, failed=12, seconds=1.0, blocks=1, nbytes=10 << 30, p50_s=0.0001,
        p99_s=0.0025,
    )  # fmt: skip
    slow = SlowStatus(
        at=0.0, verb="load", seconds=0.5, session="engine-of-somebody-with-a-name", tenant="default",
        blocks=256, nbytes=1, failed=False,
    )  # fmt: skip
    return DaemonStatus(
        version="1", at=5.0, uptime_s=uptime_s, draining=False, addresses=("unix:///d.sock",), http="http://x",
        arena="shared", connections=1, max_connections=10, sessions_left_behind=0, requests_under_way=0,
        process=ProcessStatus(pid=1, cpu_s=1.0, resident_nbytes=1), tenants=(tenant,), clients=(),
        operations=(operation,), slowest=(slow,), faults=(), fault_counts={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "shown", "gone"),
    [
        (40, ["10 GiB", "64 GiB", "works", "123456", "2.5 ms"], ["use ", "client ", "bytes", "…"]),
        (60, ["10 GiB", "works", "1000000", "50.0 %", "10 GiB", "2.5 ms"], ["use ", "client ", "…"]),
        (100, ["█", "works", "1000000", "50.0 %", "engine-of-somebody-with-a-name"], ["…"]),
    ],
)
def test_what_is_shown_is_whole(width: int, shown: list[str], gone: list[str]) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(top_module._view(status(2.0), status(1.0), width))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for word in shown:
        assert word in text, text
    for word in gone:
        assert word not in text, text
    assert max(map(len, text.splitlines())) <= width


def test_why_a_tier_fails_is_shown_and_nothing_that_is_not_the_tenant_s() -> None:
    now = status()
    (tenant,) = now.tenants
    broken = structs.replace(tenant.tiers[1], problems={"server h:6379": "the password is wrong"})
    tenant = structs.replace(tenant, tiers=(tenant.tiers[0], broken), load_blocks=4, loaded_blocks=1)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    console.print(top_module._view(structs.replace(now, tenants=(tenant,), tenant="a"), None, 100))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "tier disk, server h:6379: the password is wrong" in text
    assert "50.0 % of lookups, 25.0 % of loads" in text
    assert "under way" not in text


def test_a_pipe_gets_every_look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter([status(float(n)) for n in range(1, 4)])

    def of(*_: Any, **__: Any) -> Port:
        return Port("http://127.0.0.1:9")

    monkeypatch.setattr(Port, "of", of)
    monkeypatch.setattr(Port, "status", lambda _port: next(looks))
    top_module.top(interval=0.2, count=3)
    out = capsys.readouterr().out
    assert [out.count(word) for word in ("up for", "…", "0 requests/s", "\x1b")] == [3, 1, 2, 0]
    assert out.endswith("\n")
