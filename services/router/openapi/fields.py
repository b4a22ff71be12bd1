"""The fields that the request models leave open, for each API that has them.

What is described here is what is taken, and the other way round; a test holds both against each
other. What no schema can say is refused with a 400 of its own: fields that exclude or need one
another, and grammars and schemas in which something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.router.generate_request import MAX_PROMPTS
from services.router.openai.chat_messages import MAX_CALLS, MAX_MESSAGES
from services.router.openai.fields import Refused
from services.router.openai.sampling_fields import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_INT32,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from services.router.openai.structure import MAX_CHOICES, SCHEMA_NAME
from services.router.openai.template_fields import MAX_DOCUMENTS, MAX_VARIABLES
from services.router.openai.tools import FUNCTION_NAME, MAX_TOOLS
from services.router.openapi.shapes import (
    BOOLEAN,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    Schema,
    array,
    constant,
    either,
    nullable,
    one_of,
    partial,
)

TEXT: Schema = {"type": "string", "minLength": 1}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INT32}
_NAME: Schema = {"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"}
_SWITCH = nullable(BOOLEAN)
_WORDS = nullable(STRING)

_PART = either(
    partial({"type": one_of("text", "input_text", "output_text"), "text": STRING}),
    partial({"type": constant("refusal"), "refusal": STRING}),
)
_CONTENT = either(STRING, array(_PART))
_CALLED = partial({"name": TEXT, "arguments": nullable(either(STRING, OBJECT))}, ("arguments",))
_CALL = partial({"id": TEXT, "type": constant("function"), "function": _CALLED}, ("type",))
_CALLS = array(_CALL, maxItems=MAX_CALLS)
_BESIDE: dict[str, Schema] = {  # what a message of any role may have
    **dict.fromkeys(("name", "reasoning", "reasoning_content", "refusal", "tool_call_id"), _WORDS),
    "audio": NULL,
}
_NO_CALLS: dict[str, Schema] = {"tool_calls": NULL, "function_call": NULL}
_SPEAKER: dict[str, Schema] = {
    **_BESIDE,
    "role": constant("assistant"),
    "tool_calls": nullable(_CALLS),
    "function_call": nullable(_CALLED),
}
_SPEAKS_BY: dict[str, Schema] = {  # one of these, where there is no content
    "tool_calls": {**_CALLS, "minItems": 1},
    "function_call": _CALLED,
    "reasoning": TEXT,
    "refusal": TEXT,
}


def _message(needed: dict[str, Schema], beside: dict[str, Schema]) -> Schema:
    optional = tuple(name for name in beside if name not in needed)
    return partial({**beside, **needed}, optional)


_HEARD = one_of("system", "developer", "user", "function")
MESSAGES = array(
    either(
        _message({"role": _HEARD, "content": _CONTENT}, {**_BESIDE, **_NO_CALLS}),
        _message(
            {"role": constant("tool"), "content": _CONTENT, "tool_call_id": TEXT},
            {**_BESIDE, **_NO_CALLS},
        ),
        _message({"role": constant("assistant"), "content": _CONTENT}, _SPEAKER),
        *(
            _message(
                {"role": constant("assistant"), name: schema},
                {**_SPEAKER, "content": nullable(_CONTENT)},
            )
            for name, schema in _SPEAKS_BY.items()
        ),
    ),
    minItems=1,
    maxItems=MAX_MESSAGES,
)

_IDS = array(TOKEN_ID, minItems=1)
PROMPT = either(TEXT, _IDS, array(either(TEXT, _IDS), minItems=1, maxItems=MAX_PROMPTS))

_PARAMETERS = nullable(partial({"type": constant("object")}, ("type",)))
_FUNCTION = partial(
    {"name": _NAME, "description": _WORDS, "parameters": _PARAMETERS, "strict": _SWITCH},
    ("description", "parameters", "strict"),
)
_TOOL = partial({"type": constant("function"), "function": _FUNCTION})
_NAMED = partial({"type": constant("function"), "function": partial({"name": TEXT})})
_ALLOWED = partial(
    {
        "type": constant("allowed_tools"),
        "allowed_tools": partial(
            {
                "mode": one_of("auto", "required"),
                "tools": array(_NAMED, minItems=1, maxItems=MAX_TOOLS),
            }
        ),
    }
)

_SCHEMA = either(OBJECT, {"type": "string", "contentMediaType": "application/json"})
_NAMED_SCHEMA = partial(
    {
        "name": {"type": "string", "pattern": f"^{SCHEMA_NAME.pattern}$"},
        "description": _WORDS,
        "schema": _SCHEMA,
        "strict": _SWITCH,
    },
    ("description", "strict"),
)
_TAG = either(
    partial({"format": _SCHEMA}),
    partial({"format": NULL, "structures": array(OBJECT)}, ("format",)),
)
_RESPONSE_FORMAT = either(
    partial({"type": constant("text")}),
    partial({"type": constant("json_object"), "schema": nullable(_SCHEMA)}, ("schema",)),
    partial({"type": constant("json_schema"), "json_schema": _NAMED_SCHEMA}),
    {**_TAG, **partial({"type": constant("structural_tag")})},
)
_STRUCTURES: dict[str, Schema] = {
    "json": _SCHEMA,
    "regex": TEXT,
    "choice": array(TEXT, minItems=1, maxItems=MAX_CHOICES),
    "grammar": TEXT,
    "json_object": {"const": True},
    "structural_tag": either(_TAG, {"type": "string", "contentMediaType": "application/json"}),
}
_STRUCTURED = either(
    *(
        {
            **partial(
                {
                    **dict.fromkeys(_STRUCTURES, {"enum": [None, False]}),
                    "disable_fallback": _SWITCH,
                    "disable_any_whitespace": _SWITCH,
                    "disable_additional_properties": {"enum": [None, False]},
                    "whitespace_pattern": NULL,
                    name: schema,
                },
            ),
            "required": [name],
            "additionalProperties": False,
        }
        for name, schema in _STRUCTURES.items()
    )
)
_STOP_TEXT: Schema = {**TEXT, "maxLength": MAX_STOP_CHARACTERS}
_BAD_WORD: Schema = {**TEXT, "maxLength": MAX_BAD_WORD_CHARACTERS}

TRUNCATION = nullable(either({"const": -1}, {**TOKEN_ID, "minimum": 1}))
TRUE_ALONE: dict[str, Schema] = {"spaces_between_special_tokens": {"enum": [True, None]}}
SAMPLING: dict[str, Schema] = {
    "stop": nullable(either(_STOP_TEXT, array(_STOP_TEXT, maxItems=MAX_STOPS))),
    "bad_words": nullable(array(_BAD_WORD, maxItems=MAX_BAD_WORDS)),
    "logit_bias": nullable(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {**NUMBER, "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
    "stop_token_ids": nullable(array(TOKEN_ID, maxItems=MAX_STOP_TOKEN_IDS)),
    "allowed_token_ids": nullable(array(TOKEN_ID, minItems=1, maxItems=MAX_ALLOWED_TOKEN_IDS)),
    **TRUE_ALONE,
    "truncate_prompt_tokens": TRUNCATION,
}
STRUCTURE: dict[str, Schema] = {
    "response_format": nullable(_RESPONSE_FORMAT),
    "structured_outputs": nullable(_STRUCTURED),
    "json_schema": nullable(_SCHEMA),
    "regex": nullable(TEXT),
    "ebnf": nullable(TEXT),
}
EMBEDDING: dict[str, Schema] = {
    "stream": {"enum": [None, False]},
    "truncate_prompt_tokens": TRUNCATION,
}
_VARIABLES = nullable({**OBJECT, "maxProperties": MAX_VARIABLES})
TEMPLATE: dict[str, Schema] = {  # of messages that are embedded
    "add_generation_prompt": _SWITCH,
    "continue_final_message": _SWITCH,
    "chat_template_kwargs": _VARIABLES,
    "add_special_tokens": {"enum": [None, False]},
}
CONVERSATION: dict[str, Schema] = {
    "messages": MESSAGES,
    "tools": nullable(array(_TOOL, maxItems=MAX_TOOLS)),
    "functions": nullable(array(_FUNCTION, maxItems=MAX_TOOLS)),
    "function_call": nullable(either(one_of("none", "auto"), partial({"name": TEXT}))),
    "tool_choice": nullable(either(one_of("none", "auto", "required"), _NAMED, _ALLOWED)),
    "chat_template_kwargs": _VARIABLES,
    "documents": nullable(array(OBJECT, maxItems=MAX_DOCUMENTS)),
}

# Items and blocks are many; of the kinds that a server does not know it says so with a 400.
_TOOLS = nullable(array(OBJECT, maxItems=MAX_TOOLS))
RESPONSES: dict[str, Schema] = {
    "input": either(STRING, array(OBJECT, minItems=1)),
    "tools": _TOOLS,
    "tool_choice": nullable(either(one_of("none", "auto", "required"), OBJECT)),
}
_BLOCKS = either(STRING, array(OBJECT))
ANTHROPIC: dict[str, Schema] = {
    "messages": array(
        partial({"role": one_of("user", "assistant", "system"), "content": _BLOCKS}),
        minItems=1,
        maxItems=MAX_MESSAGES,
    ),
    "system": nullable(_BLOCKS),
    "tools": _TOOLS,
    "tool_choice": nullable(OBJECT),
}


AN_ANSWER: dict[str, Schema] = {"max_tokens": nullable({**TOKEN_ID, "minimum": 1})}
OLLAMA: dict[str, Schema] = {
    "format": nullable(either(one_of("", "json"), OBJECT)),
    "options": nullable(OBJECT),
}
OLLAMA_GENERATE: dict[str, Schema] = {
    **OLLAMA,
    "images": nullable(array(OBJECT, maxItems=0)),
    "suffix": {"enum": [None, ""]},
    "template": {"enum": [None, ""]},
}


def refused(fields: Mapping[str, Refused]) -> dict[str, Schema]:
    """Describe fields that are refused unless they ask for nothing."""
    return {name: {"enum": [None, *_distinct(field.harmless)]} for name, field in fields.items()}


def _distinct(values: tuple[object, ...]) -> list[object]:
    """Leave out what JSON writes in two ways, as 1 and 1.0."""
    return [value for at, value in enumerate(values) if value not in values[:at]]
