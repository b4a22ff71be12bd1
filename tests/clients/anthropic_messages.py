"""The `anthropic` package against a running server: every call that applications make of it."""

from __future__ import annotations

import argparse
import asyncio
import re
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message
from pydantic import BaseModel

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "input_schema": {
            "type": "object",
            "properties": {"expression": {"type": "string", "maxLength": 40}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # the package has no field for it
MUCH = 16_000  # tokens: as clients of large models give, and as the package takes for no stream


class Person(BaseModel):
    """What is to be read out of a sentence."""

    name: str
    age: int


def text_of(message: Message) -> str:
    """Return what was said."""
    return "".join(block.text for block in message.content if block.type == "text")


def message(client: Anthropic, model: str) -> None:
    """A complete answer, with a system prompt, blocks, and more tokens than the model has."""
    answer = client.messages.create(
        model=model,
        max_tokens=MUCH,
        messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}],
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "somebody"},
        **GREEDY,
    )
    assert answer.type == "message" and answer.role == "assistant", answer
    assert answer.content[0].type == "text" and text_of(answer), answer
    assert answer.stop_reason == "end_turn", answer
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0, answer
    assert answer._request_id, answer


def limits(client: Anthropic, model: str) -> None:
    """Why an answer ended: by its length, or at a stop sequence."""
    cut = client.messages.create(model=model, max_tokens=2, messages=QUESTION, **GREEDY)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2, cut
    whole = client.messages.create(model=model, max_tokens=100, messages=QUESTION, **GREEDY)
    stop = text_of(whole)[5:8]
    stopped = client.messages.create(
        model=model, max_tokens=100, messages=QUESTION, stop_sequences=[stop], **GREEDY
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop), stopped
    assert text_of(stopped) == text_of(whole).split(stop)[0], stopped
    begin = text_of(whole).split(" ")[0]
    begun = [*QUESTION, {"role": "assistant", "content": begin}]
    continued = client.messages.create(model=model, max_tokens=100, messages=begun, **GREEDY)
    assert text_of(continued) and not text_of(continued).startswith(begin), continued


def stream(client: Anthropic, model: str) -> None:
    """Events as they are, and the package's own accumulation of them."""
    whole = client.messages.create(model=model, max_tokens=100, messages=QUESTION, **GREEDY)
    events = list(
        client.messages.create(
            model=model, max_tokens=100, messages=QUESTION, stream=True, **GREEDY
        )
    )
    assert events[0].type == "message_start" and events[-1].type == "message_stop", events
    assert events[0].message.usage.input_tokens > 0, events[0]
    with client.messages.stream(
        model=model, max_tokens=100, messages=QUESTION, **GREEDY
    ) as streamed:
        text = "".join(streamed.text_stream)
        final = streamed.get_final_message()
    assert text == text_of(final) == text_of(whole), final
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def tools(client: Anthropic, model: str) -> None:
    """A forced call, a named one, a loop that uses the result, and a call that streams."""
    forced = client.messages.create(
        model=model,
        max_tokens=200,
        messages=WEATHER,
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        **GREEDY,
    )
    assert forced.stop_reason == "tool_use", forced
    (call,) = (block for block in forced.content if block.type == "tool_use")
    assert isinstance(call.input, dict) and call.input, forced
    named = client.messages.create(
        model=model,
        max_tokens=200,
        messages=WEATHER,
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "calculator"},
        **GREEDY,
    )
    used = next(block for block in named.content if block.type == "tool_use")
    assert used.name == "calculator" and set(used.input) == {"expression"}, named
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees and sunny"}
    messages = [
        *WEATHER,
        {"role": "assistant", "content": forced.content},
        {"role": "user", "content": [result]},
    ]
    told = client.messages.create(
        model=model, max_tokens=200, messages=messages, tools=TOOLS, **GREEDY
    )
    assert told.content, told
    with client.messages.stream(
        model=model,
        max_tokens=200,
        messages=WEATHER,
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        **GREEDY,
    ) as streamed:
        kinds = {event.type for event in streamed}
        final = streamed.get_final_message()
    assert "input_json" in kinds, kinds
    assert [block.input for block in final.content if block.type == "tool_use"] == [call.input]


def chosen_tools(client: Anthropic, model: str) -> None:
    """The model calls by itself, and says what came of it."""
    asked = client.messages.create(
        model=model, max_tokens=200, messages=WEATHER, tools=TOOLS, **GREEDY
    )
    call = next(block for block in asked.content if block.type == "tool_use")
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"}), asked
    told_by_tool = '{"city": "Paris", "temperature_c": 18, "condition": "sunny"}'
    result = {"type": "tool_result", "tool_use_id": call.id, "content": told_by_tool}
    messages = [
        *WEATHER,
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result]},
    ]
    told = client.messages.create(
        model=model, max_tokens=200, messages=messages, tools=TOOLS, **GREEDY
    )
    assert "18" in text_of(told), told


def structured(client: Anthropic, model: str) -> None:
    """A pydantic model as the output format, in one piece and streamed."""
    messages: list[Any] = [{"role": "user", "content": "Anna is 29 years old."}]
    parsed = client.messages.parse(
        model=model, max_tokens=200, messages=messages, output_format=Person, **GREEDY
    )
    assert isinstance(parsed.parsed_output, Person), parsed
    with client.messages.stream(
        model=model, max_tokens=200, messages=messages, output_format=Person, **GREEDY
    ) as streamed:
        final = streamed.get_final_message()
    assert final.parsed_output == parsed.parsed_output, final


def thinking(client: Anthropic, model: str) -> None:
    """Thinking within a budget; its blocks, if there are any, can be given back."""
    answer = client.messages.create(
        model=model,
        max_tokens=300,
        messages=QUESTION,
        thinking={"type": "enabled", "budget_tokens": 100},
        **GREEDY,
    )
    thoughts = [block for block in answer.content if block.type == "thinking"]
    assert all(block.signature for block in thoughts), answer
    more: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    assert client.messages.create(
        model=model,
        max_tokens=300,
        messages=more,
        thinking={"type": "enabled", "budget_tokens": 100},
        **GREEDY,
    ).content


def count(client: Anthropic, model: str) -> None:
    """Tokens are counted just as the prompt has them."""
    for more in ({}, {"tools": TOOLS}, {"system": "Be brief."}):
        counted = client.messages.count_tokens(model=model, messages=QUESTION, **more)
        usage = client.messages.create(
            model=model, max_tokens=1, messages=QUESTION, **more, **GREEDY
        ).usage
        read = usage.cache_read_input_tokens or 0
        assert counted.input_tokens == usage.input_tokens + read, (counted, usage)


def models(client: Anthropic, model: str) -> None:
    """What is served is listed and found by its name."""
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).lifecycle == "active"


def errors(client: Anthropic, model: str) -> None:
    """Every refusal is the exception that the package has for it, and names the field."""
    try:
        client.messages.create(model=model, max_tokens=0, messages=QUESTION)
    except anthropic.BadRequestError as error:
        assert error.type == "invalid_request_error" and error.request_id, error
        assert "max_tokens" in (error.api_message or ""), error
    else:
        raise AssertionError("max_tokens=0 was taken")
    try:
        client.messages.create(model="no-such-model", max_tokens=5, messages=QUESTION)
    except anthropic.NotFoundError as error:
        assert error.type == "not_found_error", error
    else:
        raise AssertionError("a model that is not there answered")
    picture: Any = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    try:
        client.messages.create(
            model=model, max_tokens=5, messages=[{"role": "user", "content": [picture]}]
        )
    except anthropic.BadRequestError as error:
        assert "image" in str(error), error
    else:
        raise AssertionError("a picture was read")


def hints(client: Anthropic, model: str) -> None:
    """What only Anthropic's servers do is left out, and said in a header."""
    searched: list[Any] = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "France"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "The capital of France is Paris."},
    ]
    picture: Any = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": searched},
        {"role": "user", "content": [picture, {"type": "text", "text": "And of Italy?"}]},
    ]
    search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    answer = client.messages.with_raw_response.create(
        model=model,
        max_tokens=100,
        messages=messages,
        tools=[search, *TOOLS],
        extra_body={"temperature": 0, "context_management": edits},
    )
    assert answer.parse().content, answer
    warned = answer.headers["warning"]
    for what in ("context_management", "tools[0]", "messages[1].content[0]", "image"):
        assert what in warned, warned


def overflow(client: Anthropic, model: str) -> None:
    """A prompt that does not fit says so in the words that clients look for; so does its count."""
    messages: list[Any] = [{"role": "user", "content": "word " * 5000}]
    for ask in (
        lambda: client.messages.create(model=model, max_tokens=5, messages=messages),
        lambda: client.messages.count_tokens(model=model, messages=messages),
    ):
        try:
            ask()
        except anthropic.BadRequestError as error:
            message = error.api_message or ""
            assert re.fullmatch(r"prompt is too long: \d+ tokens > \d+ maximum", message), error
        else:
            raise AssertionError("a prompt of 5,000 words was taken")


async def concurrently(base_url: str, model: str) -> None:
    """Many requests of one asynchronous client, streams among them; one is left half way."""
    async with AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0) as client:

        async def one() -> str:
            return text_of(
                await client.messages.create(
                    model=model, max_tokens=100, messages=QUESTION, **GREEDY
                )
            )

        async def streamed() -> str:
            async with client.messages.stream(
                model=model, max_tokens=100, messages=QUESTION, **GREEDY
            ) as stream:
                return "".join([text async for text in stream.text_stream])

        texts = await asyncio.gather(*(one() for _ in range(8)), *(streamed() for _ in range(8)))
        assert len(set(texts)) == 1, texts
        left = await client.messages.create(
            model=model, max_tokens=500, messages=QUESTION, stream=True
        )
        async for _ in left:
            break
        await left.close()


def main() -> None:
    """Run every scenario against the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", nargs="*", help="scenarios, by their names")
    options = parser.parse_args()
    client = Anthropic(base_url=options.base_url, api_key="none", max_retries=0)
    scenarios = (
        message,
        limits,
        stream,
        tools,
        chosen_tools,
        structured,
        thinking,
        count,
        models,
        errors,
        hints,
        overflow,
    )
    for scenario in scenarios:
        if options.only and scenario.__name__ not in options.only:
            continue
        scenario(client, options.model)
        print(f"ok {scenario.__name__}")
    asyncio.run(concurrently(options.base_url, options.model))
    print("ok concurrently")


if __name__ == "__main__":
    main()
