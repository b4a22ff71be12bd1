"""Stop strings: found across token boundaries, and not shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found; `text` is what may be shown of the text given so far."""

    text: str
    stop: str


class StopMatcher:
    """Looks for the stop string that ends first; where two end together, for the longer.

    Each stop string has a Knuth-Morris-Pratt automaton. Only automata that have begun, or begin
    with the character, take a step, so most characters cost one lookup in a dict. The matcher holds
    back the longest suffix of the text that begins a stop string, and nothing more.
    """

    __slots__ = ("_begun", "_borders", "_by_first", "_held", "_include", "_matched", "_stops")

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._stops = tuple(sorted((stop for stop in stops if stop), key=len, reverse=True))
        self._borders = [_border_lengths(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop the text ends with
        self._begun: list[int] = []  # the stops of which that is something, by number
        self._by_first: dict[str, list[int]] = {}
        for index, stop in enumerate(self._stops):
            self._by_first.setdefault(stop[0], []).append(index)
        self._include = include_stop
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """Take more text; return what may be shown now, or the match that ends the stream."""
        if not self._stops:
            return text
        whole = self._held + text
        for position, character in enumerate(text, len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None:
                end = position if self._include else position - len(stop)
                return StopMatch(whole[:end], stop)
        keep = max((self._matched[index] for index in self._begun), default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """Return what was held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        begins = self._by_first.get(character, [])
        if not self._begun:
            if not begins:
                return None
            touched = begins
        else:
            touched = sorted({*self._begun, *begins})
        found = None
        self._begun = []
        for index in touched:
            stop, length = self._stops[index], self._matched[index]
            borders = self._borders[index]
            while length and stop[length] != character:
                length = borders[length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                found = found or stop
                length = borders[length - 1]
            self._matched[index] = length
            if length:
                self._begun.append(index)
        return found


def _border_lengths(word: str) -> list[int]:
    """For each prefix of the word, the length of its longest proper prefix that is its suffix."""
    borders = [0] * len(word)
    length = 0
    for index in range(1, len(word)):
        while length and word[index] != word[length]:
            length = borders[length - 1]
        if word[index] == word[length]:
            length += 1
        borders[index] = length
    return borders
