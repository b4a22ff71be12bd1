"""The tokenizer's actor over the in-memory link: prompts in, ids on to compute, refusals back."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import StatusCode

from common.link.codec import unpack
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.control import Abort, RouterAlive
from common.messages.failure import Failure
from common.messages.generate import Generate, StreamHeader
from common.messages.sampling import SamplingParams
from common.messages.text import Tokenized
from common.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    StreamSettings,
    TextPrompt,
    TokenizeQuery,
)
from common.telemetry import trace
from common.tokenized import call_key
from services.router.first_stage import first_stage
from tests.flow.tokenizer_ring import CARD, PARENT, Ring
from tests.unit.tokenizer.requests import address, request


async def test_a_prompt_goes_on_to_compute_with_everything_that_compute_needs() -> None:
    ring = await Ring().start()
    message = request(
        7,
        sampling=SamplingParams(max_tokens=0, seed=5, num_logprobs=2, min_tokens=3),
        stream=StreamSettings(stop=("END",), include_stop_str_in_output=True),
        output_ids=int32s([9, 8]),
        accepted_characters=4,
        num_choices=2,
        first_choice=1,
        priority=-3,
        cache_salt="tenant",
        traceparent=PARENT,
    )
    ring.send(message)
    ring.answer(*range(1, 13))
    (generate,) = ring.at_compute
    assert generate == Generate(
        attempt=AttemptId("router.1", 7),
        detokenizer=address("detokenizer"),
        prompt_ids=int32s(range(1, 13)).tobytes(),
        output_ids=int32s([9, 8]),
        sampling=replace(message.sampling, max_tokens=100),
        header=generate.header,
        admitted_at_s=message.admitted_at_s,
        num_choices=2,
        first_choice=1,
        priority=-3,
        cache_salt="tenant",
        traceparent=PARENT,
    )
    assert unpack(StreamHeader, generate.header) == StreamHeader(
        reply=address("router"),
        stop=("END",),
        include_stop_str_in_output=True,
        num_logprobs=2,
        min_tokens=3,
        prompt_tail_ids=(5, 6, 7, 8, 9, 10, 11, 12),
        accepted_ids=(9, 8),
        accepted_characters=4,
        traceparent=PARENT,
        call_key=call_key(5, message.admitted_at_s),
        first_counter=6,
    )
    assert ring.actor.idle and not ring.at_router


async def test_a_chat_is_rendered_at_the_time_of_its_admission() -> None:
    ring = await Ring().start()
    ring.send(request(1, prompt=ChatPrompt(b"[]"), admitted_at_s=123.0))
    assert ring.processes.busy()[0].jobs[0].now_s == 123.0


async def test_ids_need_no_process() -> None:
    ring = await Ring().start()
    ring.send(request(1, prompt=IdsPrompt(int32s([1, 2]))))
    assert ring.at_compute[0].prompt_ids == int32s([1, 2]).tobytes() and not ring.processes.busy()


@pytest.mark.parametrize(
    "more",
    [
        {"num_choices": 3, "stream": StreamSettings(stop=("END",), return_prompt_ids=True)},
        {"output_ids": int32s([9]), "accepted_characters": 2, "first_choice": 1, "priority": 4},
        {"pooling": True, "cache_salt": "tenant", "traceparent": PARENT, "client": "a"},
    ],
)
async def test_ids_that_pass_the_tokenizer_by_become_what_it_would_have_sent(more: Any) -> None:
    ring = await Ring().start()
    sampling = SamplingParams(max_tokens=5, seed=1, num_logprobs=2)
    message = request(7, prompt=IdsPrompt(int32s(range(1, 13))), sampling=sampling, **more)
    ring.send(message)
    assert first_stage(message) == (address("compute"), *ring.at_compute)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (IdsPrompt(int32s()), "empty_prompt"),
        (IdsPrompt(int32s([1000])), "invalid_token_id"),
        (IdsPrompt(int32s(range(201))), "context_length_exceeded"),
    ],
)
async def test_what_cannot_be_generated_from_is_refused(prompt: IdsPrompt, code: str) -> None:
    ring = await Ring().start()
    ring.send(request(4, prompt=prompt, num_choices=3, prompt_field="prompt[2]"))
    refused = ring.refusal()
    assert (refused.attempt, refused.num_choices) == (AttemptId("router.1", 4), 3)
    assert (refused.failure.status, refused.failure.code) == (400, code)
    assert refused.failure.field == "prompt[2]"
    assert not ring.at_compute and ring.actor.idle


async def test_a_failure_in_the_process_names_the_prompts_field() -> None:
    ring = await Ring().start()
    ring.send(request(1, prompt=ChatPrompt(b"[]"), prompt_field="messages"))
    ring.processes.busy()[0].fail(Failure(400, "template_error", "no"))
    ring.exchange.deliver()
    assert ring.refusal().failure == Failure(400, "template_error", "no", "messages")


async def test_a_query_is_answered_to_the_router() -> None:
    ring = await Ring().start()
    query = AttemptId("router.1", 1)
    ring.send(TokenizeQuery(query, address("router"), TextPrompt("ab"), return_token_strs=True))
    assert ring.processes.busy()[0].jobs[0].want_strs
    ring.answer(5, 6, strs=("a", "b"))
    assert ring.at_router == [Tokenized(query, int32s([5, 6]), ("a", "b"))]


async def test_a_query_that_fails_is_answered_with_its_failure() -> None:
    ring = await Ring(max_prompt_bytes=2).start()
    query = AttemptId("router.1", 1)
    ring.send(TokenizeQuery(query, address("router"), TextPrompt("abc")))
    (answer,) = ring.at_router
    assert isinstance(answer, Tokenized) and answer.failure is not None
    assert (answer.failure.status, answer.failure.field) == (413, "prompt")


async def test_an_aborted_request_is_forgotten_wherever_it_is() -> None:
    ring = await Ring().start()
    ring.send(*[request(counter) for counter in (1, 2, 3)])
    ring.send(*[Abort(AttemptId("router.1", counter), "client_gone") for counter in (1, 2, 3, 4)])
    assert ring.actor.idle
    ring.answer(1)
    ring.answer(1, process=1)
    ring.send(request(4), request(5, prompt=IdsPrompt(int32s([5]))))
    assert [generate.attempt.counter for generate in ring.at_compute] == [5]
    assert not ring.at_router
    assert all(len(process.jobs) == 1 for process in ring.processes.started)


async def test_choices_that_were_aborted_do_not_reach_compute() -> None:
    ring = await Ring().start()
    ring.send(request(10, num_choices=4, first_choice=2))
    ring.send(Abort(AttemptId("router.1", 11), "client_gone"))
    ring.answer(1, 2)
    assert [(g.attempt.counter, g.num_choices, g.first_choice) for g in ring.at_compute] == [
        (10, 1, 2),
        (12, 2, 4),
    ]


async def test_more_than_fits_is_refused_for_another_replica_and_reading_goes_on() -> None:
    ring = await Ring(max_pending_requests=2).start()
    ring.send(*[request(counter) for counter in (1, 2, 3)])
    refused = ring.refusal()
    assert refused.attempt.counter == 3
    assert (refused.failure.code, refused.failure.retryable) == ("overloaded", True)
    ring.answer(1)
    ring.send(request(4))
    assert len(ring.at_router) == 1, "there is room again"


async def test_prompts_are_bounded_in_bytes_together_and_alone() -> None:
    ring = await Ring(max_pending_bytes=10, max_prompt_bytes=8).start()
    ring.send(request(1, prompt=TextPrompt("12345678")), request(2, prompt=TextPrompt("123")))
    assert ring.refusal().failure.code == "overloaded"
    ring.send(request(3, prompt=TextPrompt("123456789")))
    failure = ring.refusal().failure
    assert (failure.status, failure.code, failure.retryable) == (413, "prompt_too_large", False)


async def test_a_router_that_falls_silent_loses_its_requests() -> None:
    ring = await Ring().start()
    ring.send(request(1), request(2))
    ring.exchange.delay("tokenizer")
    for _ in range(25):
        ring.pass_time(0.1)
    assert ring.actor.idle
    ring.answer(1)
    assert not ring.at_compute


async def test_a_router_that_answers_keeps_its_requests() -> None:
    ring = await Ring().start()
    ring.send(request(1))
    for _ in range(40):
        ring.pass_time(0.1)
        if ring.beats():
            ring.send(RouterAlive(address("router"), ring.beats()[-1].beat))
    assert not ring.actor.idle and ring.actor.ready


async def test_a_router_that_accepts_no_messages_loses_its_requests() -> None:
    ring = await Ring().start()
    ring.send(request(1), request(2))
    ring.actor.peer_lost(address("router"))
    assert ring.actor.idle


async def test_a_named_router_that_is_not_there_costs_the_others_nothing() -> None:
    """Its heartbeats, to whichever instance comes, stay in their outbox and are given up."""
    ring = await Ring().start()
    ring.send(request(1))
    ring.actor.peer_lost(Address("mem://router2", ""))
    assert not ring.actor.idle
    ring.answer(1)
    assert ring.at_compute


async def test_heartbeats_say_what_is_open_and_how_busy_it_is() -> None:
    ring = await Ring(max_pending_requests=9).start()
    ring.send(request(1), request(5, num_choices=2), request(8))
    ring.send(TokenizeQuery(AttemptId("router.1", 20), address("router"), TextPrompt("x")))
    ring.pass_time(0.1)
    ring.send(RouterAlive(address("router"), ring.beats()[-1].beat))
    ring.pass_time(0.6)
    beat = ring.beats()[-1]
    assert (beat.service, beat.model, beat.draining) == ("tokenizer", CARD, False)
    assert beat.open_counters == array("q", [1, 5, 6, 8])
    assert (beat.load.num_running, beat.load.num_waiting, beat.load.capacity) == (2, 2, 9)
    assert beat.stall_after_s > 35, "one prompt may take that long"
    ring.answer(1)
    ring.send(RouterAlive(address("router"), beat.beat))
    ring.pass_time(0.6)
    assert ring.beats()[-1].progress > beat.progress


async def test_draining_takes_what_is_on_its_way_and_finishes_all() -> None:
    ring = await Ring().start()
    ring.send(request(1))
    ring.actor.drain()
    ring.send(request(2))
    for process in range(2):
        assert not ring.actor.drained
        ring.answer(1, process=process)
    assert len(ring.at_compute) == 2 and ring.actor.drained


async def test_stopping_hands_back_what_is_unfinished() -> None:
    ring = await Ring().start()
    ring.send(request(1, num_choices=2))
    stopping = asyncio.ensure_future(ring.actor.stop())
    await asyncio.sleep(0)
    ring.exchange.deliver()
    assert ring.refusal().num_choices == 2 and ring.refusal().failure.retryable
    for process in ring.processes.started:
        process.die()
    await stopping
    assert ring.actor.idle


async def test_a_generate_that_no_link_can_carry_is_refused() -> None:
    ring = await Ring().start()
    ring.send(request(1))
    ring.exchange.max_message_bytes = 300
    ring.answer(*range(100))
    failure = ring.refusal().failure
    assert (failure.status, failure.code) == (413, "prompt_too_large")
    assert ring.actor.idle


async def test_the_log_names_the_request_whose_process_died_or_whose_answer_was_not_sent() -> None:
    ring = await Ring().start()
    ring.send(request(4, traceparent=PARENT))
    with structlog.testing.capture_logs() as lines:
        ring.processes.started[0].die()
        ring.exchange.max_message_bytes = 10
        ring.processes.started[1].die()
        ring.pass_time(0.0)
    lines = [line for line in lines if "attempt" in line]
    assert [line["event"] for line in lines] == ["tokenizer process ended"] * 2 + [
        "message not sent"
    ]
    for line in lines:
        assert line["attempt"] == f"{ring.router.address.instance_id[:8]}:4"
        assert line["trace_id"] == PARENT[3:35]


async def test_the_same_request_twice_is_worked_on_once() -> None:
    ring = await Ring().start()
    ring.send(request(1), request(1))
    ring.answer(1)
    assert len(ring.at_compute) == 1 and len(ring.processes.busy()) == 1
    assert not ring.at_router


async def test_messages_that_do_not_parse_do_no_harm() -> None:
    ring = await Ring().start()
    ring.exchange.inject("tokenizer", [b"\xc1 nonsense"])
    ring.exchange.inject("tokenizer", [])
    ring.send(request(1, prompt=IdsPrompt(int32s([3]))))
    assert len(ring.at_compute) == 1


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[ReadableSpan]:
    """Spans that ended, while this process's traces are on."""
    ended: list[ReadableSpan] = []

    class Keep(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            ended.append(span)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Keep())
    monkeypatch.setattr(trace._process, "tracer", provider.get_tracer("test"))
    return ended


async def test_a_request_has_one_span_and_the_next_stage_its_context(
    spans: list[ReadableSpan],
) -> None:
    ring = await Ring().start()
    ring.send(request(1, traceparent=PARENT))
    assert not spans
    ring.answer(1, 2, 3)
    (span,) = spans
    context, parent = span.get_span_context(), span.parent
    assert span.name == "tokenize" and context is not None and parent is not None
    assert f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01" == PARENT
    (generate,) = ring.at_compute
    assert generate.traceparent == f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    assert unpack(StreamHeader, generate.header).traceparent == generate.traceparent
    assert (span.attributes or {})["gen_ai.usage.input_tokens"] == 3


async def test_a_refused_request_says_why_in_its_span(spans: list[ReadableSpan]) -> None:
    ring = await Ring().start()
    ring.send(request(1, prompt=IdsPrompt(int32s())))
    (span,) = spans
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "empty_prompt"


async def test_aborts_and_lost_routers_leave_no_span_open(spans: list[ReadableSpan]) -> None:
    ring = await Ring().start()
    ring.send(request(1), request(2), request(2))
    ring.send(Abort(AttemptId("router.1", 1), "client_gone"))
    ring.actor.peer_lost(address("router"))
    assert len(spans) == 3
