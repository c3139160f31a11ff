"""Stages of others: what one does wrong ends in an error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.codecs.base import Codec, Stage
from kvferry.core.errors import CodecError

__all__ = ["is_foreign", "no_exit"]

_OURS = "kvferry.codecs."


def is_foreign(stage: Stage) -> bool:
    """Whether a stage, or the codec that it has inside, is not of this project."""
    inner = getattr(stage, "inner", None)
    return not type(stage).__module__.startswith(_OURS) or (isinstance(inner, Codec) and is_foreign(inner))


@contextmanager
def no_exit(who: str) -> Iterator[None]:
    """``sys.exit`` in a stage would end a thread of ours, which nobody would be told.

    Raises:
        CodecError: In its place.
    """
    try:
        yield
    except SystemExit as error:
        raise CodecError(f"{who} called sys.exit({error.code!r}); tell its authors") from error
