import itertools

import pytest

from linrope.generation.text import StopStrings


def fed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """What is shown of a text in pieces, and what ended it."""
    until = StopStrings(stops)
    shown = "".join(until.feed(piece) for piece in pieces)
    return shown + until.finish(), until.found


@pytest.mark.parametrize(
    ("stops", "text", "shown", "found"),
    [
        ([], "abc", "abc", None),
        (["END"], "some END more", "some ", "END"),
        (["END"], "END", "", "END"),
        (["END"], "EEND", "E", "END"),
        (["END"], "an EN is none", "an EN is none", None),
        (["END"], "ends in EN", "ends in EN", None),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
        (["b", "abc"], "xabc", "xa", "b"),  # the first that is complete, not the one that began first
        (["ab", "abc"], "xab", "x", "ab"),
        (["é🐍"], "aé🐍b", "a", "é🐍"),
    ],
)
def test_the_text_ends_before_the_stop_however_it_is_cut(stops, text, shown, found):
    """Token by token; and any cut shows the same, for stops of which none is part of another."""
    assert fed(stops, list(text)) == (shown, found)
    if len(stops) < 2:
        for first, second in itertools.combinations(range(len(text) + 1), 2):
            assert fed(stops, [text[:first], text[first:second], text[second:]]) == (shown, found)


def test_of_two_in_one_piece_the_first_counts_and_then_the_longer():
    assert fed(["cd", "b"], ["abcd"]) == ("a", "b")
    assert fed(["b", "bc"], ["abcd"]) == ("a", "bc")


def test_nothing_is_held_back_that_no_stop_begins_with():
    until = StopStrings(["END"])
    assert [until.feed(piece) for piece in ("a", "E", "N", "x", "E")] == ["a", "", "", "ENx", ""]
    assert until.finish("ND") == ""
    assert until.found == "END"
    assert until.feed("more") == ""
