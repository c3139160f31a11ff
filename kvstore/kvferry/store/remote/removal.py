"""Blocks go from a remote store: the manifest first, so that nobody finds a block whose parts are going."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvferry.core.errors import CorruptBlockError
from kvferry.store.remote.backend import Answer, Backend, Done, Get
from kvferry.store.remote.index import Held
from kvferry.store.remote.manifest import HEAD_NBYTES, MAX_MANIFEST_NBYTES, parse_head, parts_of
from kvferry.store.remote.names import Names
from kvferry.store.remote.payload import Received, Sink
from kvferry.store.tier import ReadOutcome

__all__ = ["find_parts", "remove_blocks", "unchanged"]


def remove_blocks(backend: Backend, names: Names, blocks: Sequence[Held], deadline: float) -> list[Answer]:
    """Remove blocks with their parts; what came of each manifest. What is not known of parts is looked up."""
    unknown = [n for n, held in enumerate(blocks) if held.parts is None]
    blocks = list(blocks)
    for n, parts in zip(
        unknown, find_parts(backend, names, [blocks[n].name for n in unknown], deadline), strict=True
    ):
        blocks[n] = blocks[n]._replace(parts=parts)
    doomed = [name for held in blocks for name in (held.name, *(held.parts or ()))]
    answers = iter(backend.delete(doomed, deadline) if doomed else [])
    found: list[Answer] = []
    for held in blocks:
        own = [next(answers) for _ in range(1 + len(held.parts or ()))]
        found.append(own[0])
    return found


def unchanged(backend: Backend, names: Names, blocks: Sequence[Held], deadline: float) -> list[Held]:
    """Those whose manifest still names the parts that were not found: another may have come in its place."""
    split = [held for held in blocks if held.parts]
    now = dict(
        zip(
            [held.name for held in split],
            find_parts(backend, names, [held.name for held in split], deadline),
            strict=True,
        )
    )
    return [held for held in blocks if not held.parts or now[held.name] == held.parts]


def find_parts(
    backend: Backend, names: Names, manifests: Sequence[str], deadline: float
) -> list[tuple[str, ...]]:
    """The names of the parts of blocks: a few bytes of each tell whether it has any."""
    if not manifests:
        return []
    starts = [bytearray(HEAD_NBYTES) for _ in manifests]
    gets = [Get(n, partial(_fill, s), most=HEAD_NBYTES) for n, s in zip(manifests, starts, strict=True)]
    heads = backend.get(gets, deadline)
    wanted = [
        n for n, (answer, start) in enumerate(zip(heads, starts, strict=True))
        if answer.done is Done.OK and _has_parts(start)
    ]  # fmt: skip
    found: list[tuple[str, ...]] = [()] * len(manifests)
    if wanted:
        wholes = [bytearray() for _ in wanted]
        gets = [Get(manifests[n], partial(_collect, whole)) for n, whole in zip(wanted, wholes, strict=True)]
        for n, whole, answer in zip(wanted, wholes, backend.get(gets, deadline), strict=True):
            if answer.done is Done.OK:
                found[n] = _names_in(names, manifests[n], memoryview(whole))
    return found


def _has_parts(start: bytearray) -> bool:
    try:
        return not parse_head(start).inline
    except CorruptBlockError:
        return False


def _names_in(names: Names, base: str, whole: memoryview) -> tuple[str, ...]:
    try:
        write_id, count = parts_of(whole)
    except (CorruptBlockError, ValueError):
        return ()
    return tuple(names.part(base, write_id, n) for n in range(count))


def _fill(into: bytearray, nbytes: int) -> Sink:
    if nbytes == len(into):
        yield [memoryview(into)]
    return Received(ReadOutcome.HIT)


def _collect(into: bytearray, nbytes: int) -> Sink:
    if nbytes <= HEAD_NBYTES + MAX_MANIFEST_NBYTES:
        into.extend(bytes(nbytes))
        yield [memoryview(into)]
    return Received(ReadOutcome.HIT)
