"""Good requests: what they become."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.tokenize import (
    IdsPrompt,
    OutputRules,
    StreamSettings,
    TextPrompt,
)
from services.router.generate_request import GenerateRequest
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.request_warnings import Warnings
from tests.unit.router.openai.parsed_requests import USER, chat_of, prompt_of

TOOL = {"type": "function", "function": {"name": "f"}}


def test_a_bare_chat_request_takes_openais_defaults() -> None:
    request = chat_of()
    sampling = request.generate.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (0, 1.0, 1.0)
    assert (sampling.num_logprobs, request.generate.num_choices, request.generate.has_seed) == (
        -1,
        1,
        False,
    )
    assert not request.streaming
    assert request.generate.stream == StreamSettings(parse_reasoning=True)
    assert request.generate.rules == OutputRules()


def test_null_counts_as_not_given() -> None:
    fields = ("temperature", "top_p", "n", "stop", "seed", "max_tokens", "logit_bias", "tools")
    assert chat_of(**dict.fromkeys(fields)).generate == chat_of().generate


def test_every_sampling_field_arrives() -> None:
    sampling = chat_of(
        max_tokens=9,
        seed=-1,
        temperature=0,
        top_k=-1,
        top_p=0.5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "3": 1.5},
        min_tokens=2,
        stop_token_ids=[4, 4, 5],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
    ).generate.sampling
    assert sampling.seed == (1 << 63) - 1
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (9, 2, 0)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.0, 0.5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.repetition_penalty == 1.1
    assert sampling.logit_bias == ((3, 1.5), (7, -100.0))
    assert sampling.stop_token_ids == (4, 5)
    assert (sampling.ignore_eos, sampling.num_logprobs) == (True, 3)


def test_logprobs_without_a_number_ask_for_the_chosen_token_only() -> None:
    assert chat_of(logprobs=True).generate.sampling.num_logprobs == 0
    assert chat_of(logprobs=False).generate.sampling.num_logprobs == -1


def test_the_two_names_of_max_tokens_mean_the_same() -> None:
    assert chat_of(max_completion_tokens=7).generate.sampling.max_tokens == 7
    assert chat_of(max_completion_tokens=7, max_tokens=7).generate.sampling.max_tokens == 7


def test_stop_is_a_string_or_several() -> None:
    assert chat_of(stop="a").generate.stream.stop == ("a",)
    assert chat_of(stop=["a", "b", "a"]).generate.stream.stop == ("a", "b")
    more = chat_of(include_stop_str_in_output=True, skip_special_tokens=False).generate.stream
    assert more == StreamSettings((), True, False, parse_reasoning=True)


def test_text_parts_stay_parts_and_developers_become_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]
    assert json.loads(prompt_of(messages=messages).messages_json) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": parts},
    ]


def test_an_assistants_call_needs_no_content() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    assert json.loads(prompt_of(messages=messages).messages_json) == messages


def test_tools_reach_the_template_unless_none_may_be_chosen() -> None:
    assert json.loads(prompt_of(tools=[TOOL]).tools_json) == [TOOL]
    assert json.loads(prompt_of(tools=[TOOL], tool_choice="auto").tools_json) == [TOOL]
    assert prompt_of(tools=[TOOL], tool_choice="none").tools_json == b""
    assert prompt_of(tools=[]).tools_json == b""


def test_the_generation_prompt_is_added_unless_the_last_message_goes_on() -> None:
    assert prompt_of().add_generation_prompt
    continued = prompt_of(continue_final_message=True)
    assert (continued.add_generation_prompt, continued.continue_final_message) == (False, True)
    assert not prompt_of(add_generation_prompt=False).add_generation_prompt


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_a_prompt_may_be_text_or_ids_or_a_list_of_either(prompt: Any, expected: Any) -> None:
    request = parse_completion({"model": "demo", "prompt": prompt}, Warnings()).generate
    got: list[Any] = []
    for each in request.prompts:
        if isinstance(each, IdsPrompt):
            got.append(list(each.ids))
        elif isinstance(each, TextPrompt):
            got.append(each.text)
    assert got == expected


def test_sixteen_tokens_are_usual_for_completions_and_not_the_clients_own_number() -> None:
    def request(**more: Any) -> GenerateRequest:
        return parse_completion({"model": "demo", "prompt": "a", **more}, Warnings()).generate

    assert (request().sampling.max_tokens, request().usual_max_tokens) == (0, 16)
    assert request(max_tokens=5).sampling.max_tokens == 5
    more = request(min_tokens=40)
    assert (more.sampling.min_tokens, more.usual_max_tokens) == (40, 40)
    assert request().cost_tokens(4096) == 16
    assert chat_of().generate.usual_max_tokens == 0


def test_an_echo_of_the_prompt_alone_asks_for_no_tokens() -> None:
    body = {"model": "demo", "prompt": "abcd" * 10, "n": 3, "echo": True, "max_tokens": 0}
    request = parse_completion(body, Warnings()).generate
    assert request.prompt_only
    assert request.cost_tokens(4096) == 10
    assert not parse_completion({**body, "max_tokens": None}, Warnings()).generate.prompt_only


def test_completion_extras() -> None:
    body = {"model": "demo", "prompt": ["a", "b"], "n": 3, "best_of": 3, "logprobs": 0}
    body |= {"add_special_tokens": False, "priority": -1, "cache_salt": "s", "suffix": ""}
    request = parse_completion(body, Warnings()).generate
    assert request.prompts == (TextPrompt("a", False), TextPrompt("b", False))
    assert (request.num_choices, request.num_all_choices, request.sampling.num_logprobs) == (
        3,
        6,
        0,
    )
    assert (request.priority, request.cache_salt) == (-1, "s")
    assert request.field_of(1) == "prompt[1]"


def test_fields_that_ask_for_nothing_are_taken() -> None:
    harmless: dict[str, Any] = {
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "use_beam_search": False,
    }
    assert chat_of(**harmless).generate == chat_of().generate


def test_an_unknown_field_is_warned_of_and_a_harmless_one_is_not() -> None:
    warnings = Warnings()
    parse_chat({"model": "demo", "messages": [USER], "wibble": 1, "user": "me"}, warnings)
    assert warnings.header() == '299 - "wibble: unknown request field \\"wibble\\" is ignored"'


def test_the_cost_of_a_job_is_what_it_may_come_to() -> None:
    body = {"model": "demo", "prompt": ["abcd" * 10, [1, 2, 3]], "n": 2, "max_tokens": 100}
    request = parse_completion(body, Warnings()).generate
    assert request.cost_tokens(4096) == 10 + 3 + 4 * 100
    assert request.cost_tokens(50) == 10 + 3 + 4 * 50
    assert chat_of().generate.cost_tokens(4096) == 32 // 4 + 4096


MODELS_OWN = (
    ("temperature", 0.6),
    ("top_p", 0.9),
    ("top_k", 20.0),
    ("min_p", 0.1),
    ("repetition_penalty", 1.05),
)


def test_what_the_client_left_out_is_the_models_own_setting() -> None:
    for request in (
        chat_of().generate,
        parse_completion({"model": "m", "prompt": "a"}, Warnings()).generate,
    ):
        sampling = request.with_defaults(MODELS_OWN).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 20)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.05)
        assert type(sampling.top_k) is int


@given(st.sets(st.sampled_from(["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])))
def test_what_the_client_said_wins_even_where_it_is_the_usual_value(said: set[str]) -> None:
    usual = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    request = chat_of(**{name: usual[name] for name in said}).generate.with_defaults(MODELS_OWN)
    for name, own in MODELS_OWN:
        assert getattr(request.sampling, name) == (usual[name] if name in said else own)


def test_a_model_that_sets_nothing_or_something_unknown_changes_nothing() -> None:
    request = chat_of().generate
    assert request.with_defaults(()) is request
    assert request.with_defaults((("max_tokens", 5.0), ("wibble", 1.0))) is request
    assert request.with_defaults((("top_k", -1.0),)).sampling.top_k == 0
