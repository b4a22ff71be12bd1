"""Ollama's API, as its programs use it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.messages.text import Part
from common.messages.tokenize import ChatPrompt, TextPrompt, Tokenize
from tests.flow.router_ring import Script, running_router

CHAT = "/api/chat"
GENERATE = "/api/generate"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}


def last_request(ring: Any) -> Tokenize:
    """Return what the tokenizer got last."""
    message: Tokenize = ring.workers["tokenizer"].of(Tokenize)[-1]
    return message


def conversation(ring: Any) -> list[Any]:
    prompt = last_request(ring).prompt
    assert isinstance(prompt, ChatPrompt)
    messages: list[Any] = json.loads(prompt.messages_json)
    return messages


async def answer(ring: Any, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with ring.post(path, {"model": "demo", "stream": False, **body}) as response:
        return response.status, await response.json()


async def lines(ring: Any, path: str, body: dict[str, Any]) -> list[Any]:
    async with ring.post(path, {"model": "demo", **body}) as response:
        assert response.status == 200
        assert response.content_type == "application/x-ndjson"
        data = await response.read()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


async def test_a_chat_streams_by_default_line_by_line() -> None:
    async with running_router() as ring:
        *pieces, last = await lines(ring, CHAT, {"messages": HI})
    assert "".join(piece["message"]["content"] for piece in pieces) == "Hello"
    assert all(piece["done"] is False and piece["model"] == "demo" for piece in pieces)
    assert last["done"] is True and last["done_reason"] == "stop"
    assert (last["prompt_eval_count"], last["eval_count"]) == (5, 2)
    assert last["total_duration"] >= last["eval_duration"] >= 0


async def test_a_chat_in_one_piece() -> None:
    async with running_router() as ring:
        status, body = await answer(ring, CHAT, {"messages": HI})
    assert status == 200
    assert body["message"] == {"role": "assistant", "content": "Hello"}
    assert body["done"] is True


async def test_a_question_has_its_system_prompt_before_it() -> None:
    async with running_router() as ring:
        body = {"prompt": "Why?", "system": "Be brief."}
        status, answer_body = await answer(ring, GENERATE, body)
        assert conversation(ring) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Why?"},
        ]
        assert (status, answer_body["response"]) == (200, "Hello")
        pieces = await lines(ring, GENERATE, body)
    assert "".join(piece["response"] for piece in pieces) == "Hello"


async def test_a_raw_prompt_goes_to_the_model_as_it_is_and_as_far_as_fits() -> None:
    async with running_router() as ring:
        status, _ = await answer(ring, GENERATE, {"prompt": "Once", "raw": True})
        assert status == 200
        assert last_request(ring).prompt == TextPrompt("Once")
        assert last_request(ring).limits.max_output_length == 511  # not the 16 of a completion


async def test_options_are_sampling_settings_by_other_names() -> None:
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "repeat_penalty": 1.1,
        "seed": 3,
        "stop": ["\n"],
        "num_ctx": 4096,  # says how to run a model
        "mirostat": 0,
    }
    async with running_router() as ring:
        status, _ = await answer(ring, CHAT, {"messages": HI, "options": options})
        assert status == 200
        sampling = last_request(ring).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.5, 3)
    assert sampling.repetition_penalty == 1.1
    assert last_request(ring).stream.stop == ("\n",)


async def test_a_limit_that_is_lowered_is_warned_of_by_ollamas_name() -> None:
    body = {"model": "demo", "messages": HI, "options": {"num_predict": 600}, "stream": False}
    async with running_router() as ring, ring.post(CHAT, body) as response:
        assert response.status == 200
        assert '"options.num_predict: is more than' in response.headers["Warning"]


@pytest.mark.parametrize(
    ("wish", "kind"),
    [("json", "json_object"), ({"type": "object"}, "json_schema"), ("", None), (None, None)],
)
async def test_a_format_is_a_structure(wish: Any, kind: str | None) -> None:
    async with running_router() as ring:
        status, _ = await answer(ring, CHAT, {"messages": HI, "format": wish})
        assert status == 200
        structure = last_request(ring).rules.structure
    assert (structure and structure.kind) == kind


async def test_calls_and_results_are_tied_together_as_templates_want_them() -> None:
    calls = [
        {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}},
        {"function": {"name": "calculator", "arguments": {"expression": "1+1"}}},
    ]
    messages = [
        *HI,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_name": "calculator"},
        {"role": "tool", "content": "sunny"},
    ]
    async with running_router() as ring:
        status, body = await answer(ring, CHAT, {"messages": messages, "tools": [TOOL]})
        assert status == 200, body
        _, assistant_message, second, first = conversation(ring)
    ids = [call["id"] for call in assistant_message["tool_calls"]]
    assert assistant_message["reasoning_content"] == "Hm."
    assert json.loads(assistant_message["tool_calls"][0]["function"]["arguments"]) == {
        "city": "Paris"
    }
    assert [first["tool_call_id"], second["tool_call_id"]] == ids


CALLING = Script(
    pieces=("a", "b", "c", "d"),
    parts=(
        (Part("reasoning", "Let me see."),),
        (Part("call", "get_weather", 0, "call_1"), Part("arguments", '{"city"', 0)),
        (Part("arguments", ': "Paris"}', 0),),
        (Part("call", "now", 1, "call_2"), Part("arguments", "{}", 1)),
    ),
)
CALLS = [
    {"id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}},
    {"id": "call_2", "function": {"name": "now", "arguments": {}}},
]


async def test_calls_of_an_answer_come_whole() -> None:
    async with running_router() as ring:
        ring.script = CALLING
        pieces = await lines(ring, CHAT, {"messages": HI, "tools": [TOOL]})
        _, body = await answer(ring, CHAT, {"messages": HI, "tools": [TOOL]})
    called = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    assert called == CALLS
    assert pieces[0]["message"]["thinking"] == "Let me see."
    assert body["message"]["tool_calls"] == CALLS
    assert body["message"]["thinking"] == "Let me see."


@pytest.mark.parametrize(("think", "expected"), [(True, True), (False, False), ("high", True)])
async def test_thinking_is_switched_in_the_templates_words(think: Any, expected: bool) -> None:
    async with running_router() as ring:
        status, _ = await answer(ring, CHAT, {"messages": HI, "think": think})
        assert status == 200
        prompt = last_request(ring).prompt
    assert isinstance(prompt, ChatPrompt)
    assert json.loads(prompt.template_kwargs_json)["enable_thinking"] is expected


async def test_the_tag_that_programs_add_is_no_part_of_a_name() -> None:
    async with running_router() as ring:
        status, body = await answer(ring, CHAT, {"model": "demo:latest", "messages": HI})
        assert (status, body["model"]) == (200, "demo:latest")
        status, body = await answer(ring, CHAT, {"model": "other:7b", "messages": HI})
        assert status == 404 and body["error"].startswith("the model 'other:7b' does not exist")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": HI, "options": {"temperature": "hot"}}, "options.temperature: should"),
        (CHAT, {"messages": HI, "options": {"num_predict": -7}}, "options.num_predict: should"),
        (CHAT, {"messages": HI, "format": "xml"}, "format: should be json or a JSON schema"),
        (CHAT, {"messages": [{"role": "user", "images": ["aGk="]}]}, "messages[0].images: is not"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages: have tool_"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": 4}]}, "messages: have tool_"),
        (CHAT, {"messages": ["Hi"]}, "messages[0]: should be an object"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix: is not supported"),
        (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, "template: is not supported"),
        (GENERATE, {"prompt": 5}, "prompt: should be a valid string"),
        (CHAT, {"top_logprobs": -86}, "top_logprobs: should be greater"),
    ],
)
async def test_what_is_wrong_is_said_by_ollamas_names(
    path: str, body: dict[str, Any], message: str
) -> None:
    async with running_router() as ring:
        status, answer_body = await answer(ring, path, body)
    assert status == 400
    assert list(answer_body) == ["error"]
    assert answer_body["error"].startswith(message), answer_body


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_request_without_a_question_finds_the_model_loaded(path: str) -> None:
    async with running_router() as ring:
        status, body = await answer(ring, path, {})
        assert (status, body["done"], body["done_reason"]) == (200, True, "load")
        assert ring.workers["tokenizer"].of(Tokenize) == []


async def test_the_models_are_listed_and_shown() -> None:
    async with running_router() as ring:
        ring.workers["tokenizer"].about = {
            "chat_template": "{{ messages }}",
            "tool_format": "hermes",
            "reasoning_format": "",
        }
        async with ring.session.get("/api/tags") as response:
            (entry,) = (await response.json())["models"]
        assert (entry["name"], entry["digest"]) == ("demo", "rev1")
        async with ring.post("/api/show", {"model": "demo:latest"}) as response:
            shown = await response.json()
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["model_info"]["slipstream.context_length"] == 512
        assert shown["template"] == "{{ messages }}"
        async with ring.session.get("/api/version") as response:
            assert list(await response.json()) == ["version"]


async def test_json_that_curl_calls_a_form_is_read() -> None:
    body = json.dumps({"model": "demo", "messages": HI, "stream": False}).encode()
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    async with running_router() as ring:
        async with ring.session.post(CHAT, data=body, headers=kind) as response:
            assert response.status == 200
