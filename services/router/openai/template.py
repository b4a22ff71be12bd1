"""The chat template's variables in a request; the tokenizer knows which ones it may set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from common.chat_formats import THINKING_SWITCHES
from common.messages.tokenize import ChatPrompt
from services.router.errors import bad_field, shown, unsupported
from services.router.json_body import dump
from services.router.json_schema import OBJECT, array, nullable
from services.router.openai.tools import Tools
from services.router.request_fields import object_at, objects_at

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

MAX_VARIABLES = 64
MAX_VARIABLES_BYTES = 64 << 10
MAX_DOCUMENTS = 256
MAX_DEPTH = 8


def chat_prompt(
    messages: list[dict[str, Any]], tools: Tools, adds: bool, continues: bool, variables: bytes
) -> ChatPrompt:
    """Return a conversation as the tokenizer renders it; ApiError 400."""
    if continues and adds:
        message = "cannot be used together with add_generation_prompt"
        raise bad_field("continue_final_message", message)
    return ChatPrompt(dump(messages), tools.json, adds, continues, variables)


def check_special(adds: bool | None) -> bool | None:
    """Refuse `add_special_tokens` of a conversation; ApiError 400."""
    if adds:
        raise unsupported("add_special_tokens", "the chat template writes them")
    return adds


def pack_variables(
    kwargs: dict[str, Any] | None,
    documents: list[Any] | None = None,
    effort: Effort | None = None,
) -> bytes:
    """Pack `chat_template_kwargs`, `documents` and `reasoning_effort`; ApiError 400.

    An effort of "none" switches thinking off under both names that templates have for it, any
    other switches it on, unless the client sets one of these names itself.
    """
    variables = dict(kwargs or {})
    if documents:
        if "documents" in variables:
            raise bad_field("documents", "is in chat_template_kwargs, too")
        variables["documents"] = documents
    if effort is not None:
        _think(variables, effort)
    return dump(variables) if variables else b""


def _think(variables: dict[str, Any], effort: Effort) -> None:
    other = variables.get("reasoning_effort")
    if other not in (None, effort):
        message = f"contradicts chat_template_kwargs, which says {shown(other)}"
        raise bad_field("reasoning_effort", message)
    if effort != "none":
        variables["reasoning_effort"] = effort
    if not any(switch in variables for switch in THINKING_SWITCHES):
        variables.update(dict.fromkeys(THINKING_SWITCHES, effort != "none"))


def budget_of(
    effort: Effort | None, budget: int | None = None, kwargs: Mapping[str, Any] | None = None
) -> int:
    """Return the most tokens of reasoning, -1 for no limit: 0 for the effort "none", as far as
    neither the budget nor `chat_template_kwargs` says otherwise."""
    if budget is not None:
        return budget
    is_set = any(switch in (kwargs or {}) for switch in THINKING_SWITCHES)
    return 0 if effort == "none" and not is_set else -1


def read_kwargs(kwargs: Any) -> dict[str, Any] | None:
    """Read `chat_template_kwargs`; ApiError 400."""
    field = "chat_template_kwargs"
    if kwargs is None:
        return None
    if len(object_at(kwargs, field)) > MAX_VARIABLES:
        raise bad_field(field, f"may have {MAX_VARIABLES} variables at most (it has {len(kwargs)})")
    _check_depth(kwargs, field)
    size = len(dump(kwargs))
    if size > MAX_VARIABLES_BYTES:
        raise bad_field(field, f"may have {MAX_VARIABLES_BYTES} bytes at most (it has {size})")
    return cast(dict[str, Any], kwargs)


def read_documents(documents: Any) -> list[Any] | None:
    """Read `documents`; ApiError 400."""
    if documents is None:
        return None
    expected = f"an array of at most {MAX_DOCUMENTS} objects"
    objects = [each for each, _ in objects_at(documents, "documents", expected, MAX_DOCUMENTS)]
    _check_depth(objects, "documents")
    return objects


def _check_depth(value: Any, field: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [
            child
            for value in containers
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise bad_field(field, f"is nested deeper than {MAX_DEPTH} levels")


TemplateKwargs = Annotated[
    dict[str, Any] | None,
    PlainValidator(read_kwargs),
    WithJsonSchema(nullable({**OBJECT, "maxProperties": MAX_VARIABLES})),
]
NoSpecialTokens = Annotated[
    bool | None,
    AfterValidator(check_special),
    WithJsonSchema({"enum": [None, False]}),
    Field(description="only false: the template writes them"),
]
Documents = Annotated[
    list[Any] | None,
    PlainValidator(read_documents),
    WithJsonSchema(nullable(array(OBJECT, maxItems=MAX_DOCUMENTS))),
]


def thinking_kwargs(thinks: bool | None, effort: str | None = None) -> bytes:
    """Pack the template's variables; None leaves a choice to the template."""
    variables: dict[str, Any] = {} if thinks is None else dict.fromkeys(THINKING_SWITCHES, thinks)
    if effort not in (None, "none"):
        variables["reasoning_effort"] = effort
    return dump(variables) if variables else b""
