"""The text of a custom tool's input, read out of the JSON object in which models write it."""

from __future__ import annotations

import json
import re
from typing import Final

from services.router.responses.tools import INPUT

_HEAD: Final = f'{{"{INPUT}":"'  # with white space between its parts
# What is complete of a JSON string; the halves of a surrogate pair belong together.
_COMPLETE = re.compile(
    r"""
    (?: [^"\\]
      | \\[^u]
      | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
      | \\u[dD][89abAB][0-9a-fA-F]{2} (?: \\u[0-9a-fA-F]{4} | (?=[^\\]|\\[^u]) )
    )*
    """,
    re.VERBOSE | re.DOTALL,
)
_LONGEST_ESCAPE: Final = len(r"\ud83d\ude00")


class CustomInput:
    """Hands on the input as it comes; what is no such object is handed on as it is."""

    __slots__ = ("_held", "_place")

    def __init__(self) -> None:
        self._held = ""
        self._place = "head"  # or "text", "end", or "raw" where it is no such object

    def push(self, text: str) -> str:
        """Take more of the arguments; return what is new of the input."""
        self._held += text
        if self._place == "head":
            self._read_head()
        match self._place:
            case "text":
                return self._read_text()
            case "raw":
                said, self._held = self._held, ""
                return said
            case "end":
                self._held = ""
        return ""

    def finish(self) -> str:
        """Return what was held back, if it is no such object: no more comes."""
        return self._held if self._place == "head" else ""

    def _read_head(self) -> None:
        at = 0
        for number, character in enumerate(self._held):
            if character.isspace():
                continue
            if character != _HEAD[at]:
                self._place = "raw"
                return
            at += 1
            if at == len(_HEAD):
                self._held = self._held[number + 1 :]
                self._place = "text"
                return

    def _read_text(self) -> str:
        found = _COMPLETE.match(self._held)
        assert found is not None
        raw, rest = found[0], self._held[found.end() :]
        if rest.startswith('"'):
            self._place, rest = "end", ""
        elif len(rest) >= _LONGEST_ESCAPE:  # no escape that JSON has
            raw, rest = raw + rest, ""
        self._held = rest
        try:
            said: str = json.loads(f'"{raw}"', strict=False)
        except ValueError:
            return raw
        return said.encode("utf-8", "replace").decode()


def custom_input(arguments: str) -> str:
    """Return the input in complete arguments."""
    reader = CustomInput()
    return reader.push(arguments) + reader.finish()
