"""The OpenAI Agents SDK against a running server, over Responses and over chat completions."""

from __future__ import annotations

import argparse
import asyncio
import json

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.models.interface import Model
from openai import AsyncOpenAI
from pydantic import BaseModel

SETTINGS = ModelSettings(temperature=0)
CALLS: list[str] = []


class Person(BaseModel):
    """What is to be read out of a sentence."""

    name: str
    age: int


class Report(BaseModel):
    """What is to be said of the weather."""

    city: str
    temperature_c: int


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    CALLS.append(f"get_weather {city}")
    return json.dumps({"city": city, "temperature_c": 18, "condition": "sunny"})


@function_tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    CALLS.append(f"calculator {expression}")
    return "408"


def agent_of(model: Model) -> Agent[None]:
    """Make an agent with both tools."""
    return Agent(
        name="helper", model=model, model_settings=SETTINGS, tools=[get_weather, calculator]
    )


async def answers(model: Model) -> None:
    """An answer without tools, with its usage."""
    agent = Agent[None](name="plain", model=model, model_settings=SETTINGS)
    result = await Runner.run(agent, "What is the capital of France?")
    assert "Paris" in result.final_output, result
    assert result.context_wrapper.usage.total_tokens > 0, result


async def uses_tools(model: Model) -> None:
    """Two tools, each called once, and their results used."""
    CALLS.clear()
    result = await Runner.run(agent_of(model), "What is the weather in Paris?")
    assert "18" in result.final_output and CALLS == ["get_weather Paris"], (result, CALLS)
    result = await Runner.run(agent_of(model), "What is 12 * 34?")
    assert "408" in result.final_output and CALLS[1] == "calculator 12 * 34", (result, CALLS)


async def streams(model: Model) -> None:
    """The same as it comes."""
    CALLS.clear()
    result = Runner.run_streamed(agent_of(model), "What is the weather in Paris?")
    kinds = [event.type async for event in result.stream_events()]
    assert {"raw_response_event", "run_item_stream_event"} <= set(kinds), kinds
    assert "18" in result.final_output and CALLS == ["get_weather Paris"], (result, CALLS)


async def converses(model: Model) -> None:
    """A second question goes on from all items of the first."""
    agent = agent_of(model)
    first = await Runner.run(agent, "What is the capital of France?")
    items = [*first.to_input_list(), {"role": "user", "content": "And of Italy?"}]
    second = await Runner.run(agent, items)  # type: ignore[arg-type]
    assert "Rome" in second.final_output, second


async def writes_objects(model: Model) -> None:
    """An object in place of text, with tools before it and without."""
    agent = Agent[None](name="reader", model=model, model_settings=SETTINGS, output_type=Person)
    result = await Runner.run(agent, "Anna is 29 years old.")
    assert result.final_output == Person(name="Anna", age=29), result
    CALLS.clear()
    agent = agent_of(model).clone(output_type=Report)
    result = await Runner.run(agent, "What is the weather in Paris?")
    assert result.final_output == Report(city="Paris", temperature_c=18), result
    assert CALLS == ["get_weather Paris"], CALLS


async def hands_over(model: Model) -> None:
    """A handoff is a tool like any other: the request that offers it is taken."""
    other = agent_of(model)
    agent = Agent[None](
        name="desk", model=model, model_settings=SETTINGS, handoffs=[handoff(other)]
    )
    result = await Runner.run(agent, "Hello!")
    assert result.final_output, result


async def goes_on_by_id(model: Model) -> None:
    """The server keeps the conversation."""
    agent = agent_of(model)
    first = await Runner.run(agent, "What is the capital of France?")
    assert first.last_response_id, first
    second = await Runner.run(agent, "And of Italy?", previous_response_id=first.last_response_id)
    assert "Rome" in second.final_output, second
    CALLS.clear()
    result = await Runner.run(
        agent, "What is the weather in Paris?", auto_previous_response_id=True
    )
    assert "18" in result.final_output and CALLS == ["get_weather Paris"], (result, CALLS)


async def run(base_url: str, name: str) -> None:
    """Run every scenario against the server."""
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        models: dict[str, Model] = {
            "responses": OpenAIResponsesModel(name, client),
            "chat": OpenAIChatCompletionsModel(name, client),
        }
        for api, model in models.items():
            for scenario in (
                answers,
                uses_tools,
                streams,
                converses,
                writes_objects,
                hands_over,
            ):
                await scenario(model)
                print(f"ok {api} {scenario.__name__}")
        await goes_on_by_id(models["responses"])
        print("ok responses goes_on_by_id")


def main() -> None:
    """Read where the server is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    set_tracing_disabled(True)
    asyncio.run(run(f"{options.base_url}/v1", options.model))


if __name__ == "__main__":
    main()
