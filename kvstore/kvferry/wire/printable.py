"""What a peer sent, in words that are safe to show."""

from __future__ import annotations

from typing import Final

__all__ = ["magic_hint", "printable"]

_MAGIC: Final = b"KVFY"
_HINTS: Final = (
    ((b"GET ", b"POST", b"PUT ", b"HEAD", b"HTTP", b"OPTI", b"DELE", b"PATC", b"CONN", b"PRI "), "HTTP"),
    ((b"\x89KVL",), "lanes; give the listener's address lanes=, or dial without"),
    ((b"\x16\x03", b"\x15\x03"), "TLS; use tls:// on both sides or on neither"),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a Python pickle, which is never read"),
    ((b"SSH-",), "SSH"),
    ((_MAGIC[::-1],), "the magic in the wrong byte order"),
)


def magic_hint(first: bytes) -> str:
    """What the first four bytes of a peer that does not speak kvferry look like."""
    for prefixes, what in _HINTS:
        if first.startswith(prefixes):
            return f"its first bytes {first!r} look like {what}"
    return f"its first bytes are {first!r}, a frame starts with {_MAGIC!r}"


def printable(text: str, limit: int = 500) -> str:
    """A peer's ``text``, safe for a log line: one line, no control characters, at most ``limit`` long."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)
