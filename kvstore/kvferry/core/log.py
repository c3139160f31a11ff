"""Log lines as text or JSON, and a limiter that sums repeated ones.

Modules log through ``logging.getLogger(__name__)`` and pass values as ``extra={"fields": {...}}`` where a
machine should find them; :func:`configure` installs the handler for a whole process. Libraries that use
kvferry configure logging themselves and never call it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO

__all__ = ["JsonFormatter", "LogLimiter", "TextFormatter", "configure", "redact"]

# "token" alone is no secret here: it is what models read and write
_SENSITIVE = r"(?:password|passwd|secret|(?:access|auth|api)[_-]?token|credential|authorization|api[_-]?key)"
_SENSITIVE_KEY = re.compile(rf"(?:^|[_.-]){_SENSITIVE}s?$", re.IGNORECASE)
_USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?P<key>\b[\w-]*{_SENSITIVE}\b['\"]?\s*[=:]\s*)(?:Bearer\s+)?[^\s,;&]+", re.IGNORECASE
)
_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]")
REDACTED = "***"


def redact(text: str) -> str:
    """``text`` without what looks like a secret: user info in URLs, values after ``password=``, and so on."""
    text = _USER_INFO.sub(rf"\g<scheme>{REDACTED}@", text)
    return _ASSIGNED.sub(_redacted, text)


def _redacted(found: re.Match[str]) -> str:
    key = found["key"]
    if key.endswith(": ") and found.string[: found.start()].endswith("/"):
        return found[0]  # a path with what is wrong with it, as of /etc/passwd
    return f"{key}{REDACTED}"


class LogLimiter:
    """Sums repeated log lines: one line a key in ``interval_s``, with the number that were kept back.

    The first line of a key comes at once; those of the same key within the interval are counted. When it is
    over, the next line of that key tells the count too; if one of another key comes sooner, or :meth:`flush`
    is called, a line tells the count alone, and the interval begins again. Thread safe; holds at most
    ``max_keys`` keys, so that a flood of peers cannot grow it.

    Args:
        logger: Where the lines go.
        interval_s: Seconds between two lines of one key.
        max_keys: Keys remembered; when one more comes, that whose line is oldest is reported at once, and
            forgotten.
        clock: A monotonic clock, for tests.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        interval_s: float = 10.0,
        max_keys: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._max_keys = max_keys
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[Hashable, _Repeated] = {}

    def log(self, level: int, key: Hashable, message: str, *args: object) -> bool:
        """Log ``message % args`` unless a line of ``key`` came less than an interval ago.

        Args:
            level: A level of :mod:`logging`.
            key: What counts as the same line, such as ``(peer, reason)``.
            message: A ``%`` format, as for :mod:`logging`.
            *args: Its values; of an exception only the text is kept, not the frames with all that they hold.

        Returns:
            Whether a line was written.
        """
        args = tuple(str(arg) if isinstance(arg, BaseException) else arg for arg in args)
        now = self._clock()
        with self._lock:
            entry = self._seen.get(key)
            if entry is not None and now - entry.since < self._interval_s:
                entry.repeat(level, message, args)
                return False
            self._seen.pop(key, None)
            due = self._take_due(now)
            if len(self._seen) >= self._max_keys:
                due += self._seen.pop(next(iter(self._seen))).take(now)
            self._seen[key] = _Repeated(now)
        if entry is not None and entry.count:
            message += entry.told(now)
        for line in due:
            self._logger.log(line.level, line.message, *line.args)
        self._logger.log(level, message, *args)
        return True

    def flush(self) -> None:
        """Report everything that was kept back and forget it; an owner calls this when it closes."""
        now = self._clock()
        with self._lock:
            due = [line for entry in self._seen.values() for line in entry.take(now)]
            self._seen.clear()
        for line in due:
            self._logger.log(line.level, line.message, *line.args)

    def _take_due(self, now: float) -> list[_Line]:
        """What was kept back of keys whose interval is over; those of which nothing was are forgotten."""
        due: list[_Line] = []
        for key in [key for key, entry in self._seen.items() if now - entry.since >= self._interval_s]:
            entry = self._seen.pop(key)
            if entry.count:
                due += entry.take(now)
                self._seen[key] = entry  # behind the others: they are in the order of their lines
        return due


class _Line(NamedTuple):
    level: int
    message: str
    args: tuple[object, ...]


class _Repeated:
    """The lines of one key that were kept back since the one at ``since``."""

    __slots__ = ("_last", "count", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.count = 0
        self._last = _Line(0, "", ())

    def repeat(self, level: int, message: str, args: tuple[object, ...]) -> None:
        self.count += 1
        self._last = _Line(level, message, args)

    def told(self, now: float) -> str:
        return f" ({self.count} more in {now - self.since:.0f} s)"

    def take(self, now: float) -> list[_Line]:
        """The line that tells of them, if there are any; the interval begins again with it."""
        if not self.count:
            return []
        last = self._last
        line = last._replace(message=last.message + self.told(now))
        self.since, self.count = now, 0
        return [line]


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    if not isinstance(fields, Mapping):
        return {}
    return {str(k): REDACTED if _SENSITIVE_KEY.search(str(k)) else v for k, v in fields.items()}


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO kvferry.wire thread: message key=value`` for people."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it if the record has one."""
        head = f"{_utc(record)} {record.levelname:<7} {record.name} [{record.threadName}]:"
        fields = "".join(f" {key}={_one_line(value)}" for key, value in _fields(record).items())
        message = _one_line(record.getMessage())
        text = f"{head} {message}{fields}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return redact(text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time, level, logger, thread, message``, the fields, and ``error`` if any."""

    def format(self, record: logging.LogRecord) -> str:
        """One line without line breaks in it."""
        line: dict[str, object] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": redact(record.getMessage()),
        }
        for key, value in _fields(record).items():
            line.setdefault(key, redact(value) if isinstance(value, str) else value)
        if record.exc_info:
            line["error"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=lambda value: redact(str(value)))


def _one_line(value: object) -> str:
    """Text from a peer must neither forge lines nor steer the terminal."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], str(value))


def _utc(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def configure(
    level: str = "info", line_format: Literal["text", "json"] = "text", stream: TextIO | None = None
) -> logging.Handler:
    """Send the log lines of this process to ``stream`` (standard error).

    Replaces a handler that an earlier call installed; handlers of others stay. Output of commands goes to
    standard output, so the two never mix.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``, for kvferry's own loggers; others log from
            ``warning`` on.
        line_format: ``text`` for people, ``json`` for machines.
        stream: Where the lines go.

    Returns:
        The handler.
    """
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    handler = _Handler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if line_format == "json" else TextFormatter())
    root.addHandler(handler)
    logging.getLogger("kvferry").setLevel(level.upper())
    return handler


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # cannot be subscripted on Python 3.10


class _Handler(_StreamHandler):
    """The handler of :func:`configure`, told apart from those of others by its class."""
