"""`pydantic-ai` against a running server: agents with tools and results as Python objects."""

from __future__ import annotations

import argparse
import asyncio

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Person(BaseModel):
    """What is to be read out of a sentence."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return f"18 degrees and sunny in {city}"


def calculator(expression: str) -> str:
    """Calculate."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


async def run(base_url: str, name: str) -> None:
    """Run every scenario with both of OpenAI's APIs."""
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    provider = OpenAIProvider(openai_client=client)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(name, provider=provider, settings=ModelSettings(temperature=0))
        await use_tools(model)
        await read(model)
        print(f"ok {kind.__name__}")


async def use_tools(model: Model) -> None:
    """Ask for what tools know, in a conversation and in a stream."""
    agent = Agent(model, tools=[get_weather, calculator])
    weather = await agent.run("What is the weather in Paris?")
    assert "18" in weather.output and weather.usage.output_tokens, weather
    product = await agent.run("What is 12 * 34?", message_history=weather.all_messages())
    assert "408" in product.output, product
    async with agent.run_stream("What is the weather in Rome?") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    assert "18" in "".join(pieces), pieces


async def read(model: Model) -> None:
    """Read an object out of a sentence by a tool, by a schema and by words."""
    for way in (ToolOutput, NativeOutput, PromptedOutput):
        reader = Agent(model, output_type=way(Person))
        person = (await reader.run("Anna is 29 years old.")).output
        assert person == Person(name="Anna", age=29), (way, person)


def main() -> None:
    """Run every scenario against the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    asyncio.run(run(options.base_url, options.model))


if __name__ == "__main__":
    main()
