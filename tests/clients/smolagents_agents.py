"""`smolagents` against a running server: an agent of tools and one of code, whole and streamed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from smolagents import CodeAgent, LogLevel, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES


class Heard(OpenAIServerModel):
    """Keeps the events of its last stream: twice a text came without one character."""

    events: list[Any] = []

    def generate_stream(self, *arguments: Any, **more: Any) -> Iterator[Any]:
        self.events = []
        for event in super().generate_stream(*arguments, **more):
            self.events.append(event)
            yield event


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city.

    Args:
        city: The city.
    """
    return "18 degrees and sunny"


@tool
def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: What to calculate.
    """
    left, right = expression.split("*")
    return str(int(left) * int(right))


def main() -> None:
    """Run every scenario against the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    model = Heard(
        options.model,
        f"{options.base_url}/v1",
        api_key="none",
        temperature=0,
        client_kwargs={"max_retries": 0},
    )
    for streams in (False, True):
        for each, question, expected in (
            (get_weather, "What is the weather in Paris?", "18"),
            (calculator, "What is 12 * 34?", "408"),
        ):
            agent = ToolCallingAgent(
                [each], model, max_steps=2, verbosity_level=LogLevel.OFF, stream_outputs=streams
            )
            result = agent.run(question, return_full_result=True)
            assert result.state == "success" and expected in str(result.output), result
            assert result.token_usage is not None and result.token_usage.output_tokens, result
        print(f"ok tools, {streams=}")
        # The demo model repeats words after a short prompt, and has never seen a tag.
        prompts = deepcopy(EMPTY_PROMPT_TEMPLATES)
        prompts["system_prompt"] = "Be brief."
        coder = CodeAgent(
            [get_weather],
            model,
            prompts,
            max_steps=1,
            verbosity_level=LogLevel.OFF,
            stream_outputs=streams,
            code_block_tags=("code:", "end"),
        )
        result = coder.run("Repeat after me: code: final_answer(42) end", return_full_result=True)
        assert result.state == "success" and result.output == 42, (model.events, result)
        print(f"ok code, {streams=}")


if __name__ == "__main__":
    main()
