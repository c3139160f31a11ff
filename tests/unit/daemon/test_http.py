"""Status, metrics and readiness over HTTP, and what the port does not let clients do."""

from __future__ import annotations

import errno
import logging
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.cli import daemon_http
from kvferry.cli.app import main
from kvferry.cli.daemon_http import Port
from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, RequestError, TransferTimeoutError
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.daemon.admin import Reload
from kvferry.engine.gateway.metrics import GatewayMetrics
from kvferry.testing.blocks import save_blocks, small_spec, wait_until

from .conftest import Running

SPEC = small_spec("http")
DOC = Path(__file__).parents[3] / "docs" / "metrics.md"


def some_load(running: Running) -> None:
    """3 blocks saved, looked up with 1 more, and loaded."""
    ns = running.client.namespace(SPEC)
    keys = ns.keys([1] * 4 * SPEC.block_tokens)
    save_blocks(ns, keys[:3])
    assert ns.lookup(keys).prefix == 3
    with ns.load(keys, deadline=deadline_in(20)) as lease:
        assert len(lease) == 3


def exchange(running: Running, data: bytes) -> bytes:
    """What comes back until the daemon closes."""
    address = parse_url(running.http.url, default_port=0)
    with socket.create_connection((address.host, address.port or 0), timeout=30) as sock:
        sock.sendall(data)
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
        return b"".join(parts)


def test_status_tells_what_clients_did(running: Running) -> None:
    some_load(running)
    # a request is counted after its answer
    wait_until(lambda: any(one.verb == "load" for one in running.port.status().operations))
    status = running.port.status()
    (tenant,) = status.tenants
    assert (tenant.saved_blocks, tenant.lookup_blocks, tenant.hit_blocks) == (3, 4, 3)
    dram, disk = tenant.tiers
    assert (dram.name, dram.hit_blocks, disk.name, disk.hit_blocks) == ("dram", 3, "disk", 0)
    verbs = {operation.verb: operation for operation in status.operations}
    assert (verbs["load"].blocks, verbs["load"].nbytes) == (3, 3 * SPEC.block_nbytes)
    saved = [verbs[verb].blocks for verb in ("commit", "save") if verb in verbs]
    assert sum(saved) == 3
    assert [client.connections for client in status.clients] == [status.connections]
    assert {slow.verb for slow in status.slowest} >= {"load", "lookup"}
    assert status.http == running.http.url


def test_faults_are_shown_without_secrets(running: Running) -> None:
    logging.getLogger("kvferry.store").warning("tier x: password=hunter2 was refused")
    wait_until(lambda: running.port.status().fault_counts["warning"] == 1)
    (fault,) = running.port.status().faults
    assert "tier x" in fault.message
    assert "hunter2" not in fault.message


def test_metrics_are_clean_and_documented_both_ways(running: Running) -> None:
    some_load(running)
    running.port.ask("GET", "/live")
    text = running.port.ask("GET", "/metrics").decode() + GatewayMetrics().metrics.render().decode()
    families = list(text_string_to_metric_families(text))
    named = set(re.findall(r"^\| `(kvferry_\w+)`", DOC.read_text(), re.MULTILINE))
    declared = {
        name + ("_total" if kind == "counter" and not name.endswith("_total") else "")
        for name, kind in re.findall(r"^# TYPE (kvferry_\w+) (\w+)$", text, re.MULTILINE)
    }
    assert declared == named
    assert {f.name for f in families} >= {name.removesuffix("_total") for name in named}
    assert 'kvferry_tier_hit_blocks_total{tenant="default",tier="dram"} 3.0' in text
    assert 'kvferry_daemon_request_seconds_count{verb="load"} 1.0' in text


def samples(running: Running) -> dict[str, float]:
    """Counters of one scrape by name and labels, without those of the scraping itself and of the process."""
    families = text_string_to_metric_families(running.port.ask("GET", "/metrics").decode())
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in families
        if family.type == "counter" and family.name.startswith("kvferry_") and "http" not in family.name
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


ASKED, HIT, SAVED = (
    f"kvferry_store_{name}_blocks_total[('tenant', 'default')]" for name in ("lookup", "hit", "saved")
)


def test_c144_the_hit_rate_counts_what_was_asked_for(running: Running) -> None:
    ns = running.client.namespace(SPEC)
    keys = ns.keys([1] * 8 * SPEC.block_tokens)
    save_blocks(ns, keys[:4])
    for _ in range(10):
        assert ns.lookup(keys).prefix == 4
    with ns.load(keys[:4], deadline=deadline_in(20)) as lease:  # of known hits: it is no lookup
        assert len(lease) == 4
    wait_until(lambda: samples(running)[ASKED] == 80)
    assert samples(running)[HIT] == 40


def test_loads_without_a_lookup_have_a_rate_of_their_own(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    ns = running.client.namespace(SPEC)
    keys = ns.keys([1] * 8 * SPEC.block_tokens)
    save_blocks(ns, keys[:3])
    with ns.load(keys, deadline=deadline_in(20)) as lease:
        assert len(lease) == 3
    with ns.load(keys[4:], deadline=deadline_in(20)) as lease:
        assert len(lease) == 0
    asked, got = (f"kvferry_store_{name}_blocks_total[('tenant', 'default')]" for name in ("load", "loaded"))
    wait_until(lambda: samples(running)[asked] == 12)
    assert (samples(running)[got], samples(running)[ASKED], samples(running)[HIT]) == (3, 0, 0)
    with pytest.raises(SystemExit):
        main(["status", "--url", running.http.url])
    assert "blocks found: – of lookups, 25.0 % of loads" in capsys.readouterr().out


def test_c145_counters_of_an_idle_daemon_stand_still(running: Running) -> None:
    ns = running.client.namespace(SPEC)
    keys = ns.keys([1] * 4 * SPEC.block_tokens)
    save_blocks(ns, keys)
    written = "kvferry_tier_writes_total[('outcome', 'stored'), ('tenant', 'default'), ('tier', 'disk')]"
    wait_until(lambda: samples(running).get(written) == 4)  # the disk is written behind
    requests = "kvferry_daemon_requests_total[('verb', 'lookup')]"

    def looked_up(times: int) -> dict[str, float]:
        """Samples after so many further lookups, once all of them are counted."""
        before = samples(running)
        for _ in range(times):
            ns.lookup(keys)
        wait_until(lambda: samples(running).get(requests, 0) == before.get(requests, 0) + times)
        wait_until(lambda: samples(running)[ASKED] == before[ASKED] + times * len(keys))
        return samples(running)

    first = looked_up(5)
    assert all(samples(running) == first for _ in range(5))
    changed = {name: value - first[name] for name, value in looked_up(3).items() if value != first[name]}
    assert changed.pop(requests) == 3
    assert set(changed.values()) <= {3.0, 12.0}, changed  # requests, and blocks of them


def test_c147_what_processes_of_a_client_did_is_counted_together(running: Running) -> None:
    code = (
        "import sys\n"
        "from kvferry.client import Client\n"
        "from kvferry.testing.blocks import save_blocks, small_spec\n"
        "url, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])\n"
        "with Client(url) as client:\n"
        "    ns = client.namespace(small_spec('http'))\n"
        "    save_blocks(ns, ns.keys([first] * count * ns.spec.block_tokens))\n"
    )
    url = running.daemon.addresses[0]
    for first, count in ((1, 10), (2, 20)):
        subprocess.run([sys.executable, "-c", code, url, str(first), str(count)], check=True, timeout=60)
    wait_until(lambda: samples(running)[SAVED] == 30)
    wait_until(lambda: len(running.port.status().clients) == 1)  # that of this process: gauges go with theirs
    assert samples(running)[SAVED] == 30


def test_it_is_ready_until_it_drains(running: Running) -> None:
    assert msgspec.json.decode(running.port.ask("GET", "/ready")) == {"ready": True}
    assert running.daemon.drain(deadline_in(20)).done
    with pytest.raises(RequestError, match="503"):
        running.port.ask("GET", "/ready")
    assert running.port.ask("GET", "/live")
    assert running.port.status().draining


def test_other_host_names_and_paths_are_refused(running: Running) -> None:
    head = b"GET /status HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n"
    assert exchange(running, head % b"evil.example:8451").startswith(b"HTTP/1.1 421")
    assert exchange(running, head % b"localhost:8451").startswith(b"HTTP/1.1 200")
    assert exchange(running, head % b"LocalHost").startswith(b"HTTP/1.1 200")
    for path in ("/status/", "/admin/clear/", "//status"):
        with pytest.raises(RequestError, match="404"):
            running.port.ask("GET", path)
    with pytest.raises(RequestError, match=r"404.*no such path"):
        running.port.ask("GET", "/nothing")
    with pytest.raises(RequestError, match="405"):
        running.port.ask("POST", "/status", b"{}")


def test_a_request_of_two_lengths_is_refused_and_what_follows_is_no_request(running: Running) -> None:
    """A proxy may take the other one, and let through what it takes for a body."""
    token = f"Bearer {running.token}".encode()
    head = b"POST /admin/drain HTTP/1.1\r\nHost: localhost\r\nAuthorization: %s\r\n" % token
    two = head + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    one = head + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
    answer = exchange(running, two + one)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not running.daemon.draining


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1e9\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
        b"POST /live HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    ],
)
def test_malformed_requests_make_no_traceback(
    running: Running, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert exchange(running, data).startswith(b"HTTP/1.1 ")
    assert running.port.ask("GET", "/live")
    assert not caplog.records


def test_why_a_tier_fails_is_shown_without_secrets(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    (level,) = running.daemon.stores["default"].levels
    level.writes.leave(failures=99, successes=0, reason="the device is gone; password=hunter2")
    wait_until(
        lambda: running.port.status().tenants[0].tiers[1].problems != {}
    )  # a status is kept for a moment
    (dram, disk) = running.port.status().tenants[0].tiers
    assert dram.problems == {}
    assert disk.problems == {"writes": "the device is gone; password=***"}
    with pytest.raises(SystemExit):
        main(["status", "--url", running.http.url])
    assert "tier disk, writes: the device is gone" in capsys.readouterr().out
    level.writes.leave(failures=0, successes=1)
    wait_until(lambda: running.port.status().tenants[0].tiers[1].problems == {})


def test_a_drain_says_what_was_not_written_and_why(running: Running) -> None:
    ns = running.client.namespace(SPEC)
    keys = ns.keys([1] * 4 * SPEC.block_tokens)
    (level,) = running.daemon.stores["default"].levels
    level.writes.leave(failures=99, successes=0, reason="the device is gone")
    level.writes._retry_at = float("inf")  # it is not tried again
    save_blocks(ns, keys)
    drained = running.daemon.drain(deadline_in(20))
    assert not drained.done
    assert not drained.waits, "more time would not help"
    assert "blocks were not written to tier disk since the start, which does not work: " in drained.text
    assert "the device is gone" in drained.text


def test_a_reload_that_fails_is_in_the_log(
    running: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = Port(running.http.url, str(tmp_path / "shown"))
    (tmp_path / "shown").write_text(running.token)
    (tmp_path / "shown").chmod(0o600)
    (tmp_path / "token").unlink()
    with pytest.raises(RequestError):
        port.admin("reload", Reload())
    assert [r.levelname for r in caplog.records if r.getMessage().startswith("not all was read again: ")] == [
        "ERROR"
    ]


def test_a_want_of_descriptors_is_a_typed_refusal(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reserve(*_args: object, **_more: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    ns = running.client.namespace(SPEC)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryNamespace, "reserve", reserve)
        with pytest.raises(CapacityError, match=r"no descriptor left.*ulimit -n"):
            save_blocks(ns, ns.keys([7] * SPEC.block_tokens))
        patch.setattr("kvferry.daemon.http.collect", reserve)
        with pytest.raises(RequestError, match=r"503.*no descriptor left"):
            running.port.status()
    save_blocks(ns, ns.keys([7] * SPEC.block_tokens))
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("said", [b"", b"x"])
def test_the_command_line_waits_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """For a server that says nothing, or a byte every now and then."""
    monkeypatch.setattr(daemon_http, "_TIMEOUT_S", 0.3)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            sock, _ = server.accept()
            with sock:
                while not over.wait(0.01):
                    try:
                        sock.sendall(said)
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(TransferTimeoutError, match=r"hangs: no answer within 0.3 s; it may still"):
                Port(f"http://127.0.0.1:{server.getsockname()[1]}").ask("POST", "/admin/drain")
        finally:
            over.set()
            thread.join()
