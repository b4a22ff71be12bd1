"""Bad requests: each is a 400 that names the field at fault."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.errors import ApiError
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.request_warnings import Warnings

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

JSON_OBJECT: dict[str, Any] = {"response_format": {"type": "json_object"}}
BOMB = {"enum": ["x" * 1000 + str(number) for number in range(200)]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _schema_format(**changes: Any) -> dict[str, Any]:
    schema = {"name": "answer", "schema": {"type": "object"}, **changes}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _function(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **changes}}]}


def _called(**changes: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": None, "tool_calls": [{**CALL, **changes}]}
    return {"messages": [USER, message]}


def _chosen(choice: Any) -> dict[str, Any]:
    return {"tools": [TOOL], "tool_choice": choice}


def _allowed(**changes: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "f"}}]
    allowed = {"mode": "auto", "tools": tools, **changes}
    return _chosen({"type": "allowed_tools", "allowed_tools": allowed})


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"model": "m" * 513}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1_000_000_000_000}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e7}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"logit_bias": "abc"}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["x"] * 129}, "stop"),
    ({"stop": [f"{at:01000}" for at in range(17)]}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"priority": 1 << 40}, "priority"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"guided_json": {}}, "guided_json"),
    ({"chat_template": "x"}, "chat_template"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": "yes"}},
        "stream_options.continuous_usage_stats",
    ),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [1 << 31]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": "all"}, "allowed_token_ids"),
    ({"bad_words": "no"}, "bad_words"),
    ({"bad_words": ["a", ""]}, "bad_words[1]"),
    ({"bad_words": ["a", 5]}, "bad_words[1]"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"bad_words": ["a" * 257]}, "bad_words[0]"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 4, "truncation_side": "middle"}, "truncation_side"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"return_tokens_as_token_ids": "yes"}, "return_tokens_as_token_ids"),
    ({"request_id": 5}, "request_id"),
    ({"rid": ["a"]}, "rid"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": ["a"]}, "guided_choice"),
    ({"guided_grammar": "x"}, "guided_grammar"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"lora_path": "x"}, "lora_path"),
    ({"stop_regex": "a+"}, "stop_regex"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    ({"response_format": {"type": "structural_tag", "format": 5}}, "response_format.format"),
    (
        {"response_format": {"type": "structural_tag", "structures": [5], "triggers": []}},
        "response_format.structures",
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": "yes"}},
        "structured_outputs.disable_any_whitespace",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (_schema_format(name="a b"), "response_format.json_schema.name"),
    (_schema_format(name=None), "response_format.json_schema.name"),
    (_schema_format(schema=None), "response_format.json_schema.schema"),
    (_schema_format(schema=[]), "response_format.json_schema.schema"),
    (_schema_format(schema="{"), "response_format.json_schema.schema"),
    (_schema_format(schema=BOMB), "response_format.json_schema.schema"),
    (_schema_format(strict="yes"), "response_format.json_schema.strict"),
    (_schema_format(description=5), "response_format.json_schema.description"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"structural_tag": []}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag.format"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"structured_outputs": {"wibble": 1}}, "structured_outputs.wibble"),
    ({"regex": 5}, "regex"),
    ({"ebnf": ""}, "ebnf"),
    ({"json_schema": "nonsense"}, "json_schema"),
    ({"regex": "a", "ebnf": "root ::= x"}, "ebnf"),
    ({**JSON_OBJECT, "regex": "a"}, "regex"),
]

CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [USER, {"role": "wizard", "content": ""}]}, "messages[1].role"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "user", "content": "", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [USER] * 4097}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10_000}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"tools": [TOOL] * 1025}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (_function(name="a b"), "tools[0].function.name"),
    (_function(name="f" * 129), "tools[0].function.name"),
    (_function(description=5), "tools[0].function.description"),
    (_function(parameters=[]), "tools[0].function.parameters"),
    (_function(parameters={"type": "array"}), "tools[0].function.parameters.type"),
    (_function(strict=1), "tools[0].function.strict"),
    (_function(parameters={"x": "y" * (1 << 20)}), "tools"),
    (_chosen({"type": "function"}), "tool_choice.function.name"),
    (_chosen({"type": "function", "function": {"name": "g"}}), "tool_choice"),
    (_chosen({"type": "custom", "custom": {"name": "f"}}), "tool_choice.type"),
    (_chosen({"type": "wibble"}), "tool_choice.type"),
    (_chosen(5), "tool_choice"),
    (_allowed(mode="none"), "tool_choice.allowed_tools.mode"),
    (_allowed(tools=[]), "tool_choice.allowed_tools.tools"),
    (_allowed(tools=[5]), "tool_choice.allowed_tools.tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (_called(id=None), "messages[1].tool_calls[0].id"),
    (_called(type="custom"), "messages[1].tool_calls[0].type"),
    (_called(function=None), "messages[1].tool_calls[0].function"),
    (_called(function={"arguments": "{}"}), "messages[1].tool_calls[0].function.name"),
    (
        _called(function={"name": "f", "arguments": ["a"]}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]},
        "messages[0].tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": 5}}]},
        "messages[0].function_call.arguments",
    ),
    ({"messages": [{**USER, "function_call": {}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "tool", "content": "5", "tool_call_id": 5}]},
        "messages[0].tool_call_id",
    ),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{**USER, "name": 5}]}, "messages[0].name"),
    (
        {"messages": [{"role": "assistant", "content": "", "reasoning": 5}]},
        "messages[0].reasoning",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "audio": {"id": "x"}}]},
        "messages[0].audio",
    ),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {str(at): 1 for at in range(65)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "x" * (1 << 17)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": [[[[[[[[1]]]]]]]]}}, "chat_template_kwargs"),
    ({"documents": "x"}, "documents"),
    ({"documents": ["x"]}, "documents[0]"),
    ({"documents": [{}] * 257}, "documents"),
    ({"documents": [{}], "chat_template_kwargs": {"documents": []}}, "documents"),
    ({"reasoning_effort": "heroic"}, "reasoning_effort"),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "reasoning_effort",
    ),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": "all"}, "thinking_token_budget"),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"separate_reasoning": "no"}, "separate_reasoning"),
    ({"function_call": "required"}, "function_call"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"functions": {"name": "f"}}, "functions"),
    ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": {}}, "function_call.name"),
    ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"prompt": "Hi"}, "prompt"),
    ({"input_ids": [1]}, "input_ids"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"echo": "yes"}, "echo"),
    ({"echo": True, "max_tokens": 0}, "max_tokens"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
]

COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [1, -1]}, "prompt[1]"),
    ({"prompt": [1, 2.0]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [[1], [1 << 31]]}, "prompt[1][0]"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 600, "n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"echo": False, "max_tokens": 0}, "max_tokens"),
    ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ({"echo": "yes"}, "echo"),
    ({"best_of": 2, "n": 1}, "best_of"),
    ({"messages": [USER]}, "messages"),
    ({"tools": [TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
]


def _param(parse: Any, body: dict[str, Any]) -> str | None:
    with pytest.raises(ApiError) as caught:
        parse(body, Warnings())
    failure = caught.value.failure
    assert failure.status == 400
    assert failure.field is not None
    assert failure.field in failure.message
    assert len(failure.message) < 600
    return failure.field


@pytest.mark.parametrize(("change", "param"), SHARED + CHAT)
def test_a_bad_chat_request_names_its_field(change: dict[str, Any], param: str) -> None:
    assert _param(parse_chat, {"model": "demo", "messages": [USER], **change}) == param


@pytest.mark.parametrize(("change", "param"), SHARED + COMPLETION)
def test_a_bad_completion_request_names_its_field(change: dict[str, Any], param: str) -> None:
    assert _param(parse_completion, {"model": "demo", "prompt": "Hi", **change}) == param
