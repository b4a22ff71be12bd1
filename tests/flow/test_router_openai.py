"""What chat and completions show beside text: calls, reasoning, ids, logprobs, echoes, usage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.messages.generate import Generate
from common.messages.logprobs import Candidate, TokenLogprob
from common.messages.tokenize import IdsPrompt, Tokenize
from tests.flow.router_ring import (
    CALLS,
    CHAT,
    TEXT,
    TOOLS,
    Script,
    ask,
    chat,
    deltas_of,
    running_router,
)

WHOLE_CALLS = [
    {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
    },
    {"id": "call_2", "type": "function", "function": {"name": "calculator", "arguments": "{}"}},
]

DETAILS = {
    "reasoning_tokens": 3,
    "accepted_prediction_tokens": 2,
    "rejected_prediction_tokens": 1,
}


def _token(index: int, text: str = "") -> TokenLogprob:
    text = text or "ab"[index % 2]
    chosen = Candidate(index, text, text.encode(), -0.5)
    return TokenLogprob(chosen, (Candidate(7, "x", b"x", -0.25), chosen), rank=2)


async def test_calls_and_reasoning_of_an_answer_in_one_piece() -> None:
    async with running_router() as ring:
        ring.script = replace(CALLS, drafts=(2, 1))
        body = await ask(ring, CHAT, chat(tools=TOOLS))
        (choice,) = body["choices"]
        message = choice["message"]
        assert message["content"] is None
        assert message["tool_calls"] == WHOLE_CALLS
        assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")
        assert choice["finish_reason"] == "tool_calls"
        assert body["usage"]["completion_tokens_details"] == DETAILS
        (sent,) = ring.workers["tokenizer"].of(Tokenize)
        assert (sent.stream.parse_tools, sent.stream.parse_reasoning) == (True, True)


async def test_calls_and_reasoning_of_a_stream() -> None:
    async with running_router() as ring:
        ring.script = replace(CALLS, drafts=(2, 1))
        options = {"include_usage": True}
        chunks = await ask(ring, CHAT, chat(tools=TOOLS, stream=True, stream_options=options))
        deltas = deltas_of(chunks)
        assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    function = dict(call["function"])
                    calls[call["index"]] = {**call, "function": function}
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        assert [calls[index] for index in sorted(calls)] == [
            {"index": index, **call} for index, call in enumerate(WHOLE_CALLS)
        ]
        thoughts = [delta for delta in deltas if "reasoning" in delta]
        assert thoughts == [{"reasoning": "hm", "reasoning_content": "hm"}]
        *_, finish, usage = chunks
        assert finish["choices"][0]["finish_reason"] == "tool_calls"
        assert usage["usage"]["completion_tokens_details"] == DETAILS


@pytest.mark.parametrize(
    ("choice", "reason", "shown"),
    [
        ("auto", "stop", "tool_calls"),
        ("required", "stop", "tool_calls"),
        ({"type": "function", "function": {"name": "calculator"}}, "stop", "stop"),
        ("auto", "length", "length"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_finish_reason_says_that_there_are_calls_unless_one_was_named_or_cut(
    choice: Any, reason: Any, shown: str, stream: bool
) -> None:
    async with running_router() as ring:
        ring.script = replace(CALLS, reason=reason)
        answer = await ask(ring, CHAT, chat(tools=TOOLS, tool_choice=choice, stream=stream))
        last = answer[-1] if stream else answer
        assert last["choices"][0]["finish_reason"] == shown


async def test_reasoning_that_is_not_wanted_is_left_out() -> None:
    async with running_router() as ring:
        ring.script = CALLS
        body = await ask(ring, CHAT, chat(include_reasoning=False))
        assert body["choices"][0]["message"]["reasoning"] is None
        chunks = await ask(ring, CHAT, chat(include_reasoning=False, stream=True))
        assert not any("reasoning" in delta for delta in deltas_of(chunks))
        await ask(ring, CHAT, chat(separate_reasoning=False))
        apart = [
            message.stream.parse_reasoning for message in ring.workers["tokenizer"].of(Tokenize)
        ]
        assert apart == [True, True, False]


async def test_logprobs_stand_beside_parsed_content() -> None:
    async with running_router() as ring:
        ring.script = replace(CALLS, logprobs=lambda index: _token(index))
        body = await ask(ring, CHAT, chat(logprobs=True, top_logprobs=2))
        whole = [each["token"] for each in body["choices"][0]["logprobs"]["content"]]
        chunks = await ask(ring, CHAT, chat(logprobs=True, top_logprobs=2, stream=True))
        pieces = [
            each["token"]
            for chunk in chunks
            for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert pieces == whole == ["a", "b", "a", "b", "a", "b", "a"]


async def test_tokens_may_be_named_by_their_ids() -> None:
    async with running_router() as ring:
        ring.script = Script(logprobs=_token)
        asked: dict[str, Any] = {"logprobs": True, "return_tokens_as_token_ids": True}
        asked["top_logprobs"] = 1
        body = await ask(ring, CHAT, chat(**asked))
        first, second = body["choices"][0]["logprobs"]["content"]
        assert (first["token"], second["token"]) == ("token_id:0", "token_id:1")
        assert first["top_logprobs"][0]["token"] == "token_id:7"
        asked = {"model": "demo", "prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": True}
        body = await ask(ring, TEXT, asked)
        logprobs = body["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:0", "token_id:1"]
        assert logprobs["top_logprobs"][0] == {"token_id:7": -0.25, "token_id:0": -0.5}


async def test_ids_of_prompt_and_answer_in_one_piece() -> None:
    async with running_router() as ring:
        body = await ask(ring, CHAT, chat(return_token_ids=True, n=2))
        assert body["prompt_token_ids"] == [0, 1, 2, 3, 4]
        assert [choice["token_ids"] for choice in body["choices"]] == [[0, 1], [0, 1]]
        body = await ask(
            ring, TEXT, {"model": "demo", "prompt": ["a", "b"], "return_token_ids": True}
        )
        assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[0, 1, 2, 3, 4]] * 2
        assert [choice["token_ids"] for choice in body["choices"]] == [[0, 1], [0, 1]]


async def test_ids_of_prompt_and_answer_in_a_stream() -> None:
    async with running_router() as ring:
        first, *rest = await ask(ring, CHAT, chat(return_token_ids=True, stream=True))
        assert first["prompt_token_ids"] == [0, 1, 2, 3, 4]
        ids = [chunk["choices"][0].get("token_ids", []) for chunk in rest]
        assert sum(ids, []) == [0, 1]
        asked = {"model": "demo", "prompt": "a", "return_token_ids": True, "stream": True}
        first, *rest = await ask(ring, TEXT, asked)
        assert first["choices"][0]["prompt_token_ids"] == [0, 1, 2, 3, 4]
        ids = [chunk["choices"][0].get("token_ids", []) for chunk in rest]
        assert sum(ids, []) == [0, 1]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_may_come_with_every_chunk(path: str) -> None:
    async with running_router() as ring:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"model": "demo", "prompt": "a"} if path == TEXT else chat()
        chunks = await ask(ring, path, {**body, "stream": True, "stream_options": options})
        usages = [chunk["usage"] for chunk in chunks]
        assert all(usage["prompt_tokens"] == 5 for usage in usages)
        completions = [usage["completion_tokens"] for usage in usages]
        assert completions == sorted(completions)
        assert completions[-1] == 2
        assert usages[-1] == usages[-2]


async def test_a_prompts_logprobs_have_vllms_shape() -> None:
    async with running_router() as ring:
        ring.script = Script(scored=(_token(1), _token(2)))
        body = await ask(ring, CHAT, chat(prompt_logprobs=2, n=2))
        expected = [
            None,
            {
                "7": {"logprob": -0.25, "rank": 1, "decoded_token": "x"},
                "1": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
            },
            {
                "7": {"logprob": -0.25, "rank": 1, "decoded_token": "x"},
                "2": {"logprob": -0.5, "rank": 2, "decoded_token": "a"},
            },
        ]
        assert body["prompt_logprobs"] == expected
        asked = {"model": "demo", "prompt": ["a", "b"], "prompt_logprobs": 2, "n": 2}
        body = await ask(ring, TEXT, asked)
        assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected] * 4
        assert ring.workers["tokenizer"].of(Tokenize)[-1].sampling.num_prompt_logprobs == 2


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_with_logprobs_scores_prompt_and_answer_in_one(
    max_tokens: int, stream: bool
) -> None:
    async with running_router() as ring:
        ring.script = Script(
            pieces=("!",),
            reason="length",
            scored=(_token(1, " of"), _token(2, " ids")),
            logprobs=lambda index: _token(9, "!"),
        )
        body = {"model": "demo", "prompt": [[5, 1, 2]], "echo": True, "logprobs": 1}
        answer = await ask(ring, TEXT, {**body, "max_tokens": max_tokens, "stream": stream})
        choices = [chunk["choices"][0] for chunk in answer] if stream else answer["choices"]
        text = "".join(choice["text"] for choice in choices)
        columns: dict[str, list[Any]] = {}
        for choice in choices:
            for name, values in (choice["logprobs"] or {}).items():
                columns.setdefault(name, []).extend(values)
        made = max_tokens == 1
        # The ring's detokenizer says "text of ids" of whatever it is asked, the first id as well.
        assert text == "text of ids" + "!" * made
        assert columns["tokens"] == ["text of ids", " of", " ids"] + ["!"] * made
        assert columns["token_logprobs"] == [None, -0.5, -0.5] + [-0.5] * made
        assert columns["top_logprobs"][:2] == [None, {"x": -0.25, " of": -0.5}]
        assert columns["text_offset"] == [0, 11, 14] + [18] * made
        assert choices[-1]["finish_reason"] == "length"
        if not stream:
            assert answer["usage"]["completion_tokens"] == max_tokens
        (sent,) = ring.workers["compute"].of(Generate)
        assert (sent.sampling.max_tokens, sent.sampling.num_prompt_logprobs) == (1, 1)
        assert ring.is_empty()


async def test_an_echo_with_logprobs_is_shared_by_all_choices_of_a_prompt() -> None:
    async with running_router() as ring:
        ring.script = Script(scored=(_token(1),), logprobs=_token)
        body = {"model": "demo", "prompt": "Hi", "echo": True, "logprobs": 0, "n": 2}
        whole = await ask(ring, TEXT, body)
        chunks = await ask(ring, TEXT, {**body, "stream": True})
        for index, choice in enumerate(whole["choices"]):
            assert choice["logprobs"]["tokens"] == ["text of ids", "b", "a", "b"]
            pieces = [
                token
                for chunk in chunks
                for each in chunk["choices"]
                if each["index"] == index
                for token in (each["logprobs"] or {"tokens": []})["tokens"]
            ]
            assert pieces == choice["logprobs"]["tokens"]


async def test_an_echo_is_of_the_prompt_as_it_was_cut() -> None:
    async with running_router() as ring:
        asked = {"model": "demo", "prompt": "Hi there", "echo": True, "truncate_prompt_tokens": 2}
        body = await ask(ring, TEXT, asked)
        assert body["choices"][0]["text"] == "text of idsHello"
        await ask(ring, TEXT, {**asked, "truncation_side": "right"})
        sent = ring.workers["tokenizer"].of(Tokenize)
        prompts = [message.prompt for message in sent]
        assert all(isinstance(prompt, IdsPrompt) for prompt in prompts)
        assert [list(prompt.ids) for prompt in prompts] == [[2, 3], [1, 2]]
        assert [message.truncate_to for message in sent] == [0, 0]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"truncate_prompt_tokens": 7}, 7),
        ({"truncate_prompt_tokens": -1}, 511),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, 412),
        ({}, 0),
    ],
)
async def test_a_prompt_may_be_cut_to_what_fits(asked: dict[str, Any], kept: int) -> None:
    async with running_router() as ring:
        await ask(ring, CHAT, chat(**asked))
        (sent,) = ring.workers["tokenizer"].of(Tokenize)
        assert (sent.truncate_to, sent.truncate_side) == (kept, "left")


@pytest.mark.parametrize(
    ("header", "body", "expected"),
    [
        ("", {"request_id": "mine-1"}, "mine-1"),
        ("", {"rid": "mine-2"}, "mine-2"),
        ("theirs", {"request_id": "mine-3"}, "theirs"),
        ("bad id", {"request_id": "mine-4"}, "mine-4"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_body_may_name_the_request(
    header: str, body: dict[str, Any], expected: str, stream: bool
) -> None:
    async with running_router() as ring:
        headers = {"X-Request-Id": header} if header else {}
        async with ring.post(CHAT, chat(stream=stream, **body), headers=headers) as response:
            assert response.status == 200
            assert response.headers["X-Request-Id"] == expected


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    ],
)
async def test_every_api_says_in_a_header_what_it_ignores(
    path: str, more: dict[str, Any], streaming: bool
) -> None:
    body = {"model": "demo", "stream": streaming, **more}
    async with running_router() as ring:
        async with ring.post(path, {**body, "wibble": 1}) as answer:
            assert answer.status == 200
            warning = '299 - "wibble: unknown request field \\"wibble\\" is ignored"'
            assert answer.headers["Warning"] == warning
        async with ring.post(path, body) as answer:
            assert "Warning" not in answer.headers


async def test_a_strict_router_refuses_unknown_fields() -> None:
    async with running_router(unknown_fields="refuse") as ring:
        async with ring.post(CHAT, chat(wibble=1)) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "wibble"


async def test_n_choices_are_one_message_and_one_prefill() -> None:
    async with running_router() as ring:
        body = await ask(ring, CHAT, chat(n=3, best_of=3))
        assert len(body["choices"]) == 3
        (sent,) = ring.workers["tokenizer"].of(Tokenize)
        assert sent.num_choices == 3


async def test_prompts_with_more_logprobs_than_fit_are_refused() -> None:
    async with running_router() as ring:
        body: dict[str, Any] = {"model": "demo", "prompt": [[1] * 500] * 150, "prompt_logprobs": 20}
        async with ring.post(TEXT, body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "prompt"
        async with ring.post(TEXT, {**body, "prompt_logprobs": 1}) as response:
            assert response.status == 200
        assert ring.is_empty()


async def test_an_echo_with_no_tokens_counts_the_prompt_as_it_was_cut() -> None:
    async with running_router() as ring:
        body = {"model": "demo", "prompt": "Hi", "echo": True, "max_tokens": 0}
        answer = await ask(ring, TEXT, {**body, "truncate_prompt_tokens": 2})
        assert answer["usage"]["prompt_tokens"] == 2
        assert ring.workers["tokenizer"].of(Tokenize) == []
