"""Prompts as clients send them: texts, token ids, or lists of either."""

from __future__ import annotations

from array import array as Column
from collections.abc import Callable, Sequence
from typing import Any

from common.messages.arrays import int32s
from common.messages.tokenize import IdsPrompt, PromptSource, TextPrompt
from services.router.errors import bad_field, shown
from services.router.json_schema import Schema, array, either

MAX_INT32 = (1 << 31) - 1
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INT32}


def prompts_schema(most: int) -> Schema:
    """Describe what `read_prompts` takes."""
    text: Schema = {"type": "string", "minLength": 1}
    ids = array(TOKEN_ID, minItems=1)
    return either(text, ids, array(either(text, ids), minItems=1, maxItems=most))


def read_prompts(
    value: Any, field: str, add_special_tokens: bool, check_number: Callable[[list[Any]], None]
) -> tuple[PromptSource, ...]:
    """Read a field with one prompt or several; ApiError 400 names the one at fault.

    Token ids may come as a column of `json_child`, which has only what may be ids.
    """
    if isinstance(value, list) and (not value or type(value[0]) is not int):
        check_number(value)
        return tuple(
            _read_prompt(prompt, f"{field}[{at}]", add_special_tokens)
            for at, prompt in enumerate(value)
        )
    if not isinstance(value, (str, list, Column)):
        kinds = "a string, an array of token ids, or an array of either"
        raise bad_field(field, f"should be {kinds} (it is {shown(value)})")
    return (_read_prompt(value, field, add_special_tokens),)


def _read_prompt(value: Any, field: str, add_special_tokens: bool) -> PromptSource:
    if isinstance(value, Column):
        return IdsPrompt(value)
    if not isinstance(value, (str, list)):
        message = f"should be a string or an array of token ids (it is {shown(value)})"
        raise bad_field(field, message)
    if isinstance(value, str):
        if not value:
            raise bad_field(field, "should not be empty", "empty_string")
        return TextPrompt(value, add_special_tokens)
    if not value:
        raise bad_field(field, "should not be empty", "empty_array")
    check_ids(value, field)
    return IdsPrompt(int32s(value))


def check_ids(ids: Sequence[Any], field: str, vocab_size: int = 1 << 31) -> None:
    """Raise ApiError 400 unless all are token ids below `vocab_size`."""
    if isinstance(ids, Column) and max(ids, default=0) < vocab_size:
        return  # none is negative, and `max` is three times as fast as what follows
    if all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        return
    for at, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise bad_field(f"{field}[{at}]", f"is not a token id (it is {shown(token_id)})")
