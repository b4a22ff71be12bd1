"""What the tokenizer tells compute and the detokenizer of an answer, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.link.codec import unpack
from common.messages.address import AttemptId
from common.messages.arrays import int32s
from common.messages.generate import StreamHeader
from common.messages.sampling import GrammarSpec
from common.messages.text import Tokenized
from common.messages.tokenize import (
    IdsPrompt,
    OutputRules,
    StreamSettings,
    Structure,
    TextPrompt,
    TokenizeQuery,
    ToolUse,
)
from common.tokenized import ExpectedAnswer, call_key
from tests.flow.tokenizer_ring import CARD, Ring
from tests.unit.tokenizer.requests import LIMITS, address, request

SPEECH = ExpectedAnswer(
    grammar_spec=GrammarSpec('start: "x"', (1,), ((2, 3),), "tools"),
    tool_format="hermes",
    reasoning_format="think",
    reasoning_open=True,
)


async def header_of(answer: ExpectedAnswer, **stream: Any) -> StreamHeader:
    ring = await Ring().start()
    message = request(40, stream=StreamSettings(**stream), num_choices=2, first_choice=3)
    ring.send(message)
    ring.answer(5, 6, answer=answer)
    (generate,) = ring.at_compute
    assert generate.sampling.grammar_spec == answer.grammar_spec
    return unpack(StreamHeader, generate.header)


async def test_the_parsers_of_an_answer_are_named_where_they_are_asked_for() -> None:
    header = await header_of(SPEECH, parse_tools=True, parse_reasoning=True)
    formats = (header.tool_format, header.reasoning_format, header.reasoning_open)
    assert formats == ("hermes", "think", True)
    header = await header_of(SPEECH, parse_tools=True)
    formats = (header.tool_format, header.reasoning_format, header.reasoning_open)
    assert formats == ("hermes", "", False)
    header = await header_of(SPEECH)
    assert (header.tool_format, header.reasoning_format) == ("", "")
    header = await header_of(ExpectedAnswer(), parse_tools=True, parse_reasoning=True)
    assert (header.tool_format, header.reasoning_format) == ("", "")


async def test_the_ids_of_calls_are_keyed_alike_for_a_retry_and_unlike_for_another_request() -> (
    None
):
    header = await header_of(SPEECH)
    assert header.first_counter == 37 and header.prompt_ids == b""
    assert header.call_key == call_key(1, 1_700_000_000.0)
    others = [call_key(2, 1_700_000_000.0), call_key(1, 1_700_000_000.000001)]
    assert header.call_key not in others


async def test_a_prompts_ids_go_back_on_request() -> None:
    header = await header_of(SPEECH, return_prompt_ids=True)
    assert header.prompt_ids == int32s([5, 6]).tobytes()


async def test_the_rules_of_an_answer_go_to_the_process_also_with_ids() -> None:
    ring = await Ring().start()
    rules = OutputRules(tools=ToolUse("required"), thinking_budget=9)
    ring.send(request(1, prompt=IdsPrompt(int32s([1])), rules=rules))
    assert ring.processes.busy()[0].jobs[0].rules == rules


@pytest.mark.parametrize(("side", "kept"), [("left", [3, 4]), ("right", [1, 2])])
async def test_a_prompt_is_cut_to_what_is_asked_for(side: Any, kept: list[int]) -> None:
    ring = await Ring().start()
    ring.send(request(1, truncate_to=2, truncate_side=side))
    ring.answer(1, 2, 3, 4)
    (generate,) = ring.at_compute
    assert generate.prompt_ids == int32s(kept).tobytes()
    assert unpack(StreamHeader, generate.header).prompt_tail_ids == tuple(kept)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    ring = await Ring(max_chars_per_token=10).start()
    ring.send(request(1, prompt=TextPrompt("a" * 2001)))  # 200 tokens fit
    failure = ring.refusal().failure
    assert (failure.status, failure.code) == (400, "context_length_exceeded")
    assert (failure.field, failure.prompt_tokens, failure.most_prompt_tokens) == (
        "prompt",
        201,
        200,
    )
    assert not ring.processes.busy()
    ring.send(request(2, prompt=TextPrompt("a" * 2000)))
    assert len(ring.processes.busy()[0].jobs) == 1


@pytest.mark.parametrize(("side", "kept"), [("left", "b" * 20), ("right", "a" * 20)])
async def test_of_a_text_to_be_cut_only_what_may_be_kept_is_encoded(side: Any, kept: str) -> None:
    ring = await Ring(max_chars_per_token=10).start()
    prompt = TextPrompt("a" * 5000 + "b" * 5000)
    ring.send(request(1, prompt=prompt, truncate_to=2, truncate_side=side))
    assert ring.processes.busy()[0].jobs[0].prompt == TextPrompt(kept)


async def test_a_query_is_bounded_by_the_length_in_the_models_folder() -> None:
    ring = await Ring(card=replace(CARD, max_model_len=100), max_chars_per_token=10).start()
    query = TokenizeQuery(AttemptId("router.1", 1), address("router"), TextPrompt("a" * 1001))
    ring.send(query)
    (answer,) = [each for each in ring.at_router if isinstance(each, Tokenized)]
    assert answer.failure is not None and answer.failure.code == "context_length_exceeded"
    assert not ring.processes.busy()
    ring.pass_time(1.0)
    assert ring.beats()[0].model.max_model_len == 0


async def test_a_structure_that_is_too_large_is_refused_before_a_process_reads_it() -> None:
    ring = await Ring(max_structure_bytes=98).start()
    ring.send(request(1, rules=OutputRules(structure=Structure("regex", "a" * 99, "structured"))))
    failure = ring.refusal().failure
    assert (failure.status, failure.field) == (400, "structured")
    assert not ring.processes.busy()


async def test_a_prompt_to_be_pooled_may_fill_the_context() -> None:
    ring = await Ring().start()
    limits = replace(LIMITS, max_input_length=0, max_model_len=4)
    for counter, pooling in ((1, True), (2, False)):
        ring.send(request(counter, limits=limits, pooling=pooling))
        ring.answer(1, 2, 3, 4)
    (generate,) = ring.at_compute
    assert generate.attempt.counter == 1 and generate.pooling
    assert ring.refusal().failure.code == "context_length_exceeded"
    ring.send(request(3, limits=limits, pooling=True))
    ring.answer(1, 2, 3, 4, 5)
    assert len(ring.at_compute) == 1
