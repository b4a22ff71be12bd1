"""The `openai` package against a running server: every call that applications make of it.

Runs under the second and the third major version of the package.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 40}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "maxLength": 40}},
                "required": ["expression"],
                "additionalProperties": False,
            },
        },
    },
]
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]


class Person(BaseModel):
    """What is to be read out of a sentence."""

    name: str
    age: int


def chat(client: OpenAI, model: str) -> None:
    """A complete answer, with usage, logprobs and several choices."""
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, n=2, logprobs=True, top_logprobs=2
    )
    assert "Paris" in (answer.choices[0].message.content or ""), answer
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].finish_reason == "stop"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content and len(logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def stream(client: OpenAI, model: str) -> None:
    """Chunks, and the SDK's own accumulation of them."""
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text, text
    assert chunks[-1].usage is not None and not chunks[-1].choices
    with client.chat.completions.stream(model=model, messages=QUESTION, temperature=0) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.content == text


def predict(client: OpenAI, model: str) -> None:
    """Predicted output."""
    asked: dict[str, Any] = {"model": model, "messages": QUESTION, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content
    prediction = {"type": "content", "content": [{"type": "text", "text": text}]}
    answer = client.chat.completions.create(**asked, prediction=prediction)
    assert answer.choices[0].message.content == text
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens is not None


def parse(client: OpenAI, model: str) -> None:
    """A pydantic model as the response format."""
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Anna is 29 years old."}],
        temperature=0,
        response_format=Person,
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Person), answer


def tools(client: OpenAI, model: str) -> None:
    """A forced call, a named one, and a loop that uses the result."""
    forced = client.chat.completions.create(
        model=model, messages=WEATHER, tools=TOOLS, tool_choice="required", temperature=0
    )
    assert forced.choices[0].finish_reason == "tool_calls", forced
    (call, *_) = forced.choices[0].message.tool_calls or []
    assert isinstance(json.loads(call.function.arguments), dict)
    named = client.chat.completions.create(
        model=model,
        messages=WEATHER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "calculator"}},
        temperature=0,
    )
    (call, *_) = named.choices[0].message.tool_calls or []
    assert call.function.name == "calculator", named
    assert set(json.loads(call.function.arguments)) == {"expression"}
    asked = client.chat.completions.create(
        model=model, messages=WEATHER, tools=TOOLS, temperature=0
    )
    (call, *_) = asked.choices[0].message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Paris"},
    )
    messages = [
        *WEATHER,
        asked.choices[0].message.model_dump(exclude_none=True),
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": json.dumps({"city": "Paris", "temperature_c": 18, "condition": "sunny"}),
        },
    ]
    told = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, temperature=0
    )
    assert "18" in (told.choices[0].message.content or ""), told


def streamed_tools(client: OpenAI, model: str) -> None:
    """Arguments come piece by piece and are put together by the SDK."""
    with client.chat.completions.stream(
        model=model, messages=WEATHER, tools=TOOLS, tool_choice="required", temperature=0
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds, kinds
    assert json.loads((final.choices[0].message.tool_calls or [])[0].function.arguments)


def functions(client: OpenAI, model: str) -> None:
    """The form of the time before tools: whole, in a stream, and with a result."""
    known: list[Any] = [tool["function"] for tool in TOOLS]
    asked: dict[str, Any] = {"model": model, "functions": known, "temperature": 0}
    (choice,) = client.chat.completions.create(messages=WEATHER, **asked).choices
    call = choice.message.function_call
    assert call is not None and choice.finish_reason == "function_call", choice
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"}), call
    pieces = client.chat.completions.create(messages=WEATHER, stream=True, **asked)
    deltas = [piece.choices[0].delta.function_call for piece in pieces]
    assert "".join(delta.arguments or "" for delta in deltas if delta) == call.arguments, deltas
    said: list[Any] = [
        *WEATHER,
        {"role": "assistant", "content": None, "function_call": call.model_dump()},
        {"role": "function", "name": "get_weather", "content": "18 degrees and sunny"},
    ]
    told = client.chat.completions.create(messages=said, **asked)
    assert "18" in (told.choices[0].message.content or ""), told
    named = client.chat.completions.create(
        messages=WEATHER, function_call={"name": "calculator"}, **asked
    )
    call = named.choices[0].message.function_call
    assert call is not None and call.name == "calculator", named


def completions(client: OpenAI, model: str) -> None:
    """The older endpoint, in both ways."""
    answer = client.completions.create(model=model, prompt=["One", "Two"], max_tokens=4, n=2)
    assert len(answer.choices) == 4
    pieces = client.completions.create(model=model, prompt="One", max_tokens=4, stream=True)
    assert list(pieces)[-1].choices[0].finish_reason in ("stop", "length")


def responses(client: OpenAI, model: str) -> None:
    """The Responses API: text, stream, parse, tools."""
    answer = client.responses.create(
        model=model, input="What is the capital of France?", temperature=0
    )
    assert "Paris" in answer.output_text and answer.status == "completed", answer
    with client.responses.stream(
        model=model, input="What is the capital of France?", temperature=0
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
    assert final.output_text == answer.output_text
    parsed = client.responses.parse(
        model=model, input="Anna is 29 years old.", text_format=Person, temperature=0
    )
    assert isinstance(parsed.output_parsed, Person), parsed
    called = client.responses.create(
        model=model,
        input="What is the weather in Paris?",
        tools=FLAT_TOOLS,
        tool_choice="required",
        temperature=0,
    )
    call = next(item for item in called.output if item.type == "function_call")
    told = client.responses.create(
        model=model,
        input=[
            {"role": "user", "content": "What is the weather in Paris?"},
            call.model_dump(exclude_none=True),  # type: ignore[list-item]
            {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"},
        ],
        tools=FLAT_TOOLS,
        temperature=0,
    )
    assert told.output_text, told


def errors(client: OpenAI, model: str) -> None:
    """Every refusal is the exception that the SDK has for it, and names the field."""
    try:
        client.chat.completions.create(model=model, messages=QUESTION, top_p=3)
    except openai.BadRequestError as error:
        assert error.param == "top_p" and error.request_id, error
    else:
        raise AssertionError("top_p=3 was taken")
    try:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
    else:
        raise AssertionError("a model that is not there answered")
    try:
        client.embeddings.create(model=model, input="hello")
    except openai.BadRequestError as error:
        assert "embedding" in str(error), error
    else:
        raise AssertionError("a chat model made an embedding")


async def concurrently(base_url: str, model: str) -> None:
    """Many requests of one asynchronous client, streams among them; one is left half way."""
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def one() -> str:
            answer = await client.chat.completions.create(
                model=model, messages=QUESTION, temperature=0
            )
            return answer.choices[0].message.content or ""

        async def streamed() -> str:
            pieces = await client.chat.completions.create(
                model=model, messages=QUESTION, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in pieces])

        texts = await asyncio.gather(*(one() for _ in range(8)), *(streamed() for _ in range(8)))
        assert len(set(texts)) == 1, texts
        pieces = await client.chat.completions.create(
            model=model, messages=QUESTION, stream=True, max_tokens=500
        )
        async for _ in pieces:
            break
        await pieces.close()


def main() -> None:
    """Run every scenario against the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    base_url = f"{options.base_url}/v1"
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [options.model]
    for scenario in (
        chat,
        stream,
        predict,
        parse,
        tools,
        streamed_tools,
        functions,
        completions,
        responses,
        errors,
    ):
        scenario(client, options.model)
        print(f"ok {scenario.__name__}")
    asyncio.run(concurrently(base_url, options.model))
    print("ok concurrently")


if __name__ == "__main__":
    main()
