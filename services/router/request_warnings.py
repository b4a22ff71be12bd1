"""Warnings about request fields that are not honoured, in a response header and the log."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

import structlog

from services.router.errors import shown

HEADER: Final = "Warning"
MAX_IN_HEADER: Final = 8  # with MAX_CHARACTERS below 2 KB: proxies take 4 KB of headers or more
MAX_CHARACTERS: Final = 200
MAX_NAME_CHARACTERS: Final = 64
MAX_LOGGED: Final = 256  # kinds of warnings; they may have names that clients make up

_NUMBER = re.compile(r"\[\d+\]")


class WarningLog:
    """Logs each kind of warning once; all requests of a server share it."""

    def __init__(self, refuse_unknown: bool = False) -> None:
        self.refuse_unknown = refuse_unknown
        self._kinds: set[str] = set()
        self._log = structlog.get_logger()

    def note(self, field: str, message: str) -> None:
        """Log a warning, unless the same one about this field was logged before."""
        if self._is_new(f"{_NUMBER.sub('[]', field)}: {message}"):
            self._log.warning("request warning", field=field, message=message)

    def note_unknown(self, names: Sequence[str], num_more: int) -> None:
        """Log unknown fields of one request in a line, unless the same names were logged before."""
        if self._is_new(" ".join(names)):
            self._log.warning("unknown request fields", fields=list(names), more=num_more)

    def _is_new(self, kind: str) -> bool:
        if kind in self._kinds or len(self._kinds) >= MAX_LOGGED:
            return False
        self._kinds.add(kind)
        return True


class Warnings:
    """The warnings of one request.

    In the header each is `299 - "FIELD: MESSAGE"`, as RFC 7234 has it and Kubernetes sends it:
    RFC 9111 has retired the codes about caches, and nothing has taken its place.
    """

    def __init__(self, log: WarningLog | None = None) -> None:
        self._log = WarningLog() if log is None else log
        self._texts: list[str] = []
        self._num_left_out = 0

    @property
    def refuse_unknown(self) -> bool:
        """Whether an unknown field is an error."""
        return self._log.refuse_unknown

    def add(self, field: str, message: str) -> None:
        """Warn about a field; warnings beyond the header's limit are only counted."""
        if self._show(f"{field}: {message}"[:MAX_CHARACTERS]):
            self._log.note(field, message)

    def add_unknown(self, names: Sequence[str]) -> None:
        """Warn about fields that a request does not have; a million of them cost nothing."""
        first = [name[:MAX_NAME_CHARACTERS] for name in names[:MAX_IN_HEADER]]
        for name in first:
            self._show(f"{name}: unknown request field {shown(name)} is ignored"[:MAX_CHARACTERS])
        self._num_left_out += len(names) - len(first)
        self._log.note_unknown(first, len(names) - len(first))

    def _show(self, text: str) -> bool:
        """Put a text into the header; whether it is new there and there was room."""
        if text in self._texts:
            return False
        if len(self._texts) == MAX_IN_HEADER:
            self._num_left_out += 1
            return False
        self._texts.append(text)
        return True

    def header(self) -> str:
        more = [f"and {self._num_left_out} more"] if self._num_left_out else []
        return ", ".join(f"299 - {_quoted(text)}" for text in self._texts + more)


def _quoted(text: str) -> str:
    """Quote as HTTP does; JSON's escapes keep it ASCII without line breaks."""
    return json.dumps(text)
