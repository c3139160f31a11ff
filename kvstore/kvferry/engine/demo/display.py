"""What a person sees of the demo: steps and waiting on standard error, answers and table on standard output.

With ``--json`` standard output is left to the object alone, and everything else goes to standard error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from kvferry.engine.demo.report import render_table

__all__ = ["Display", "printable"]


def printable(text: str) -> str:
    """``text`` without control characters but line breaks: a model may say anything, also escape codes."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


class Display:
    """Writes to the terminal; one thread.

    Args:
        quiet_stdout: Whether answers and table go to standard error, too.
    """

    def __init__(self, *, quiet_stdout: bool) -> None:
        self._notes = Console(stderr=True, highlight=False)
        self._answers = self._notes if quiet_stdout else Console(highlight=False)

    def say(self, line: str) -> None:
        """A step of the demo, before it is done."""
        self._notes.print(Text(line, style="dim"), soft_wrap=True)

    def log_tail(self, name: str, tail: str) -> None:
        """The end of the log of a process that failed."""
        self._notes.print(Text(f"the log of the {name} process ends with:", style="bold"), soft_wrap=True)
        self._notes.print(Text(printable(tail)), soft_wrap=True)

    def question(self, turn: int, text: str, prompt_tokens: int) -> None:
        """What is asked."""
        self._answers.print()
        self._answers.print(Text(f"[turn {turn}, {prompt_tokens:,} tokens] {printable(text)}", style="bold"))

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """A spinner while something takes time; nothing where there is no terminal."""
        with self._notes.status(Text(text, style="dim")):
            yield

    @contextlib.contextmanager
    def answer(self) -> Iterator[Answering]:
        """Show an answer as it comes: a spinner until its first text, then the text."""
        shown = Answering(self._notes, self._answers)
        try:
            yield shown
        finally:
            shown.close()

    def result(self, result: Mapping[str, Any]) -> None:
        """The closing table, and whether both sides agree."""
        self._answers.print()
        repeats = result["repeats"]
        medians = f", medians of {repeats} repeats" if repeats > 1 else ""
        threads = f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}"
        head = f"{result['model']}, {result['dtype']}, {threads} a process{medians}"
        self._answers.print(Text(head, style="bold"))
        self._answers.print(render_table(result))
        self._answers.print()
        if result["identical"]:
            self._answers.print(Text("The text is identical to a single process's.", style="bold green"))
        else:
            self._answers.print(
                Text(f"NOT identical to a single process: {result['difference']}", style="bold red")
            )


class Answering:
    """One answer on its way to the terminal."""

    def __init__(self, notes: Console, answers: Console) -> None:
        self._answers = answers
        self._status = notes.status(Text("waiting for the first token", style="dim"))
        self._status.start()
        self._begun = False

    def text(self, piece: str) -> None:
        """More of the answer."""
        if not self._begun and piece:
            self._status.stop()
            self._begun = True
        self._answers.print(Text(printable(piece)), end="", soft_wrap=True)

    def close(self) -> None:
        """The answer has ended."""
        self._status.stop()
        self._answers.print()
