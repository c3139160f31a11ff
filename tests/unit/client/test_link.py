"""A daemon that takes connections and does not serve them: how often a client tries, and what it logs."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.client import Client, ClientOptions
from kvferry.client.link import Link
from kvferry.core.errors import ConfigError, LeaseExpiredError, UnavailableError
from kvferry.testing.blocks import save_blocks, small_spec, wait_until
from kvferry.testing.processes import Command
from kvferry.wire import Channel, ChannelOptions, ChannelServer

SPEC = small_spec("link")
PAUSES = ClientOptions(first_pause_s=0.05, last_pause_s=0.2)


@pytest.fixture
def listening() -> Iterator[Callable[[Callable[[Channel], None]], ChannelServer]]:
    with contextlib.ExitStack() as stack:

        def listen(handler: Callable[[Channel], None]) -> ChannelServer:
            options = ChannelOptions(role="daemon", session="s")
            server = ChannelServer("tcp://127.0.0.1:0", options, handler, name="link-test")
            stack.callback(server.close)
            return server

        yield listen


def ask_for(seconds: float, client: Client) -> int:
    """How many lookups were answered, by whomever, one after another."""
    ns, until, calls = client.namespace(SPEC), time.monotonic() + seconds, 0
    keys = ns.keys([1] * SPEC.block_tokens)
    while time.monotonic() < until:
        assert ns.lookup(keys).prefix == 0
        calls += 1
    return calls


def attempts_in(seconds: float) -> int:
    """Most attempts: one a pause, and 0.05 + 0.1 s for the first two; a call beside each may be another."""
    return 2 * (3 + int(seconds / PAUSES.last_pause_s))


def test_one_who_welcomes_and_closes_is_tried_with_pauses(
    listening: Callable[[Callable[[Channel], None]], ChannelServer], caplog: pytest.LogCaptureFixture
) -> None:
    """It had been tried 950 times a second: that it took the connection had ended the pause."""
    caplog.set_level(logging.INFO, "kvferry.client")
    server = listening(lambda channel: None)
    with Client(server.address, PAUSES) as client:
        started = time.monotonic()
        calls = ask_for(0.5, client)
        took = time.monotonic() - started
        assert client.counters.connects <= attempts_in(took)
        assert calls > client.counters.connects
        assert client.away
    told = [record.getMessage() for record in caplog.records if record.name == "kvferry.client.link"]
    assert [("is away" in line, "is back" in line) for line in told] == [(True, False)]


def test_one_who_answers_nothing_is_away_after_two_calls(
    listening: Callable[[Callable[[Channel], None]], ChannelServer],
) -> None:
    """Each connection that it takes had begun the count of late answers anew."""
    end = threading.Event()

    def until_end(channel: Channel) -> None:
        del channel
        end.wait(60)

    server = listening(until_end)
    try:
        with Client(server.address, ClientOptions(connect_timeout_s=0.1, call_timeout_s=0.1)) as client:
            wait_until(lambda: client.counters.timeouts >= 2 and bool(client.away))
    finally:
        end.set()


def test_a_daemon_without_descriptors_is_tried_with_pauses_and_found_again(tmp_path: Path) -> None:
    """What is cut at once says nothing about a daemon that is well."""
    words = ("--socket", f"{tmp_path}/d.sock", "--capacity", "1MiB", "--http", "none", "--disk", "none")
    with Command("serve", *words, "--set", "daemon.listen=none") as daemon:
        daemon.wait_ready()
        pid = daemon.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        open_now = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now, hard))
        with Client(f"unix://{tmp_path}/d.sock", PAUSES) as client:
            started = time.monotonic()
            ask_for(0.5, client)
            assert client.counters.connects <= attempts_in(time.monotonic() - started)
            assert client.away
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
            wait_until(lambda: not client.away)
            ns = client.namespace(SPEC)
            assert save_blocks(ns, ns.keys([1] * SPEC.block_tokens)) == 1


def test_a_slow_log_holds_up_no_call(tmp_path: Path) -> None:
    """What the handler sees may come late, but no call waits for it."""
    held: list[tuple[str, bool]] = []
    link = Link(f"unix://{tmp_path}/none.sock", ClientOptions(first_pause_s=60, last_pause_s=60))

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            free = threading.Thread(target=link.count, args=("connects", 0))
            free.start()
            free.join(20)
            held.append((record.levelname, free.is_alive()))

    handler, log = Slow(), logging.getLogger("kvferry.client.link")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with pytest.raises(UnavailableError):
            link.connect(time.monotonic() + 1)
        link._healed()
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
        link.close()
    assert held == [("WARNING", False), ("INFO", False)]


@pytest.mark.parametrize("options", [ClientOptions(token_file="/there/is/no/such/token"), ClientOptions()])
def test_what_a_new_client_is_refused_for_is_not_told_as_a_daemon_that_is_away(
    options: ClientOptions, caplog: pytest.LogCaptureFixture
) -> None:
    """The error says it; the log had said beside it that nothing is found or stored meanwhile."""
    with pytest.raises(ConfigError):
        Client("tcp://127.0.0.1:1" if options.token_file else "http://127.0.0.1:1", options)
    assert "away" not in caplog.text


def test_a_new_client_of_an_absent_daemon_says_so_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(f"unix://{tmp_path}/none.sock", PAUSES):
        assert "the daemon is away" in caplog.text


def test_a_write_lease_whose_commit_failed_says_so_afterwards(tmp_path: Path) -> None:
    """It had said that it was committed, of blocks that nobody had stored."""
    words = ("--socket", f"{tmp_path}/d.sock", "--listen", "none", "--disk", "none", "--http", "none")
    with Command("serve", *words) as daemon:
        daemon.wait_ready()
        with Client(f"unix://{tmp_path}/d.sock", PAUSES) as client:
            ns = client.namespace(SPEC)
            lease = ns.reserve(ns.keys([1] * SPEC.block_tokens), parent=None, deadline=time.monotonic() + 20)
            daemon.process.kill()
            daemon.wait()
            with pytest.raises(UnavailableError):
                lease.commit()
            with pytest.raises(LeaseExpiredError, match=r"has ended: its commit failed: .*away"):
                lease.commit()
