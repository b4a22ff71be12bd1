"""What clients of other servers send, and is taken as it is there, or left without effect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.messages.control import ModelCard
from common.messages.tokenize import ChatPrompt, ToolUse
from services.router.openai.chat import ChatRequest, parse_chat
from services.router.openai.completions import parse_completion
from services.router.request_warnings import WarningLog, Warnings

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
FUNCTIONS = [{"name": "f", "parameters": {"type": "object"}}, {"name": "g"}]


def _chat(**more: Any) -> ChatRequest:
    body = {"model": "demo", "messages": [USER], **more}
    return parse_chat(body, Warnings(WarningLog(refuse_unknown=True)))


def _warned(chat: dict[str, Any] | None = None, text: dict[str, Any] | None = None) -> str:
    """The header with the warnings of a chat or a completion."""
    warnings = Warnings(WarningLog(refuse_unknown=True))
    if chat is not None:
        parse_chat({"messages": [USER], **chat}, warnings)
    if text is not None:
        parse_completion({"prompt": "Hi", **text}, warnings)
    return warnings.header()


def _prompt(request: ChatRequest) -> ChatPrompt:
    (prompt,) = request.generate.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def _said(message: dict[str, Any]) -> dict[str, Any]:
    """What the template is given of a message."""
    (packed,) = json.loads(_prompt(_chat(messages=[message])).messages_json)
    assert isinstance(packed, dict)
    return packed


@pytest.mark.parametrize(
    "hint",
    [
        {"verbosity": "low"},
        {"web_search_options": {"search_context_size": "low"}},
        {"moderation": {"model": "omni-moderation-latest"}},
        {"vllm_xargs": {"a": 1}},
    ],
)
def test_hints_that_nothing_here_follows_have_no_effect(hint: dict[str, Any]) -> None:
    assert _chat(**hint).generate == _chat().generate
    text = {"model": "demo", "prompt": "Hi"}
    strict = Warnings(WarningLog(refuse_unknown=True))
    assert (
        parse_completion({**text, **hint}, strict).generate
        == parse_completion(text, strict).generate
    )


@pytest.mark.parametrize(
    ("hint", "warning"),
    [
        ({"verbosity": "low"}, "verbosity: has no effect; say it in a message"),
        ({"verbosity": "medium"}, ""),
        ({"prediction": {"type": "content", "content": "x"}}, ""),
        ({"web_search_options": {}}, "web_search_options: has no effect; let the model call"),
        ({"moderation": {"model": "m"}}, "moderation: has no effect; no content is checked"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs: has no effect; there are no extensions"),
        ({"vllm_xargs": {}, "moderation": None}, ""),
        ({"request_id": "a b"}, "request_id: is left out; it may have 1 to 128"),
        ({"rid": "\r\nX: y"}, "rid: is left out"),
        ({"request_id": "mine", "rid": ""}, ""),
        ({"prompt_logprobs": -1}, "prompt_logprobs: -1 is 20 here"),
    ],
)
def test_what_has_no_effect_is_said(hint: dict[str, Any], warning: str) -> None:
    for header in (_warned(chat=hint), _warned(text=hint)):
        assert header.startswith(f'299 - "{warning}') if warning else not header


def test_all_logprobs_are_said_to_be_fewer() -> None:
    assert "top_logprobs: -1 is 20" in _warned(chat={"logprobs": True, "top_logprobs": -1})
    assert "logprobs: -1 is 20" in _warned(text={"logprobs": -1})


@pytest.mark.parametrize("model", [None, "", ...])
def test_the_model_may_be_left_out(model: Any) -> None:
    given = {} if model is ... else {"model": model}
    body = {"messages": [USER], **given}
    assert parse_chat(body, Warnings()).generate.model == ""
    assert parse_completion({"prompt": "Hi", **given}, Warnings()).generate.model == ""


def test_a_request_id_that_no_header_can_have_is_passed_over() -> None:
    assert _chat(request_id="mine-1").given_id == "mine-1"
    assert _chat(rid="mine-2").given_id == "mine-2"
    for given in ("a b", "x" * 129, "a\r\nX: y"):
        assert _chat(request_id=given).given_id == ""


def test_any_temperature_is_taken() -> None:
    assert _chat(temperature=5).generate.sampling.temperature == 5.0
    assert _chat(temperature=1e6).generate.sampling.temperature == 1e6


def test_all_logprobs_are_as_many_as_there_may_be() -> None:
    assert _chat(logprobs=True, top_logprobs=-1).generate.sampling.num_logprobs == 20
    assert _chat(prompt_logprobs=-1).generate.sampling.num_prompt_logprobs == 20
    body = {"model": "demo", "prompt": "Hi", "logprobs": -1}
    assert parse_completion(body, Warnings()).generate.sampling.num_logprobs == 20


def test_more_stops_tools_and_stop_ids_than_openai_allows() -> None:
    stops = [f"stop {at}" for at in range(128)]
    tools = [{"type": "function", "function": {"name": f"f{at}"}} for at in range(1024)]
    request = _chat(stop=stops, tools=tools, stop_token_ids=list(range(512)))
    assert request.generate.stream.stop == tuple(stops)
    assert len(json.loads(_prompt(request).tools_json)) == 1024
    assert len(request.generate.sampling.stop_token_ids) == 512


@pytest.mark.parametrize(("wanted", "kept"), [(100, 412), (511, 1), (512, 511), (2**31 - 1, 511)])
def test_a_prompt_is_not_cut_for_a_limit_beyond_the_context(wanted: int, kept: int) -> None:
    card = ModelCard("demo", "rev1", 1000, max_model_len=512, max_input_length=511)
    request = _chat(truncate_prompt_tokens=-1, max_tokens=wanted).generate
    assert request.num_kept_tokens(card) == kept


@pytest.mark.parametrize("name", ["files/read", "mcp:files:read", "a.b-c_d/e:f"])
def test_names_of_tools_may_have_slashes_and_colons(name: str) -> None:
    tool = {"type": "function", "function": {"name": name}}
    choice = {"type": "function", "function": {"name": name}}
    assert _chat(tools=[tool], tool_choice=choice).generate.rules.tools == ToolUse("named", name)


@pytest.mark.parametrize("tools", [[], None, ...])
@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_free_choice_of_no_tools_is_none(tools: Any, choice: Any) -> None:
    given = {} if tools is ... else {"tools": tools}
    request = _chat(**given, tool_choice=choice)
    assert request.generate.rules.tools is None
    assert not _prompt(request).tools_json


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_text_parts_of_responses_are_text_parts(kind: str) -> None:
    message = {"role": "user", "content": [{"type": kind, "text": "Hi"}]}
    assert _said(message)["content"] == [{"type": "text", "text": "Hi"}]


@pytest.mark.parametrize(
    ("arguments", "packed"),
    [
        ({"city": "Köln"}, '{"city":"Köln"}'),
        ('{"city": "Oslo"}', '{"city": "Oslo"}'),
        (None, "{}"),
        ({}, "{}"),
        ("no JSON", "no JSON"),
    ],
)
def test_arguments_of_calls_may_be_an_object(arguments: Any, packed: str) -> None:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    (made,) = _said({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert made == {**call, "function": {"name": "f", "arguments": packed}}
    (made,) = _said({"role": "assistant", "function_call": function})["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": packed}


@pytest.mark.parametrize(
    ("function_call", "use"),
    [
        (None, ToolUse("auto", parallel=False)),
        ("auto", ToolUse("auto", parallel=False)),
        ({"name": "g"}, ToolUse("named", "g", parallel=False)),
        ("none", None),
    ],
)
def test_functions_are_tools_of_which_one_may_be_called(
    function_call: Any, use: ToolUse | None
) -> None:
    request = _chat(functions=FUNCTIONS, function_call=function_call)
    assert request.generate.rules.tools == use
    assert request.options.functions
    assert request.options.named_tool is (use is not None and use.choice == "named")
    if use is not None:
        tools = _prompt(_chat(tools=[{"type": "function", "function": f} for f in FUNCTIONS]))
        assert _prompt(request).tools_json == tools.tools_json


def test_no_functions_are_no_tools() -> None:
    for fields in ({"functions": []}, {"function_call": "auto"}, {"functions": None}):
        request = _chat(**fields)
        assert request.generate.rules.tools is None and not request.options.functions
    assert _chat(functions=[], tools=[TOOL]).generate.rules.tools == ToolUse("auto")


def test_an_echo_is_of_the_assistants_own_last_message() -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": "On"}]}
    assert _chat(messages=[USER, begun], echo=True).options.echo == "On"
    assert _chat(messages=[USER, {**begun, "content": "On"}], echo=True).options.echo == "On"
    assert _chat(messages=[USER, begun]).options.echo == ""
    assert _chat(echo=True).options.echo == ""


def test_an_echo_has_logprobs_of_the_prompt_where_the_answer_has_some() -> None:
    assert _chat(echo=True).generate.sampling.num_prompt_logprobs == -1
    scored = _chat(echo=True, logprobs=True, top_logprobs=3)
    assert scored.generate.sampling.num_prompt_logprobs == 3
    assert scored.options.prompt_logprobs
    streamed = _chat(echo=True, logprobs=True, stream=True)
    assert streamed.generate.sampling.num_prompt_logprobs == -1
