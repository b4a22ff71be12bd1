"""The `ollama` package against a running server: chat, generate, tools, thinking, lists."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ollama import Client, ResponseError
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
COLD: dict[str, Any] = {"temperature": 0}


def get_weather(city: str) -> str:
    """Get the current weather in a city.

    Args:
        city: The city's name.
    """
    return json.dumps({"city": city, "condition": "sunny", "temperature_c": 21})


class Person(BaseModel):
    """Who a text is about."""

    name: str
    age: int


def chats(client: Client, model: str) -> None:
    answer = client.chat(model, QUESTION, options=COLD)
    assert "Paris" in (answer.message.content or ""), answer
    assert answer.done and answer.done_reason == "stop"
    assert (answer.eval_count or 0) > 0 and (answer.prompt_eval_count or 0) > 0
    pieces = list(client.chat(f"{model}:latest", QUESTION, options=COLD, stream=True))
    assert "Paris" in "".join(piece.message.content or "" for piece in pieces)
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def generates(client: Client, model: str) -> None:
    answer = client.generate(model, QUESTION[0]["content"], options=COLD)
    assert "Paris" in (answer.response or "")
    pieces = client.generate(model, QUESTION[0]["content"], options=COLD, stream=True)
    assert "Paris" in "".join(piece.response or "" for piece in pieces)
    raw = client.generate(model, "Once", raw=True, options={**COLD, "num_predict": 5})
    assert raw.eval_count == 5 and raw.done_reason == "length"
    assert client.generate(model).done_reason == "load"


def calls_tools(client: Client, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat(model, messages, tools=[get_weather], options=COLD)
    (call,) = answer.message.tool_calls or ()
    assert call.function.name == "get_weather", call
    result = get_weather(**call.function.arguments)
    messages += [answer.message, {"role": "tool", "content": result, "tool_name": "get_weather"}]
    last = client.chat(model, messages, tools=[get_weather], options=COLD)
    assert "21" in (last.message.content or ""), last
    streamed = client.chat(model, messages[:1], tools=[get_weather], options=COLD, stream=True)
    found = [call for piece in streamed for call in piece.message.tool_calls or ()]
    assert [each.function.name for each in found] == ["get_weather"]


def thinks(client: Client, model: str) -> None:
    question = [{"role": "user", "content": "What is 17 plus 25?"}]
    thought = client.chat(model, question, think=True, options=COLD)
    assert thought.message.thinking and "42" in (thought.message.content or ""), thought
    plain = client.chat(model, question, think=False, options=COLD)
    assert not plain.message.thinking


def formats(client: Client, model: str) -> None:
    question = [{"role": "user", "content": "Ada is 36 years old. Answer as JSON."}]
    limit = {**COLD, "num_predict": 80}
    answer = client.chat(model, question, format=Person.model_json_schema(), options=limit)
    assert isinstance(json.loads(answer.message.content or "")["age"], int)
    answer = client.chat(model, question, format="json", options=limit)
    if answer.done_reason == "stop":
        json.loads(answer.message.content or "")


def lists(client: Client, model: str) -> None:
    assert [each.model for each in client.list().models] == [model]
    shown = client.show(model)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities or ())
    assert (shown.modelinfo or {})["slipstream.context_length"] > 0


def refuses(client: Client, model: str) -> None:
    try:
        client.chat("other", QUESTION)
    except ResponseError as error:
        assert error.status_code == 404 and "does not exist" in error.error
    else:
        raise AssertionError("a model that is not there answered")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    client = Client(host=options.base_url)
    for scenario in (chats, generates, calls_tools, thinks, formats, lists, refuses):
        scenario(client, options.model)
        print(scenario.__name__)


if __name__ == "__main__":
    main()
