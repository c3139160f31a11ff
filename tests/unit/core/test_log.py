from __future__ import annotations

import io
import json
import logging
import random
import re
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest

from kvferry.core import log
from kvferry.core.log import JsonFormatter, LogLimiter, TextFormatter, redact


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> Iterator[tuple[logging.Logger, list[str]]]:
    logger = logging.getLogger("kvferry.test_log")
    handler = Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield logger, handler.lines
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_repeats_are_summed_by_key_and_interval(lines: tuple[logging.Logger, list[str]]) -> None:
    logger, out = lines
    clock = Clock()
    limiter = LogLimiter(logger, interval_s=10, clock=clock)
    assert limiter.log(logging.WARNING, ("peer", "spec"), "%s refused", "peer")
    assert not limiter.log(logging.WARNING, ("peer", "spec"), "%s refused", "peer")
    assert limiter.log(logging.WARNING, ("other", "spec"), "%s refused", "other")
    clock.now += 9.9
    assert not limiter.log(logging.WARNING, ("peer", "spec"), "%s refused", "peer")
    clock.now += 0.2
    assert limiter.log(logging.WARNING, ("peer", "spec"), "%s refused", "peer")
    assert out == ["peer refused", "other refused", "peer refused (2 more in 10 s)"]


def test_a_key_has_one_line_in_an_interval_whatever_the_others_do(
    lines: tuple[logging.Logger, list[str]],
) -> None:
    logger, out = lines
    clock, chance = Clock(), random.Random(6)
    limiter = LogLimiter(logger, interval_s=10, clock=clock)
    told: dict[str, list[float]] = {key: [] for key in "abcd"}
    missing = 0
    for _ in range(3000):
        clock.now += chance.choice((0.0, 0.5, 3.0))
        key = chance.choice("abcd")
        missing += not limiter.log(logging.WARNING, key, "%s", key)
        for line in out:
            told[line[0]].append(clock.now)
            missing -= kept_back(line)
        out.clear()
    assert min(b - a for times in told.values() for a, b in pairwise(times)) >= 10
    limiter.flush()
    assert missing == sum(map(kept_back, out)) > 0


def kept_back(line: str) -> int:
    found = re.search(r"\((\d+) more", line)
    return int(found[1]) if found else 0


def test_any_later_line_and_flush_report_what_was_kept_back(lines: tuple[logging.Logger, list[str]]) -> None:
    logger, out = lines
    clock = Clock()
    limiter = LogLimiter(logger, interval_s=10, clock=clock)
    for _ in range(3):
        limiter.log(logging.INFO, "a", "a")
    clock.now += 11
    limiter.log(logging.INFO, "b", "b")
    assert out == ["a", "a (2 more in 11 s)", "b"]
    limiter.log(logging.INFO, "b", "b")
    limiter.flush()
    limiter.flush()
    assert out[3:] == ["b (1 more in 0 s)"]


def test_a_flood_of_keys_is_bounded(lines: tuple[logging.Logger, list[str]]) -> None:
    logger, out = lines
    limiter = LogLimiter(logger, interval_s=10, max_keys=3, clock=Clock())
    for i in (0, 0, 1, 2, 3):
        limiter.log(logging.INFO, i, "key %d", i)
    assert out == ["key 0", "key 1", "key 2", "key 0 (1 more in 0 s)", "key 3"]


class Memory:
    """What a frame held when it failed."""


def test_an_error_is_kept_as_text_without_what_its_frames_hold(
    lines: tuple[logging.Logger, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Lines that were kept back, and records of a handler, kept the memory of tenants that had gone."""
    logger, out = lines
    limiter = LogLimiter(logger, interval_s=10, clock=Clock())
    held: list[weakref.ref[Memory]] = []

    def fail() -> None:
        memory = Memory()
        held.append(weakref.ref(memory))
        raise ValueError("late")

    for _ in range(3):
        try:
            fail()
        except ValueError as error:
            limiter.log(logging.WARNING, "k", "failed: %s", error)
    assert [memory() for memory in held] == [None] * 3
    limiter.flush()
    assert out == ["failed: late", "failed: late (2 more in 0 s)"]
    assert [record.getMessage() for record in caplog.records] == out


def test_threads_lose_no_count(lines: tuple[logging.Logger, list[str]]) -> None:
    logger, out = lines
    limiter = LogLimiter(logger, interval_s=1000)
    threads = [
        threading.Thread(target=lambda: [limiter.log(logging.INFO, "k", "x") for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    limiter.flush()
    assert out[0] == "x"
    assert out[1].startswith("x (799 more")
    assert len(out) == 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:hunter2@host:6379/0 is down", "redis://***@host:6379/0 is down"),
        ("password=hunter2 x=1", "password=*** x=1"),
        ('{"api_key": "hunter2"}', '{"api_key": ***'),
        ("Authorization: Bearer hunter2", "Authorization: ***"),
        ("cluster_secret=hunter2&a=b", "cluster_secret=***&a=b"),
        ("first_token=17 prompt_tokens=1500", "first_token=17 prompt_tokens=1500"),
        ("tcp://127.0.0.1:8410?rate=1GB/s", "tcp://127.0.0.1:8410?rate=1GB/s"),
        ("/etc/passwd: Not a directory", "/etc/passwd: Not a directory"),
        ("/run/api_key=hunter2", "/run/api_key=***"),
        ("/passwd:hunter2", "/passwd:***"),
    ],
)
def test_secrets_are_never_shown(text: str, shown: str) -> None:
    assert redact(text).startswith(shown)
    assert "hunter2" not in redact(text)


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("kvferry.wire", logging.INFO, "f.py", 1, message, args, None)
    if fields:
        made.fields = fields
    return made


def test_text_lines_carry_fields_and_cannot_be_forged() -> None:
    line = TextFormatter().format(record("got %s", "a\nERROR b", peer="c\r\nd", credential="hunter2"))
    assert "\n" not in line
    assert "\r" not in line
    assert "INFO    kvferry.wire [MainThread]: got a\\nERROR b peer=c\\r\\nd credential=***" in line
    assert "hunter2" not in line


def test_text_of_a_peer_cannot_steer_the_terminal() -> None:
    line = TextFormatter().format(record("reason: %s", "\x1b]0;owned\x07\x9b31m\u2028next"))
    assert line.endswith(r"reason: \x1b]0;owned\x07\x9b31m\u2028next")


def test_json_lines_are_one_object_with_the_fields() -> None:
    line = JsonFormatter().format(
        record(
            "got %s\n", "password=hunter2", peer="p", nbytes=5, secret="hunter2", odd=object(), level="mine"
        )
    )
    assert "\n" not in line
    assert "hunter2" not in line
    found = json.loads(line)
    assert (found["level"], found["peer"], found["nbytes"]) == ("info", "p", 5)
    assert found["secret"] == "***"
    assert "fields" not in json.loads(JsonFormatter().format(record("x")))


def test_tracebacks_are_shown_without_secrets() -> None:
    made = record("failed")
    try:
        raise ValueError("password=hunter2")
    except ValueError as error:
        made.exc_info = (ValueError, error, error.__traceback__)
    for text in (TextFormatter().format(made), JsonFormatter().format(made)):
        assert "ValueError" in text
        assert "hunter2" not in text


def test_configure_replaces_only_its_own_handler() -> None:
    root = logging.getLogger()
    before = list(root.handlers)
    level = logging.getLogger("kvferry").level
    first, second = io.StringIO(), io.StringIO()
    log.configure("debug", "json", first)
    handler = log.configure("warning", "text", second)
    try:
        logger = logging.getLogger("kvferry.test_log")
        logger.info("not shown")
        logger.warning("shown")
        assert first.getvalue() == ""
        assert "shown" in second.getvalue()
        assert "not shown" not in second.getvalue()
        assert [h for h in root.handlers if h is not handler] == before
    finally:
        root.removeHandler(handler)
        logging.getLogger("kvferry").setLevel(level)
