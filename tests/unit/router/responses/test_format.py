"""Events and bodies of `/v1/responses`, as OpenAI's own accumulator and types read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import NotGiven
from openai._models import validate_type
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import (
    Response,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter

from common.messages.failure import Ending, Failure, Usage
from common.messages.text import Part
from services.router.answer import CompleteAnswer, Delta
from services.router.request_warnings import Warnings
from services.router.responses.format import NO_NAMES, ResponsesFormat
from services.router.responses.requests import parse_response
from services.router.responses.tools import ToolName
from tests.text_rows import columns
from tests.unit.router.answers import (
    CALLED,
    CUT,
    HEAD,
    OPENED,
    SAID,
    STOPPED,
    THOUGHT,
    USAGE,
    answer,
    streamed,
    streamed_text,
    token,
)

EVENT = TypeAdapter[Any](ResponseStreamEvent)


def make_format(names: Mapping[str, ToolName] = NO_NAMES) -> ResponsesFormat:
    body = {"model": "demo", "input": "Hi", "metadata": {"a": "b"}, "store": True}
    parsed = parse_response(body, Warnings())
    return ResponsesFormat(HEAD, parsed.echo(parsed.generate), names, clock=lambda: 1700000009.5)


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Parse a stream; the event lines repeat the types, the numbers count from 0."""
    *chunks, end = data.split(b"\n\n")
    assert end == b""
    events = []
    for number, chunk in enumerate(chunks):
        name, _, payload = chunk.partition(b"\n")
        event = json.loads(payload.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        assert event["sequence_number"] == number
        events.append(event)
    return events


def accumulated(data: bytes) -> Response:
    """Let the SDK put a stream together; every event must be what its types say."""
    state = ResponseStreamState[None](text_format=NotGiven(), input_tools=NotGiven())
    for event in events_of(data):
        state.handle_event(EVENT.validate_python(event))
    assert state._completed_response is not None
    return state._completed_response


def texts(response: Any) -> list[tuple[str, str]]:
    """Return kind and text of every item."""
    pairs = []
    for item in response["output"]:
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        pairs.append((item["type"], text))
    return pairs


def test_a_text_comes_in_the_order_of_openais_events() -> None:
    data = streamed_text(make_format(), ["Hel", "lo"], STOPPED)
    assert [event["type"] for event in events_of(data)] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert accumulated(data).output_text == "Hello"


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    data = streamed(make_format(), (*THOUGHT, *SAID, *CALLED), STOPPED)
    kinds = [event["type"].removeprefix("response.") for event in events_of(data)]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    final = accumulated(data)
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert final.output_text == 'It is\n"sunny" \u2028'


def test_calls_have_the_names_that_the_client_gave() -> None:
    names = {
        "crm__get_weather": ToolName("get_weather", "crm"),
        "patch": ToolName("patch", is_custom=True),
    }
    parts = (
        Part("call", "crm__get_weather", 0, "call_a0"),
        Part("arguments", "{}", 0),
        Part("call", "patch", 1, "call_a1"),
        Part("arguments", '{"input": "a\\', 1),
        Part("arguments", 'nb"}', 1),
    )
    data = streamed(make_format(names), parts, STOPPED)
    kinds = [event["type"].removeprefix("response.") for event in events_of(data)]
    assert kinds[-6:] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    weather, patch = accumulated(data).output
    assert isinstance(weather, ResponseFunctionToolCall)
    assert (weather.name, weather.namespace) == ("get_weather", "crm")
    assert isinstance(patch, ResponseCustomToolCall)
    assert (patch.name, patch.input, patch.namespace) == ("patch", "a\nb", None)
    body = make_format(names).body([answer(parts, STOPPED)], USAGE)
    assert body == events_of(data)[-1]["response"]


def test_the_whole_body_is_the_end_of_the_stream() -> None:
    parts = (*THOUGHT, *SAID, *CALLED)
    last = events_of(streamed(make_format(), parts, STOPPED))[-1]["response"]
    body = make_format().body([answer(parts, STOPPED)], USAGE)
    assert json.loads(json.dumps(body)) == last
    assert Response.model_validate(body, strict=True).status == "completed"


def test_a_body_has_every_field_that_openais_type_has_for_it() -> None:
    body = make_format().body([answer(SAID, STOPPED)], USAGE)
    assert validate_type(type_=Response, value=body)
    assert body["completed_at"] == 1700000009
    assert body["store"] is False
    assert body["metadata"] == {"a": "b"}
    assert body["usage"] == {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 19,
    }
    assert body["tools"] == [] and body["tool_choice"] == "auto"
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "medium"}


def test_an_answer_that_was_cut_is_incomplete_and_so_is_its_last_item() -> None:
    data = streamed(make_format(), (*THOUGHT, *SAID), CUT)
    last = events_of(data)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["completed_at"] is None
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]
    body = make_format().body([answer((*THOUGHT, *SAID), CUT)], USAGE)
    assert body == last["response"]


@pytest.mark.parametrize("ended", [STOPPED, CUT])
def test_nothing_at_all_is_an_empty_message(ended: Ending) -> None:
    last = events_of(streamed_text(make_format(), [], ended))[-1]["response"]
    assert texts(last) == [("message", "")]
    assert make_format().body([answer((), ended)], USAGE) == last


def test_reasoning_without_an_end_is_all_that_there_is() -> None:
    last = events_of(streamed(make_format(), THOUGHT, CUT))[-1]["response"]
    assert texts(last) == [("reasoning", "Let me see.")]


def test_reasoning_tokens_are_counted() -> None:
    ended = Ending("stop", USAGE, reasoning_tokens=3)
    last = events_of(streamed(make_format(), (*THOUGHT, *SAID), ended))[-1]["response"]
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_a_failure_on_the_way_is_said_with_what_there_was_and_then_raised() -> None:
    layout = make_format()
    data = layout.opening(0, OPENED) + layout.delta(0, Delta("Hel"))
    data += layout.failed(Failure(503, "worker_lost", "it is gone; try again", None, True))
    *_, failed, error = events_of(data)
    EVENT.validate_python(failed)
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {
        "code": "server_error",
        "message": "it is gone; try again",
    }
    assert texts(failed["response"]) == [("message", "Hel")]
    assert error["type"] == "error"
    assert error["error"]["message"] == error["message"] == "it is gone; try again"
    assert (error["code"], error["param"]) == ("worker_lost", None)


def test_logprobs_go_with_their_text_and_stand_at_its_end() -> None:
    layout = make_format()
    data = layout.opening(0, OPENED)
    data += layout.delta(0, Delta("", columns(token("H"))))
    data += layout.delta(0, Delta("Hi", columns(token("i"), token("<end>"))))
    data += layout.ending(0, STOPPED) + layout.closing(USAGE)
    delta, done = (
        [entry for entry in events_of(data) if entry["type"] == f"response.output_text.{kind}"][0]
        for kind in ("delta", "done")
    )
    assert [entry["token"] for entry in delta["logprobs"]] == ["H", "i"]
    assert done["logprobs"] == delta["logprobs"]
    assert delta["logprobs"][1] == {
        "token": "i",
        "logprob": -0.5,
        "bytes": [105],
        "top_logprobs": [{"token": "i", "logprob": -0.5, "bytes": [105]}],
    }
    whole = CompleteAnswer("Hi", columns(token("H"), token("i"), token("<end>")), STOPPED)
    assert make_format().body([whole], USAGE) == events_of(data)[-1]["response"]
    accumulated(data)


def test_logprobs_of_a_parsed_answer_are_those_of_its_text() -> None:
    tokens = [token(text) for text in ("<think>", "see", "</think>", "\n", "It", " is", "<call>")]
    layout = make_format()
    layout.opening(0, OPENED)
    data = layout.delta(0, Delta("", columns(*tokens[:3]), [Part("reasoning", "see")]))
    data = layout.delta(0, Delta("", columns(*tokens[3:]), [Part("content", "It is")]))
    (delta,) = (
        json.loads(chunk.partition(b"data: ")[2])
        for chunk in data.split(b"\n\n")
        if chunk.startswith(b"event: response.output_text.delta")
    )
    assert [entry["token"] for entry in delta["logprobs"]] == ["It", " is"]
    whole = CompleteAnswer("It is", tokens, STOPPED, reasoning="see")
    (_, message) = make_format().body([whole], USAGE)["output"]
    assert message["content"][0]["logprobs"] == delta["logprobs"]


PARTS = st.lists(
    st.one_of(
        st.builds(Part, st.sampled_from(["content", "reasoning"]), st.text(max_size=5)),
        st.just(Part("call", "f", 0, "call_1")),
        st.builds(Part, st.just("arguments"), st.text(max_size=5)),
    ),
    max_size=12,
)


@given(PARTS, st.sampled_from([STOPPED, CUT]), st.randoms(use_true_random=False))
def test_any_answer_merged_anyhow_ends_as_the_same_response(
    parts: list[Part], ended: Ending, random: Any
) -> None:
    numbered = 0
    numbered_parts = []
    for part in parts:
        if part.kind == "call":
            numbered += 1
            part = Part("call", "f", numbered, f"call_{numbered}")
        numbered_parts.append(part)
    single = events_of(streamed(make_format(), numbered_parts, ended))[-1]
    layout = make_format()
    data, waiting = layout.opening(0, OPENED), Delta()
    for part in numbered_parts:
        waiting.take("", None, (part,), ())
        if random.random() < 0.5:
            data += layout.delta(0, waiting)
            waiting = Delta()
    data += layout.delta(0, waiting) + layout.ending(0, ended) + layout.closing(Usage(12, 4, 7))
    merged = events_of(data)[-1]
    assert merged["response"] == single["response"]
    if ended is STOPPED:
        accumulated(data)
