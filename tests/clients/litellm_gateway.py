"""`litellm`, the gateway, against a running server: chat, streams, tools, schemas."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look for prices on the network

import litellm

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
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
            },
        },
    }
]
SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "place",
        "schema": {
            "type": "object",
            "properties": {"capital": {"type": "string", "maxLength": 20}},
            "required": ["capital"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    """Run every scenario against the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "model": f"openai/{options.model}",
        "api_base": f"{options.base_url}/v1",
        "api_key": "none",
        "temperature": 0,
        "num_retries": 0,
    }
    answer = litellm.completion(messages=QUESTION, **settings)
    assert "Paris" in answer.choices[0].message.content, answer
    print("ok chat")
    chunks = list(litellm.completion(messages=QUESTION, stream=True, **settings))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content, text
    print("ok stream")
    called = litellm.completion(
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=TOOLS,
        tool_choice="required",
        **settings,
    )
    (call, *_) = called.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}, called
    print("ok tools")
    structured = litellm.completion(messages=QUESTION, response_format=SCHEMA, **settings)
    assert set(json.loads(structured.choices[0].message.content)) == {"capital"}, structured
    print("ok schema")

    async def several() -> list[str]:
        answers = await asyncio.gather(
            *(litellm.acompletion(messages=QUESTION, **settings) for _ in range(4))
        )
        return [each.choices[0].message.content for each in answers]

    assert len(set(asyncio.run(several()))) == 1
    print("ok concurrently")
    try:
        litellm.completion(messages=QUESTION, **{**settings, "temperature": -1})
    except litellm.BadRequestError as error:
        assert "temperature" in str(error), error
    else:
        raise AssertionError("temperature=-1 was taken")
    print("ok errors")
    anthropic = {**settings, "model": f"anthropic/{options.model}", "api_base": options.base_url}
    answer = litellm.completion(messages=QUESTION, max_tokens=50, **anthropic)
    assert "Paris" in answer.choices[0].message.content, answer
    print("ok anthropic")


if __name__ == "__main__":
    main()
