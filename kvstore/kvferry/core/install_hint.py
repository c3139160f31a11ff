"""How a user installs an optional part of kvferry."""

from __future__ import annotations

__all__ = ["install_hint"]


def install_hint(extra: str) -> str:
    """The command that brings an extra, for an installed kvferry and for a clone of its repository."""
    return f"pip install 'kvferry[{extra}]' (in a clone of it: pip install -e '.[{extra}]')"
