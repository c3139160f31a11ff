"""What the redis tier makes of a server that stops, hangs, is full, refuses it or talks nonsense."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, TierError
from kvferry.store.remote.backend import Answer, Put
from kvferry.store.remote.redis import RedisOptions, RedisTier
from kvferry.store.tier import BlockWrite, ReadOutcome, WriteOutcome
from kvferry.testing.blocks import block_bytes, small_spec, wait_until
from kvferry.testing.fault_proxy import FaultProxy, Faults
from kvferry.testing.redis_server import RedisServer
from kvferry.testing.tiers_common import HIT, MISS, PRESENT, STORED, chain, opened, outcomes, read, write
from kvferry.testing.tiers_common import write_outcomes as written

from .conftest import MakeTier

FAILED, CORRUPT = ReadOutcome.FAILED, ReadOutcome.CORRUPT
Lines = Callable[[], list[str]]


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """A server that answers everything with the same bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    over = threading.Event()

    def run() -> None:
        socks: list[socket.socket] = []
        while not over.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            socks.append(sock)
            if reply:
                sock.sendall(reply)
        for sock in socks:
            sock.close()

    thread = threading.Thread(target=run, name="suite-answering")
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        thread.join(20)
        listener.close()


def test_a_server_that_stops_is_told_once_and_heals(make: MakeTier, lines: Lines) -> None:
    with RedisServer() as server:
        it = make(server.url)
        write(it.tier, it.space, it.keys)
        server.kill()
        for _ in range(20):
            results = read(it.tier, it.space, it.keys, seconds=1)
            assert set(outcomes(results)) == {FAILED}
            assert all(r.reason for r in results)
            assert it.tier.contains(it.space, it.keys, deadline=deadline_in(1)) == [False] * 4
        assert set(written(write(it.tier, it.space, it.keys, seconds=1))) == {WriteOutcome.FAILED}
        assert not it.tier.usage().healthy
        assert len(lines()) == 1
        assert "no requests" in lines()[0]
        server.start()
        wait_until(lambda: set(written(write(it.tier, it.space, it.keys))) <= {STORED, PRESENT}, 20)
        assert outcomes(read(it.tier, it.space, it.keys)) == [HIT] * 4
        assert it.tier.usage().healthy
        assert len(lines()) == 1


def test_connections_that_a_restart_ended_cost_no_request(make: MakeTier) -> None:
    with RedisServer() as server:
        it = make(server.url)
        write(it.tier, it.space, it.keys)
        server.kill()
        server.start()
        assert outcomes(read(it.tier, it.space, it.keys)) == [MISS] * 4
        assert written(write(it.tier, it.space, it.keys)) == [STORED] * 4


def test_a_hanging_server_holds_nobody_beyond_the_deadline(make: MakeTier) -> None:
    """C064: it is left alone after some errors; that it heals is tried over ``test_a_bad_link``."""
    with RedisServer() as server:
        it = make(server.url, timeout_s=0.2, server_errors=2, server_pause_s=60)
        with server.hanging():
            start = time.monotonic()
            assert set(outcomes(read(it.tier, it.space, it.keys, seconds=1000))) == {FAILED}
            assert it.tier.contains(it.space, it.keys, deadline=deadline_in(1000)) == [False] * 4
            assert time.monotonic() - start < 15
            start = time.monotonic()  # it is left alone now: each of these would take 0.2 s
            for _ in range(50):
                assert it.tier.contains(it.space, it.keys, deadline=deadline_in(1000)) == [False] * 4
                with pytest.raises(TierError):
                    it.tier.remove(it.space, it.keys, deadline=deadline_in(1000))
            assert time.monotonic() - start < 15


@pytest.mark.parametrize("kind", ["cut", "half_open", "reset"])
def test_a_bad_link(server: RedisServer, make: MakeTier, kind: str) -> None:
    """C064: nobody answers; it is as before once somebody does."""
    with FaultProxy(server.url) as proxy:
        it = make(proxy.address, timeout_s=0.2, server_errors=1000)
        wait_until(lambda: set(written(write(it.tier, it.space, it.keys))) <= {STORED, PRESENT}, 20)
        proxy.faults = Faults(link=kind)  # type: ignore[arg-type]
        start = time.monotonic()
        assert set(outcomes(read(it.tier, it.space, it.keys, seconds=1000))) == {FAILED}
        other = chain(it.space, 2, 2)
        assert set(written(write(it.tier, it.space, other, seconds=1000))) == {WriteOutcome.FAILED}
        assert time.monotonic() - start < 20
        proxy.faults = Faults()
        wait_until(lambda: outcomes(read(it.tier, it.space, it.keys)) == [HIT] * 4, 20)


def test_a_value_that_stops_half_way_is_no_block(server: RedisServer, make: MakeTier) -> None:
    """C064: the reply has begun, and the rest does not come in time."""
    with FaultProxy(server.url) as proxy:
        it = make(proxy.address, timeout_s=0.3, server_errors=1000)
        wait_until(lambda: set(written(write(it.tier, it.space, it.keys))) <= {STORED, PRESENT}, 20)
        proxy.faults = Faults(rate=10_000)
        start = time.monotonic()
        assert outcomes(read(it.tier, it.space, it.keys[:1], seconds=1000)) == [FAILED]
        assert time.monotonic() - start < 15
        proxy.faults = Faults(flip_rate=1e-3, only="to_client")
        wait_until(lambda: CORRUPT in outcomes(read(it.tier, it.space, it.keys)), 20)
        proxy.faults = Faults()


def test_a_full_server_refuses_and_says_what_to_change(
    make: MakeTier, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer(maxmemory="8mb") as server:
        it = make(server.url)
        results = []
        for number in range(100):
            results += write(it.tier, it.space, chain(it.space, number, 16))
        refused = [r for r in results if r.outcome is WriteOutcome.REFUSED]
        assert refused
        assert {r.outcome for r in results} == {STORED, WriteOutcome.REFUSED}
        assert "maxmemory-policy" in refused[0].reason
        assert len([line for line in lines() if "no memory left" in line]) == 1
        assert any("noeviction" in text for text in it.tier.usage().status.values())
        assert not it.tier.usage().healthy
        server.call("FLUSHALL")
        monkeypatch.setattr("kvferry.store.remote.redis.backend.FULL_S", 0.0)
        wait_until(lambda: set(written(write(it.tier, it.space, it.keys))) <= {STORED, PRESENT}, 20)
        wait_until(lambda: STORED in written(write(it.tier, it.space, chain(it.space, 999, 1))), 20)
        assert it.tier.usage().healthy


def test_a_wrong_password_is_never_shown(
    server: RedisServer, make: MakeTier, lines: Lines, tmp_path: Path
) -> None:
    server.call("ACL", "SETUSER", "engine", "on", ">right-secret", "~kvferry:*", "+@all")
    (tmp_path / "password").write_text("wrong-secret\n")
    it = make(server.url, username="engine", password_file=str(tmp_path / "password"))
    reasons = [r.reason for _ in range(4) for r in read(it.tier, it.space, it.keys)]
    assert all("password" in reason for reason in reasons[:4])
    assert "refused the password of user 'engine'" in reasons[0]
    said = [*reasons, *lines(), str(it.tier.usage()), repr(it.tier.options)]
    assert not any("wrong-secret" in text for text in said)
    (tmp_path / "password").write_text("right-secret\n")  # it is read again
    wait_until(lambda: set(written(write(it.tier, it.space, it.keys))) <= {STORED, PRESENT}, 20)
    other = make(server.url, username="engine", password="right-secret")
    assert outcomes(read(other.tier, other.space, it.keys)) == [HIT] * 4
    assert "right-secret" not in repr(other.tier.options)


def test_forbidden_commands_cost_what_they_do_and_no_more(server: RedisServer, make: MakeTier) -> None:
    rights = [f"+{verb}" for verb in ("auth", "hello", "get", "set", "exists", "unlink", "getrange")]
    server.call("ACL", "SETUSER", "least", "on", ">pw", "~kvferry:*", "-@all", *rights)
    it = make(server.url, username="least", password="pw")
    assert written(write(it.tier, it.space, it.keys)) == [STORED] * 4
    assert outcomes(read(it.tier, it.space, it.keys)) == [HIT] * 4
    assert it.tier.remove(it.space, it.keys, deadline=deadline_in(20)) == [True] * 4
    with pytest.raises(TierError, match="does not list"):
        list(it.tier.scan())


@pytest.mark.parametrize(
    "reply",
    [b"", b"HTTP/1.1 400 No\r\n\r\n", b"$99999999999\r\n", b"*999999999\r\n", b"+" + b"x" * 9000, b":\r\n"],
    ids=["silent", "http", "huge value", "huge list", "endless line", "no number"],
)  # fmt: skip
def test_what_is_no_redis_server(make: MakeTier, reply: bytes) -> None:
    with answering(reply) as url:
        it = make(url, timeout_s=0.2)
        start = time.monotonic()
        assert set(outcomes(read(it.tier, it.space, it.keys, seconds=1000))) == {FAILED}
        assert set(written(write(it.tier, it.space, it.keys, seconds=1000))) == {WriteOutcome.FAILED}
        assert it.tier.contains(it.space, it.keys, deadline=deadline_in(1000)) == [False] * 4
        assert time.monotonic() - start < 30


def test_a_limit_that_the_server_does_not_tell_is_named(server: RedisServer, make: MakeTier) -> None:
    """C091: 3.1 MiB to a server that takes 1 MiB at once."""
    server.call("CONFIG", "SET", "proto-max-bulk-len", "1mb")
    server.call("ACL", "SETUSER", "silent", "on", ">pw", "~kvferry:*", "+@all", "-config")
    it = make(server.url, username="silent", password="pw")
    space = opened(it.tier, small_spec("large", pages=800))
    (result,) = write(it.tier, space, chain(space, 1, 1))
    assert result.outcome is WriteOutcome.FAILED
    assert "proto-max-bulk-len" in result.reason
    small = make(server.url, username="silent", password="pw", part_nbytes=1 << 20)
    space = opened(small.tier, small_spec("large", pages=800))
    assert written(write(small.tier, space, chain(space, 1, 1))) == [STORED]
    assert outcomes(read(small.tier, space, chain(space, 1, 1))) == [HIT]


def test_a_crash_between_parts_and_manifest_leaves_no_block(
    server: RedisServer, make: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C091: split under the limit that the server tells, and never half of it visible."""
    server.call("CONFIG", "SET", "proto-max-bulk-len", "1mb")
    it = make(server.url)
    space = opened(it.tier, small_spec("large", pages=800))
    keys = chain(space, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(it.tier.backend, "delete", lambda names, deadline: [])
        put, calls = it.tier.backend.put, list[int]()

        def put_once(puts: Sequence[Put], deadline: float) -> list[Answer]:
            calls.append(len(puts))
            if len(calls) > 1:
                raise InterruptedError("as the test asked")
            return put(puts, deadline)

        patch.setattr(it.tier.backend, "put", put_once)
        with pytest.raises(InterruptedError):
            write(it.tier, space, keys)
    names = server.call("KEYS", "*")
    assert isinstance(names, list)
    assert len(names) == 8  # 3.1 MiB each under 1 MiB
    assert all(0 < int(str(server.call("TTL", n))) <= 600 for n in names if isinstance(n, bytes))
    assert it.tier.contains(space, keys, deadline=deadline_in(20)) == [False, False]
    assert outcomes(read(it.tier, space, keys)) == [MISS, MISS]
    assert list(it.tier.scan()) == []
    assert written(write(it.tier, space, keys)) == [STORED] * 2
    assert outcomes(read(it.tier, space, keys)) == [HIT] * 2
    stays = server.call("TTL", it.tier.names.block(it.tier.names.home(space), keys[0]))
    assert stays == -1
    assert it.tier.remove(space, keys, deadline=deadline_in(20)) == [True, True]
    left = server.call("KEYS", "*")
    assert isinstance(left, list)
    assert len(left) == 8  # of the crash; they go by themselves


@pytest.mark.parametrize("garbage", ["text", "list", "half", "other version", "huge lengths"])
def test_garbage_is_a_miss_and_counted(server: RedisServer, make: MakeTier, garbage: str) -> None:
    it = make(server.url)
    write(it.tier, it.space, it.keys)
    name = it.name(it.keys[1])
    value = server.call("GET", name)
    assert isinstance(value, bytes)
    server.call("DEL", name)
    if garbage == "list":
        server.call("RPUSH", name, "x")
    else:
        server.call("SET", name, {
            "text": b"no manifest at all, but long enough for the head of one",
            "half": value[: len(value) // 2],
            "other version": value[:8] + b"\xff\xff" + value[10:],
            "huge lengths": value[:12] + b"\xff" * 12 + value[24:],
        }[garbage])  # fmt: skip
    assert outcomes(read(it.tier, it.space, it.keys)) == [HIT, CORRUPT, HIT, HIT]
    assert outcomes(read(it.tier, it.space, it.keys)) == [HIT, MISS, HIT, HIT]
    assert it.tier.usage().counters["corrupt_reads"] == 1
    assert server.call("EXISTS", name) == 0


def test_two_writers_of_one_block_never_mix(server: RedisServer, make: MakeTier) -> None:
    server.call("CONFIG", "SET", "proto-max-bulk-len", "1mb")
    one, two = make(server.url), make(server.url)
    spec = small_spec("large", pages=600)
    space, same = opened(one.tier, spec), opened(two.tier, spec)
    keys = chain(space, 1, 3)
    results: list[WriteOutcome] = []
    barrier = threading.Barrier(2)

    def work(number: int) -> None:
        barrier.wait(20)
        results.extend(written(write((one, two)[number].tier, (space, same)[number], keys)))

    threads = [threading.Thread(target=work, args=(n,), name=f"suite-{n}") for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(r.value for r in results) == [PRESENT.value] * 3 + [STORED.value] * 3
    assert outcomes(read(two.tier, same, keys)) == [HIT] * 3
    names = server.call("KEYS", "*")
    assert isinstance(names, list)
    assert len(names) == 3 * 4  # nothing is left of who came second


def test_many_threads_share_few_connections(server: RedisServer, make: MakeTier) -> None:
    it = make(server.url, connections=2)
    write(it.tier, it.space, it.keys)
    problems: list[object] = []

    def work() -> None:
        for _ in range(10):
            found = outcomes(read(it.tier, it.space, it.keys))
            problems.extend(o for o in found if o is not HIT)

    threads = [threading.Thread(target=work, name=f"suite-{n}") for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not problems
    assert it.tier.usage().counters["connects"] <= 2

    def clients() -> int:
        listed = server.call("CLIENT", "LIST")
        assert isinstance(listed, bytes)
        return len(listed.splitlines())

    wait_until(lambda: clients() <= 3, 20)  # and who asks; it may not have noticed the end of others yet


def test_ttl_is_that_of_the_server(server: RedisServer, make: MakeTier) -> None:
    it = make(server.url, ttl_s=100)
    write(it.tier, it.space, it.keys)
    ttl = server.call("TTL", it.name(it.keys[0]))
    assert isinstance(ttl, int)
    assert 90 <= ttl <= 100


def test_other_tenants_and_secrets_have_other_names(
    server: RedisServer, make: MakeTier, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("of the cluster")
    plain, secret = make(server.url), make(server.url, secret_file=str(tmp_path / "secret"))
    write(secret.tier, secret.space, secret.keys)
    assert outcomes(read(plain.tier, plain.space, plain.keys)) == [MISS] * 4
    names = server.call("KEYS", "*")
    assert isinstance(names, list)
    assert not any(b"default" in n or b"suite" in n for n in names if isinstance(n, bytes))
    # whoever copies a value to another tenant's name gives him nothing
    value = server.call("GET", secret.name(secret.keys[0]))
    assert isinstance(value, bytes)
    server.call("SET", plain.name(plain.keys[0]), value)
    assert outcomes(read(plain.tier, plain.space, plain.keys[:1])) == [CORRUPT]


def test_a_cap_counts_what_was_found_and_keeps_to_it(server: RedisServer, make: MakeTier) -> None:
    first = make(server.url)
    for number in range(8):
        write(first.tier, first.space, chain(first.space, number, 4))
    nbytes = first.tier.usage().used_nbytes // 32
    small = make(server.url, capacity_nbytes=10 * nbytes)
    assert small.tier.wait_found(deadline=deadline_in(20))
    assert server.call("DBSIZE") == 10
    assert small.tier.usage().entries == 10
    new = chain(small.space, 99, 4)
    assert written(write(small.tier, small.space, new)) == [STORED] * 4
    assert server.call("DBSIZE") == 10
    assert outcomes(read(small.tier, small.space, new)) == [HIT] * 4
    assert small.tier.usage().counters["evicted"] == 26


def test_a_unix_socket(server: RedisServer, make: MakeTier) -> None:
    it = make(f"unix://{server.socket_path}")
    assert written(write(it.tier, it.space, it.keys)) == [STORED] * 4
    assert outcomes(read(it.tier, it.space, it.keys)) == [HIT] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": "redis://127.0.0.1"}, "write tcp://"),
        ({"urls": "tcp://user:pw@host"}, "no user or password"),
        ({"url": "tcp://127.0.0.1"}, "did you mean"),
        ({}, "urls must be given"),
        ({"urls": "h", "username": "u"}, "without a password"),
        ({"urls": "h", "password": "hidden-pw", "password_file": "/x"}, "not both"),
        ({"urls": "h", "ttl": "10ms"}, "at least 1 s"),
        ({"urls": "a,b", "cluster": "off"}, "give one"),
        ({"urls": "h", "part": "1KiB"}, "part"),
        ({"urls": "h", "prefix": "a:b"}, "prefix"),
        ({"urls": "h", "cluster": "maybe"}, "one of auto, on, off"),
        ({"urls": "h", "password_file": "/does/not/exist"}, "cannot read"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        RedisTier.from_options("redis", options)
    assert "hidden-pw" not in str(info.value)


def test_options_as_text_and_as_values() -> None:
    options = {
        "urls": "h, tls://g:1?ca=/x",
        "ttl": "1h",
        "part": "8MiB",
        "connections": "2",
        "password": "hidden",
    }
    described = {o.name: o for o in RedisTier.describe_options("redis", options)}
    assert described["urls"].value == ["h", "tls://g:1?ca=/x"]
    assert (described["ttl"].value, described["ttl"].text) == (3600.0, "3600 s")
    assert described["part"].value == 8 << 20
    assert described["password"].text == "***"
    assert described["password"].secret
    assert not described["prefix"].given
    assert tuple(described) == RedisTier.option_names


def test_a_write_may_be_of_any_alignment(server: RedisServer, make: MakeTier) -> None:
    it = make(server.url)
    nbytes = it.space.spec.block_nbytes
    data = block_bytes(it.keys[0], nbytes)
    memory = memoryview(bytearray(nbytes + 1))
    memory[1:] = data
    block = BlockWrite(it.keys[0], memory[1:], None, 0)
    assert written(it.tier.write(it.space, [block], deadline=deadline_in(20))) == [STORED]
    assert outcomes(read(it.tier, it.space, it.keys[:1])) == [HIT]


def test_options_of_redis_are_those_of_remote_tiers_too() -> None:
    assert RedisOptions(urls=("h",)).addresses()[0].url == "tcp://h:6379"
