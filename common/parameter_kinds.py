"""Of which JSON types a tool's parameters are, for formats that write their values as they are.

`<arg_value>5</arg_value>` is the number 5 or the text "5", as the function's schema has it. The
tokenizer knows the schemas; the detokenizer gets these kinds with the answer's stream header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

# Kinds are letters: a text as it is, a string in quotes as in JSON, and the other types of JSON. An
# integer is a number, too.
TEXT: Final = "t"
QUOTED: Final = "s"
STRINGS: Final = frozenset((TEXT, QUOTED))
NULL, BOOLEAN, INTEGER, NUMBER, ARRAY, OBJECT = "nbifao"
ANY: Final = "tnbifao"
# Models write Python's words, too.
PYTHON_WORDS: Final[Mapping[str, str]] = {"True": "true", "False": "false", "None": "null"}

Kinds: TypeAlias = Mapping[str, Mapping[str, str]]
"""Functions by name, and in each the kinds of its parameters; those not here are of any kind."""


def kind_of(value: Any) -> str:
    """Return the kind of a value that was JSON."""
    match value:
        case None:
            return NULL
        case bool():
            return BOOLEAN
        case int():
            return INTEGER
        case float():
            return NUMBER
        case str():
            return QUOTED
        case list():
            return ARRAY
    return OBJECT


def pack_kinds(kinds: Kinds) -> bytes:
    return json.dumps(kinds, separators=(",", ":")).encode() if kinds else b""


def unpack_kinds(packed: bytes) -> Kinds:
    kinds: Kinds = json.loads(packed) if packed else {}
    return kinds
