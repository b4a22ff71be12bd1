"""Requests in the forms of other servers and of older times, from HTTP to messages and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.flow.router_ring import (
    CALLS,
    CARD,
    CHAT,
    TEXT,
    TOOLS,
    Script,
    ask,
    chat,
    deltas_of,
    running_router,
)

FUNCTIONS = [tool["function"] for tool in TOOLS]
FIRST_CALL = {"name": "get_weather", "arguments": '{"city":"Oslo"}'}


@pytest.mark.parametrize(
    ("choice", "reason", "shown"),
    [
        ("auto", "stop", "function_call"),
        (None, "length", "length"),
        ({"name": "get_weather"}, "stop", "stop"),
    ],
)
async def test_an_answer_to_functions_has_a_function_call(
    choice: Any, reason: Any, shown: str
) -> None:
    async with running_router() as ring:
        ring.script = replace(CALLS, reason=reason)
        asked = chat(functions=FUNCTIONS, function_call=choice)
        (answered,) = (await ask(ring, CHAT, asked))["choices"]
        assert answered["message"]["function_call"] == FIRST_CALL
        assert answered["message"]["content"] is None
        assert "tool_calls" not in answered["message"]
        assert answered["finish_reason"] == shown
        chunks = await ask(ring, CHAT, {**asked, "stream": True})
        pieces = [delta["function_call"] for delta in deltas_of(chunks) if "function_call" in delta]
        assert pieces[0] == {"name": "get_weather", "arguments": ""}
        assert "".join(piece["arguments"] for piece in pieces) == FIRST_CALL["arguments"]
        assert [list(piece) for piece in pieces[1:]] == [["arguments"]] * (len(pieces) - 1)
        assert not any("tool_calls" in delta for delta in deltas_of(chunks))
        assert chunks[-1]["choices"][0]["finish_reason"] == shown


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_in_a_chat_opens_every_answer_with_what_it_goes_on_with(stream: bool) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Oh "}]
    async with running_router() as ring:
        asked = chat(messages=begun, echo=True, n=2, continue_final_message=True, stream=stream)
        answer = await ask(ring, CHAT, asked)
        if not stream:
            assert [each["message"]["content"] for each in answer["choices"]] == ["Oh Hello"] * 2
            return
        for choice in (0, 1):
            deltas = deltas_of(each for each in answer if each["choices"][0]["index"] == choice)
            assert [delta.get("content") for delta in deltas[:2]] == ["", "Oh "]
            assert "".join(delta.get("content") or "" for delta in deltas) == "Oh Hello"


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "chatcmpl-"), (TEXT, "cmpl-")])
async def test_the_clients_id_for_a_request_is_in_its_answer(path: str, kind: str) -> None:
    async with running_router() as ring:
        body = chat() if path == CHAT else {"prompt": "Hi"}
        answer = await ask(ring, path, {**body, "request_id": "mine-1"})
        assert (answer["id"], answer["model"]) == (kind + "mine-1", "demo")
        (chunk, *_) = await ask(ring, path, {**body, "rid": "mine-2", "stream": True})
        assert chunk["id"] == kind + "mine-2"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (TEXT, "max_tokens")],
)
async def test_a_limit_beyond_the_context_is_said_to_be_lowered(
    path: str, field: str, stream: bool
) -> None:
    async with running_router() as ring:
        ring.script = Script(prompt_tokens=12)
        asked = chat(stream=stream) if path == CHAT else {"prompt": "Hi", "stream": stream}
        for wanted in (500, 501, 2**31 - 1):  # of 512 tokens and 12 of the prompt
            async with ring.post(path, {**asked, field: wanted}) as response:
                assert response.status == 200
                warning = response.headers.get("Warning", "")
            expected = f"{field}: is more than the prompt leaves of this model's 512 tokens"
            assert (expected in warning) is (wanted > 500)


async def test_without_a_model_there_must_be_only_one() -> None:
    async with running_router() as ring:
        asked = {"messages": chat()["messages"]}
        for model in ({}, {"model": None}, {"model": ""}):
            assert (await ask(ring, CHAT, {**asked, **model}))["model"] == "demo"
        other = replace(CARD, name="other")
        for service in ("tokenizer", "compute", "detokenizer"):
            ring.worker(f"other-{service}", service, other)
        ring.beat()
        await ring.settle()
        async with ring.post(CHAT, asked) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "model")
        assert error["message"].endswith("several are served: demo, other")
        assert (await ask(ring, CHAT, {**asked, "model": "demo"}))["model"] == "demo"
