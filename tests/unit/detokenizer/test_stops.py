"""Stop strings are found across any split, never shown, and nothing else is held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.stops import StopMatch, StopMatcher

WORDS = st.text("ab ", min_size=1, max_size=4)
STOPS = st.lists(WORDS, min_size=1, max_size=8).map(tuple)
PIECES = st.lists(st.text("ab ", max_size=4), max_size=12)


def first_end(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the stop that ends first ends, and which it is: the longest of those that end there."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return end, max(here, key=len)
    return None


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        result = matcher.push(piece)
        if isinstance(result, StopMatch):
            return shown + result.text, result.stop
        shown += result
    return shown + matcher.flush(), None


@given(STOPS, PIECES, st.booleans())
def test_the_stop_that_ends_first_is_found_whatever_the_split(
    stops: tuple[str, ...], pieces: list[str], include: bool
) -> None:
    text = "".join(pieces)
    shown, stop = run(StopMatcher(stops, include), pieces)
    expected = first_end(text, stops)
    if expected is None:
        assert (shown, stop) == (text, None)
    else:
        end, word = expected
        assert stop == word
        assert shown == (text[:end] if include else text[: end - len(word)])


@given(STOPS, PIECES)
def test_only_what_may_begin_a_stop_is_held_back(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, include_stop=False)
    given_text = shown = ""
    for piece in pieces:
        result = matcher.push(piece)
        if isinstance(result, StopMatch):
            return
        given_text += piece
        shown += result
        held = given_text[len(shown) :]
        begins = [
            given_text[-k:] if k else ""
            for stop in stops
            for k in range(len(stop))
            if given_text.endswith(stop[:k])
        ]
        assert held == max(begins, key=len, default="")


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher((), include_stop=False)
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""
