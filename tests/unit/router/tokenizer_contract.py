"""What the tokenizer takes for granted of a request, since the router has checked it."""

from __future__ import annotations

import json
from typing import Any

from common.messages.tokenize import ChatPrompt, IdsPrompt, OutputRules, PromptSource
from services.router.generate_request import GenerateRequest
from services.router.openai.template import MAX_DEPTH
from services.router.openai.tools import FUNCTION_NAME


def check_request(request: GenerateRequest) -> None:
    for prompt in request.prompts:
        check_prompt(prompt)
        check_rules(request.rules, prompt)


def check_prompt(prompt: PromptSource) -> None:
    if isinstance(prompt, IdsPrompt):
        assert prompt.ids and min(prompt.ids) >= 0
    if not isinstance(prompt, ChatPrompt):
        return
    messages = json.loads(prompt.messages_json)
    assert messages and all(isinstance(message["role"], str) for message in messages)
    for function in functions_of(prompt):
        assert FUNCTION_NAME.fullmatch(function["name"])
        parameters = function.get("parameters")
        assert parameters is None or parameters.get("type", "object") == "object"
    if prompt.template_kwargs_json:
        variables = json.loads(prompt.template_kwargs_json)
        assert isinstance(variables, dict)
        assert all(depth(value) <= MAX_DEPTH for value in variables.values())


def check_rules(rules: OutputRules, prompt: PromptSource) -> None:
    structure, tools = rules.structure, rules.tools
    if structure is not None and structure.kind == "choice":
        choices = json.loads(structure.text)
        assert choices and all(choice and isinstance(choice, str) for choice in choices)
    assert all(0 <= token_id < 1 << 31 for token_id in rules.allowed_token_ids)
    if tools is not None:
        assert isinstance(prompt, ChatPrompt)
        names = [function["name"] for function in functions_of(prompt)]
        assert names and len(set(names)) == len(names)
        assert tools.choice != "named" or tools.name in names
        assert {tool_input.tool for tool_input in tools.inputs} <= set(names)


def functions_of(prompt: ChatPrompt) -> list[dict[str, Any]]:
    return [tool["function"] for tool in json.loads(prompt.tools_json or b"[]")]


def depth(value: Any) -> int:
    """Count the levels of a value that are objects or arrays."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0)
