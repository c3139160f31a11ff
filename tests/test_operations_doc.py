"""docs/operations.md names every metric and every line of the log that warns, and none that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text()
SOURCES = [ROOT / "kvstore" / "kvferry" / name for name in ("daemon", "store", "client", "wire", "core")]
SOURCES.append(ROOT / "transports" / "kvferry" / "transports")
ANY: Final = "…"
_VALUE: Final = re.compile(r"%(?:\.\d+)?[a-z]")

# formats whose words come from elsewhere, and the lines of the page that stand for them
PASSED_ON: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("daemon/files.py", "%s"): ("the limit of open files is …",),
    ("daemon/node.py", "%s"): ("tier disk may take …, and its device has …",),
    ("daemon/http.py", "%s %s failed"): ("… failed",),
    ("client/mover.py", "%r failed"): ("… failed",),
    ("client/peer.py", "%s"): (
        "peer … lets everybody in, or is too old to say that it does not, …",
    ),
    ("store/disk/tier.py", "tier %s: %s: %s"): (
        "tier X: …: a block takes … bytes with header and folders; capacity is …: none is stored",
    ),
    ("store/problems.py", "tier %s: %s: %s%s"): (),  # a line for each kind of incident
    ("store/remote/peer/tier.py", "tier %s: asking %s"): ("tier X: asking …",),
    ("store/remote/redis/backend.py", "tier %s, server %s: %s"): ("tier X, server H: …",),
    ("transports/auto/port.py", "%s: %s"): ("auto://…: …",),  # of the system, for one connection
    ("transports/ucx/library.py", "UCX: %s (%s)"): ("UCX: … (…)",),
    ("transports/ucx/listener.py", "%s refused %s: %s"): ("… refused …: …",),
}  # fmt: skip


class Line(NamedTuple):
    """A format of the log, where it is, whether it warns, and whether it has words of its own."""

    file: str
    text: str
    warns: bool
    passes_on: bool = False

    @property
    def sample(self) -> str:
        """With ``…`` for each value."""
        return _VALUE.sub(ANY, self.text).replace("\n", " ")


def line(file: str, text: str, *, warns: bool) -> Line:
    """A line of these words; those of ``%s: %s`` come from elsewhere."""
    words = re.findall(r"[a-z]{3,}", _VALUE.sub(" ", text.lower()))
    few = len([word for word in words if word not in ("tier", "server")]) < 2
    return Line(file, text, warns, passes_on=few)


def text_of(node: ast.expr) -> str | None:
    """A string, or an f-string as a format."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "%s" for part in node.values)
        return "".join(str(part) for part in parts)
    return None


def lines_of(file: str, node: ast.AST) -> Iterator[Line]:
    """What one call, or one prepared line, writes."""
    if isinstance(node, ast.Tuple) and len(node.elts) > 1:
        level, text = ast.unparse(node.elts[0]), text_of(node.elts[1])
        if level in ("logging.WARNING", "logging.ERROR") and text and " " in text:
            yield line(file, text, warns=True)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    verb, owner = node.func.attr, ast.unparse(node.func.value).lower()
    if verb in ("info", "warning", "error", "exception", "critical") and owner.endswith(("log", "logger")):
        text = text_of(node.args[0])
        assert text is not None, f"{file}:{node.lineno}: the text of a line stands in its call"
        yield line(file, text, warns=verb != "info")
    elif verb == "log" and len(node.args) > 1:
        quiet = {"logging.INFO", "logging.DEBUG"} & set(map(ast.unparse, ast.walk(node.args[0])))
        for text in filter(None, map(text_of, node.args)):
            if "%" in text:
                yield line(file, text, warns=not quiet)
    elif verb == "incident":
        kind = text_of(node.args[0])
        assert kind, f"{file}:{node.lineno}: the kind of an incident stands in its call"
        yield Line(file, f"tier %s: {kind}: %s", warns=True)


@cache
def logged() -> list[Line]:
    """All lines of the sources; the limiter only passes on what others give it."""
    found: dict[Line, None] = {}
    for root in SOURCES:
        for path in sorted(root.rglob("*.py")):
            file = path.relative_to(root.parent).as_posix()
            if file == "core/log.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                found.update(dict.fromkeys(lines_of(file, node)))
    return list(found)


def section(title: str, end: str) -> str:
    return PAGE[PAGE.index(title) : PAGE.index(end)]


@cache
def documented() -> list[str]:
    """The lines of the page: what stands as code in the first column."""
    rows = section("## What fault lines mean", "## When a remote store fails").splitlines()
    return [
        text for row in rows if row.startswith("| `") for text in re.findall("`([^`]+)`", row.split(" | ")[0])
    ]


@cache
def pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(re.escape(ANY), ".*"), re.DOTALL)


def is_of(shown: str, found: Line) -> bool:
    """Whether what the page shows is a case of the line: it may leave out more than the format does."""
    general = re.sub(r"\b[XH]\b", ANY, shown)
    sample = found.sample
    return bool(pattern(general).fullmatch(sample) or pattern(sample).fullmatch(shown))


FROM_ELSEWHERE = {shown for lines in PASSED_ON.values() for shown in lines}


def test_every_line_that_warns_is_on_the_page() -> None:
    own = [found for found in logged() if found.warns and not found.passes_on]
    told = [shown for shown in documented() if shown not in FROM_ELSEWHERE]
    missing = [
        f"{found.file}: {found.sample}" for found in own if not any(is_of(shown, found) for shown in told)
    ]
    assert len(own) > 60
    assert not missing, "docs/operations.md says nothing of:\n" + "\n".join(missing)


def test_lines_with_words_from_elsewhere_are_known_and_on_the_page() -> None:
    assert {(found.file, found.text) for found in logged() if found.warns and found.passes_on} == set(
        PASSED_ON
    )
    assert set(documented()) >= FROM_ELSEWHERE


def test_every_line_of_the_page_is_logged() -> None:
    """And each says enough to be told from others."""
    assert len(documented()) == len(set(documented()))
    for shown in set(documented()) - FROM_ELSEWHERE:
        lines = {found.sample for found in logged() if not found.passes_on and is_of(shown, found)}
        assert lines, f"no source logs {shown!r}"
        assert len(lines) <= 3, f"{shown!r} stands for too many: {sorted(lines)}"


def test_every_metric_is_said_what_to_do_about() -> None:
    listed = set(re.findall(r"^\| `kvferry_(\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    rows = section("### Metric by metric", "## What fault lines mean").splitlines()
    firsts = [row.split(" | ")[0] for row in rows if row.startswith("| `")]
    named = [name for first in firsts for name in re.findall(r"`(\w+)`", first)]
    assert len(listed) > 40
    assert sorted(named) == sorted(listed)
