"""LangChain's agents against a running server: loops over tools, answers as objects, streams."""

from __future__ import annotations

import argparse

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """What is to be read out of a sentence."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return f"18 degrees and sunny in {city}"


@tool
def calculator(expression: str) -> str:
    """Calculate."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


def said(text: str) -> dict[str, list[dict[str, str]]]:
    """Make the input of an agent."""
    return {"messages": [{"role": "user", "content": text}]}


def main() -> None:
    """Run every scenario against the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    model = ChatOpenAI(
        model=options.model,
        base_url=f"{options.base_url}/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
    )
    agent = create_agent(model, [get_weather, calculator])
    told = agent.invoke(said("What is the weather in Paris?"))["messages"]
    assert [message.type for message in told] == ["human", "ai", "tool", "ai"], told
    assert "18" in told[-1].text, told
    told = agent.invoke({"messages": [*told, *said("What is 12 * 34?")["messages"]]})["messages"]
    assert "408" in told[-1].text, told
    print("ok tools")
    chunks = agent.stream(said("What is the weather in Rome?"), stream_mode="messages")
    pieces = [chunk.text for chunk, _ in chunks if chunk.type == "AIMessageChunk"]
    assert "18" in "".join(pieces) and len(pieces) > 5, pieces
    print("ok stream")
    for strategy in (ProviderStrategy, ToolStrategy):
        reader = create_agent(model, [], response_format=strategy(Person))
        person = reader.invoke(said("Anna is 29 years old."))["structured_response"]
        assert person == Person(name="Anna", age=29), (strategy, person)
        print(f"ok {strategy.__name__}")


if __name__ == "__main__":
    main()
