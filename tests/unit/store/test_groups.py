from __future__ import annotations

import pytest

from kvferry.core.blockstore import Hit
from kvferry.core.spec import KVSpec, Restore
from kvferry.store.groups import restorable

_TEXT = dict[str, str]


def spec(rule: str, rank: int = 0) -> KVSpec:
    """``full``, ``window 32``, ``state``; ``/32`` behind it: tokens of a block, else 16."""
    kind, _, rest = rule.partition("/")
    name, _, window = kind.partition(" ")
    restore = {
        "full": Restore(),
        "window": Restore("last_window", int(window or 1)),
        "state": Restore("snapshot"),
    }[name]
    return KVSpec(
        model="m", revision="", layers=(), block_tokens=int(rest or 16), group=rule, restore=restore,
        tp_rank=rank, tp_size=8,
    )  # fmt: skip


def hit(held: str) -> Hit:
    """One sign a block: ``.`` is not held."""
    return Hit(tuple(None if sign == "." else "dram" for sign in held))


CASES: list[tuple[str, _TEXT, list[int]]] = [
    (
        "the example of the design",
        {"full": "xxxxxxxxxx", "window 32": ".......xxx", "state": "..x.....x."},
        [144],
    ),
    ("full attention alone", {"full": "xxx.x"}, [16, 32, 48]),
    ("full attention, nothing held", {"full": "....."}, []),
    ("full attention, the first block is missing", {"full": ".xxxx"}, []),
    ("full attention, no blocks asked", {"full": ""}, []),
    ("no group at all", {}, []),
    ("window alone, all held", {"window 32": "xxxx"}, [16, 32, 48, 64]),
    ("window alone, a hole", {"window 32": "xx.xx"}, [16, 32, 80]),
    ("window longer than the prefix needs all of it", {"window 1000": "xxx.xx"}, [16, 32, 48]),
    ("window of a part of a block needs the whole block", {"window 1": "x.x"}, [16, 48]),
    ("window of a block and a token needs two blocks", {"window 17": "x.xx"}, [16, 64]),
    ("window of exactly one block", {"window 16": ".x.x"}, [32, 64]),
    ("window, single blocks never make two", {"window 32": ".x.x.x"}, []),
    ("state alone", {"state": "..x.....x."}, [48, 144]),
    ("state, no snapshot", {"state": "....."}, []),
    ("state behind the end of full attention", {"full": "xx.", "state": "..x"}, []),
    ("state at the end of full attention", {"full": "xxx", "state": "..x"}, [48]),
    ("full and window of three blocks", {"full": "xxxxx", "window 48": "..xxx"}, [80]),
    ("full ends before the window is held", {"full": "xx...", "window 32": "...xx"}, []),
    ("window and state that never meet", {"window 32": "xx...", "state": "...x."}, []),
    ("two windows", {"window 16": "x.xxx", "window 32": "xxxx."}, [16, 48, 64]),
    ("blocks of two sizes meet at common lengths", {"full": "xxxxx", "full/32": "xx"}, [32, 64]),
    ("blocks of 16 and 24 meet at 48 only", {"full": "xxxxx", "full/24": "xxx"}, [48]),
    ("sizes without a common length in reach", {"full": "xx", "full/24": "x"}, []),
    ("window in larger blocks", {"full": "xxxxxxxx", "window 32/32": "..xx"}, [96, 128]),
    ("state in larger blocks", {"full": "xxxxxxxx", "state/64": "xx"}, [64, 128]),
    ("a group is shorter than another", {"full": "xxxxxxxx", "window 16": "xxx"}, [16, 32, 48]),
    ("one group holds nothing", {"full": "xxxx", "window 16": "xxxx", "state": "...."}, []),
]


@pytest.mark.parametrize(("held", "lengths"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_restorable(held: _TEXT, lengths: list[int]) -> None:
    assert restorable({spec(rule): hit(signs) for rule, signs in held.items()}) == lengths


def test_ranks_that_hold_less_shorten_the_prefix() -> None:
    ranks = {spec("full", rank): hit("x" * blocks + ".") for rank, blocks in enumerate((5, 3, 4))}
    assert restorable(ranks) == [16, 32, 48]
