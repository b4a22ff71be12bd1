"""`/v1/responses` as the `openai` package sees it, with a model that is really computed."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from benchmarks.stack import Stack
from tests.system.ring import num_running, wait_empty

MODEL = "tiny"
INPUT = "What is the capital of France?"
GREEDY = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}


class Verdict(BaseModel):
    """What a model of random weights can fill in, too."""

    kind: Literal["good", "bad"]
    sure: bool


def test_a_response_in_one_piece(client: OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input=INPUT, max_output_tokens=12, **GREEDY)
    assert answer.output_text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 12
    counted = client.responses.input_tokens.count(model=MODEL, input=INPUT)
    assert counted.input_tokens == answer.usage.input_tokens


def test_it_says_what_the_chat_says(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": INPUT}], max_tokens=20, **GREEDY
    )
    answer = client.responses.create(model=MODEL, input=INPUT, max_output_tokens=20, **GREEDY)
    assert answer.output_text == chat.choices[0].message.content


def test_a_stream_ends_with_the_whole_response(client: OpenAI) -> None:
    asked = {"model": MODEL, "input": INPUT, "max_output_tokens": 24, "top_logprobs": 2, **GREEDY}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert contents(last.response) == contents(whole)


def test_a_schema_is_kept_to(client: OpenAI) -> None:
    asked = {"model": MODEL, "input": INPUT, "text_format": Verdict, "temperature": 1.0}
    for seed in range(3):
        answer = client.responses.parse(**asked, extra_body={"seed": seed}, max_output_tokens=500)
        if answer.status == "completed":
            assert isinstance(answer.output_parsed, Verdict)
            return
    pytest.fail("no answer of three was complete")


def test_the_parsed_stream_of_the_package(client: OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input=INPUT, text_format=Verdict, temperature=0, max_output_tokens=500
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "wibble"}]}, "tools[0].type"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_had_is_a_bad_request(
    client: OpenAI, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=INPUT, **fields)
    assert caught.value.param == param


def test_a_stored_response_is_read_gone_on_from_and_deleted(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=INPUT, max_output_tokens=2, **GREEDY)
    assert client.responses.retrieve(first.id) == first
    items = list(client.responses.input_items.list(first.id, limit=1))
    assert [item.type for item in items] == ["message"]
    second = client.responses.create(
        model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=2, **GREEDY
    )
    assert second.previous_response_id == first.id
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="another router of this server"):
        client.responses.retrieve(first.id)


def test_a_response_in_the_background_is_followed_and_cancelled(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": INPUT, "background": True, **GREEDY}
    queued = client.responses.create(**asked, max_output_tokens=12)
    assert queued.status == "queued"
    events = list(client.responses.retrieve(queued.id, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")
    rest = list(client.responses.retrieve(queued.id, stream=True, starting_after=2))
    assert rest == events[3:]
    long = client.responses.create(**asked, max_output_tokens=400)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"


async def test_a_client_that_leaves_in_mid_stream_leaves_nothing_behind(
    tiny_stack: Stack, async_client: AsyncOpenAI
) -> None:
    stream = await async_client.responses.create(
        model=MODEL, input=INPUT, stream=True, max_output_tokens=400, **GREEDY
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    wait_empty(tiny_stack)
    assert sum(num_running(tiny_stack)) == 0


def contents(response: Response) -> list[object]:
    """Return what the items have, without their ids."""
    return [
        {key: value for key, value in item.to_dict().items() if key != "id"}
        for item in response.output
    ]
