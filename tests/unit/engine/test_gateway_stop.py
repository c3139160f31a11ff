from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.gateway.stop import StopText


def cut(pieces: list[str], stop: list[str]) -> tuple[str, bool]:
    text = StopText(stop)
    shown = "".join(text.push(p) for p in pieces)
    return shown + text.finish(), text.stopped


def test_text_ends_before_the_stop_string() -> None:
    assert cut(["ab", "cd", "ef"], ["cd"]) == ("ab", True)
    assert cut(["abc", "def"], ["cd"]) == ("ab", True)
    assert cut(["abc"], ["xyz"]) == ("abc", False)


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_certain() -> None:
    text = StopText(["END"])
    assert text.push("abE") == "ab"
    assert text.push("N") == ""
    assert text.push("x") == "ENx"
    assert text.push("EN") == ""
    assert text.finish() == "EN"
    assert not text.stopped


def test_the_first_of_several_counts_and_nothing_follows_it() -> None:
    text = StopText(["zz", "b"])
    assert text.push("abzz") == "a"
    assert text.push("more") == ""
    assert text.finish() == ""


@given(
    st.lists(st.text("ab", max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
)
def test_pieces_make_no_difference(pieces: list[str], stop: list[str]) -> None:
    whole = "".join(pieces)
    ends = [i for s in stop if (i := whole.find(s)) >= 0]
    shown, stopped = cut(pieces, stop)
    # In pieces the first stop string to be complete ends the text; one that begins earlier and ends later
    # is cut there only if it is complete in the same piece.
    assert stopped == bool(ends)
    if not ends:
        assert shown == whole
    else:
        assert whole.startswith(shown)
        assert not any(s in shown for s in stop)
