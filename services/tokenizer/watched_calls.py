"""The grammar of a text that is free until a call begins, and free again behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.messages.tokenize import ToolUse
from services.tokenizer.functions import Function
from services.tokenizer.lark import Fragment
from services.tokenizer.tool_grammars.protocol import Dialect, ToolGrammar

# The formats in which no call begins without the first marker.
MARKED = frozenset({"deepseek", "hermes", "mistral"})
_ANY_OBJECT = {"type": "object"}


def watched_calls(
    tools: ToolUse,
    functions: Sequence[Function],
    dialect: Dialect,
    make: ToolGrammar,
    max_calls: int,
) -> Fragment | None:
    """Hold calls to what the client wants of them: strict arguments, or no more than one call.

    None where it wants neither, or where the first marker is no token that free text can be kept
    from. Functions that are not strict get any object for their arguments.
    """
    begin, vocabulary = dialect.markers.begin, dialect.vocabulary
    token_id = vocabulary.token_of(begin) if vocabulary.is_special(begin) else None
    is_wanted = not tools.parallel or any(function.strict for function in functions)
    if token_id is None or not is_wanted:
        return None
    loosened = [
        function if function.strict else replace(function, parameters=_ANY_OBJECT)
        for function in functions
    ]
    text = f"{vocabulary.any(without=token_id)}*"
    calls = make(loosened, dialect, max_calls)
    how_often = "*" if max_calls > 1 else "?"
    return replace(calls, expression=f"{text} ({calls.expression} {text}){how_often}")
