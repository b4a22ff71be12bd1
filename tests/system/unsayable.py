"""What a request may be refused for though the OpenAPI document allows it: no schema says it."""

from __future__ import annotations

import re

from tests.system.bad_requests import COUNT, INPUT_TOKENS, MESSAGES, RESPONSES

# Fields that need or exclude each other, and what is inside of a text.
REFUSALS = re.compile(
    r"together with|contradicts|must not exceed|must be less than|among the tools|is there twice"
    r"|only n itself|times the number of prompts|all together|bytes at most|nested deeper"
    r"|text that is not valid JSON|is in chat_template_kwargs, too|its tool_result has to follow"
    r"|nothing that the model could read|should be greater than or equal to 1 \(it is 0\)"
    r"|give either prompt or messages"
    r"|there is no response"  # of that id
    r"|is more urgent than you may ask for"
    r"|\(it is -?\d+\.0\)"  # to JSON Schema 1.0 is an integer, also as a token id
)
# Items, blocks and tools of these are of many kinds; the document says that they are objects.
OPEN_FIELDS = {
    RESPONSES: re.compile(r"(input|tools|tool_choice|text\.format|include)\b"),
    INPUT_TOKENS: re.compile(r"(input|tools|tool_choice|text\.format|include)\b"),
    MESSAGES: re.compile(r"(messages|system|tools|tool_choice|thinking)\b"),
    "/invocations": re.compile(""),  # which API it is depends on its fields
    "/api/chat": re.compile(r"(messages|tools|options|format)\b"),
    "/api/generate": re.compile(r"(options|format|messages)\b"),
    COUNT: re.compile(r"(messages|system|tools|tool_choice)\b"),
}


def is_unsayable(path: str, message: str, field: str) -> bool:
    """Whether the document cannot know of this refusal."""
    is_open = path in OPEN_FIELDS and OPEN_FIELDS[path].match(field)
    return bool(is_open or REFUSALS.search(message))
