"""What the s3 tier makes of a store that refuses, stumbles, is slow or answers half."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from kvferry.core import cause
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey
from kvferry.store.remote.s3 import S3Options, S3Tier
from kvferry.store.tier import ReadOutcome, TierNamespace, WriteOutcome
from kvferry.testing.blocks import small_spec, wait_until
from kvferry.testing.fake_s3 import FakeS3
from kvferry.testing.tiers_common import (
    HIT,
    MISS,
    PRESENT,
    SPEC,
    STORED,
    chain,
    closing,
    opened,
    outcomes,
    read,
    write,
)
from kvferry.testing.tiers_common import write_outcomes as written

FAILED, CORRUPT = ReadOutcome.FAILED, ReadOutcome.CORRUPT


@dataclass
class Opened:
    tier: S3Tier
    space: TierNamespace
    keys: list[BlockKey]


@pytest.fixture
def store() -> Iterator[FakeS3]:
    with FakeS3() as store:
        yield store


@pytest.fixture
def make(store: FakeS3) -> Iterator[Callable[..., Opened]]:
    with ExitStack() as stack:

        def make(**options: object) -> Opened:
            given: dict[str, object] = {
                "bucket": store.bucket, "endpoint": store.endpoint, "access_key_id": "id",
                "secret_access_key": "hidden-key", "retries": 0, "server_pause_s": 0.05,
                "timeout_s": 20.0, **options,
            }  # fmt: skip
            tier = stack.enter_context(closing(S3Tier("s3", S3Options(**given))))  # type: ignore[arg-type]
            assert isinstance(tier, S3Tier)
            space = opened(tier, SPEC)
            return Opened(tier, space, chain(space, 1, 4))

        yield make


Make = Callable[..., Opened]


def test_refusals_give_status_and_code(store: FakeS3, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """C141: a wrong key or no right; what was stored before is all that counts as stored."""
    it = make()
    assert written(write(it.tier, it.space, it.keys)) == [STORED] * 4
    store.always = 403
    caplog.set_level(logging.INFO)
    results = [r for _ in range(10) for r in read(it.tier, it.space, it.keys, seconds=2)]
    assert {r.outcome for r in results} == {FAILED}
    assert "status 403 AccessDenied" in results[0].reason
    assert it.tier.contains(it.space, it.keys, deadline=deadline_in(2)) == [False] * 4
    assert not it.tier.usage().healthy
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    said = [*lines, *(r.reason for r in results), repr(it.tier.options), str(it.tier.usage())]
    assert not any("hidden-key" in text for text in said)
    assert it.tier.usage().counters["stored"] == 4
    store.always = 0
    wait_until(lambda: outcomes(read(it.tier, it.space, it.keys)) == [HIT] * 4, 20)
    assert it.tier.usage().healthy


def test_what_passes_is_tried_again(store: FakeS3, make: Make) -> None:
    """C141: 503, then 200."""
    it = make(retries=3)
    store.answers = [503, 503]
    assert written(write(it.tier, it.space, it.keys[:1])) == [STORED]
    store.answers = [503]
    assert outcomes(read(it.tier, it.space, it.keys[:1])) == [HIT]
    store.always = 503
    start = time.monotonic()
    results = write(it.tier, it.space, it.keys[1:2], seconds=1000)
    assert written(results) == [WriteOutcome.FAILED]
    assert "status 503 SlowDown" in results[0].reason
    assert time.monotonic() - start < 40
    assert it.tier.usage().counters["stored"] == 1


def test_a_slow_store_holds_nobody_beyond_the_deadline(store: FakeS3, make: Make) -> None:
    it = make(timeout_s=40.0)
    write(it.tier, it.space, it.keys)
    store.gate.clear()
    start = time.monotonic()
    assert set(outcomes(read(it.tier, it.space, it.keys, seconds=0.2))) == {FAILED}
    results = write(it.tier, it.space, chain(it.space, 2, 2), seconds=0.2)
    assert set(written(results)) == {WriteOutcome.FAILED}
    assert time.monotonic() - start < 20
    store.gate.set()
    flying = [r.in_flight for r in results if r.in_flight is not None]
    assert all(event.wait(20) for event in flying)
    wait_until(lambda: outcomes(read(it.tier, it.space, it.keys)) == [HIT] * 4, 20)


def test_wrong_bucket_and_wrong_key(store: FakeS3, make: Make) -> None:
    """C141."""
    wrong = make(bucket="nowhere")
    (result,) = write(wrong.tier, wrong.space, wrong.keys[:1])
    assert result.outcome is WriteOutcome.FAILED
    assert "no bucket nowhere" in result.reason
    (answer,) = read(wrong.tier, wrong.space, wrong.keys[:1])
    assert answer.outcome is FAILED
    right = make()
    assert outcomes(read(right.tier, right.space, right.keys)) == [MISS] * 4
    assert store.objects == {}


def test_path_style_and_virtual_host_style(
    store: FakeS3, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C141."""
    it = make()
    write(it.tier, it.space, it.keys[:1])
    assert store.paths[-1].startswith(f"127.0.0.1:{store.endpoint.rpartition(':')[2]}/blocks/kvferry/")
    monkeypatch.setenv("http_proxy", store.endpoint)  # so that the host need not be known to any resolver
    it = make(endpoint="http://s3.test", path_style=False)
    assert outcomes(read(it.tier, it.space, it.keys[:1])) == [HIT]
    assert store.paths[-1].startswith("blocks.s3.test/kvferry/")


def test_what_is_there_is_not_written_again(store: FakeS3, make: Make) -> None:
    one, two = make(), make()
    assert written(write(one.tier, one.space, one.keys)) == [STORED] * 4
    assert written(write(two.tier, two.space, two.keys)) == [PRESENT] * 4


def test_large_objects_are_uploaded_in_pieces(store: FakeS3, make: Make) -> None:
    it = make(multipart_nbytes=5 << 20)
    space = opened(it.tier, small_spec("large", pages=3000))
    keys = chain(space, 1, 2)
    assert written(write(it.tier, space, keys)) == [STORED] * 2
    assert store.seen["POST"] >= 4
    assert outcomes(read(it.tier, space, keys)) == [HIT] * 2
    assert written(write(it.tier, space, keys)) == [PRESENT] * 2
    assert it.tier.remove(space, keys, deadline=deadline_in(20)) == [True, True]
    assert store.objects == {}


@pytest.mark.parametrize("garbage", [b"", b"no manifest, but long enough for the head of one", bytes(9000)])
def test_garbage_is_a_miss_and_counted(store: FakeS3, make: Make, garbage: bytes) -> None:
    it = make()
    write(it.tier, it.space, it.keys)
    name = it.tier.names.block(it.tier.names.home(it.space), it.keys[1])
    store.objects[name] = garbage
    assert outcomes(read(it.tier, it.space, it.keys)) == [HIT, CORRUPT, HIT, HIT]
    assert outcomes(read(it.tier, it.space, it.keys)) == [HIT, MISS, HIT, HIT]
    assert it.tier.usage().counters["corrupt_reads"] == 1


def no_names(it: Opened, reasons: list[str]) -> None:
    home = it.tier.names.home(it.space)
    names = {part for key in it.keys for part in it.tier.names.block(home, key).split("/") if len(part) > 16}
    assert len(names) >= 3
    for reason in reasons:
        assert not any(name in reason for name in names), reason
        assert not any(word in reason for word in ("Generic", "max_retries", "performing")), reason


def test_nobody_listens(make: Make) -> None:
    it = make(endpoint="http://127.0.0.1:9", timeout_s=0.5)
    start = time.monotonic()
    results = read(it.tier, it.space, it.keys, seconds=1000)
    assert set(outcomes(results)) == {FAILED}
    assert set(written(write(it.tier, it.space, it.keys, seconds=1000))) == {WriteOutcome.FAILED}
    assert time.monotonic() - start < 20
    text = "http://127.0.0.1:9: connection refused; start the store, or mend the endpoint"
    assert results[0].reason == text
    no_names(it, [r.reason for r in results])


def test_a_store_that_hangs_is_named(store: FakeS3, make: Make) -> None:
    it = make(timeout_s=0.3)
    store.gate.clear()
    try:
        reasons = [r.reason for r in write(it.tier, it.space, it.keys, seconds=1000)]
        reasons += [r.reason for r in read(it.tier, it.space, it.keys, seconds=0.05)]
    finally:
        store.gate.set()
    assert f"{store.endpoint}: timed out" in reasons[0]
    no_names(it, reasons)


def test_the_present_reason_is_shown_and_another_kind_is_told(
    store: FakeS3, make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cause, "_LEAST_S", 0.0)
    it = make()
    for status, remedy in ((403, "the keys"), (503, "fewer connections")):
        store.always = status

        def shown(wanted: str = f"status {status}") -> bool:
            read(it.tier, it.space, it.keys)
            return any(wanted in reason for reason in it.tier.usage().problems.values())

        wait_until(shown, 20)
        (reason,) = it.tier.usage().problems.values()
        assert remedy in reason
        assert store.endpoint in reason
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert ["403" in line for line in lines] == [True, False]
    assert "the reason is another now: the store answered with status 503" in lines[1]
    store.always = 0
    wait_until(
        lambda: read(it.tier, it.space, it.keys)[0].outcome is MISS and not it.tier.usage().problems, 20
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "bucket must be given"),
        ({"bucket": "a/b"}, "without a path"),
        ({"bucket": "b", "endpoint": "s3.local"}, "http:// or https://"),
        ({"bucket": "b", "endpoint": "http://u:p@h"}, "access_key_id"),
        ({"bucket": "b", "access_key_id": "x"}, "both or neither"),
        ({"bucket": "b", "secret_access_key": "hidden-key"}, "both or neither"),
        ({"bucket": "b", "multipart": "1MiB"}, "multipart"),
        ({"bucket": "b", "buckets": "1MiB"}, "did you mean"),
        ({"bucket": "b", "ca_file": "/does/not/exist"}, "cannot read"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        S3Tier.from_options("s3", options)
    assert "hidden-key" not in str(info.value)
