"""What can never run is refused on arrival, with a terminal for each choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.messages.failure import Failure
from common.messages.generate import Generate
from common.messages.sampling import GrammarSpec
from services.compute.scheduler.state import SchedulerSettings
from services.compute.step import MAX_STOP_IDS
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.fake_texts import EOS
from tests.unit.compute.scheduler_loop import Loop, make_request


def failure_of(loop: Loop, request: Generate) -> Failure:
    """Add a request that must be refused; return why it was."""
    loop.add(request)
    loop.hear()
    ending = loop.streams[request.attempt.counter].ending
    assert ending is not None
    assert ending.reason == "refused"
    assert ending.failure is not None
    assert not loop.scheduler.open_attempts("router")
    return ending.failure


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (make_request(0, prompt=()), "prompt"),
        (make_request(0, prompt=(2, 32)), "prompt"),
        (make_request(0, prompt=(2, -1)), "prompt"),
        (make_request(0, output_ids=(40,)), "output_ids"),
        (make_request(0, stop_token_ids=(99,)), "stop_token_ids"),
        (make_request(0, logit_bias=((99, 1.0),)), "logit_bias"),
        (make_request(0, logit_bias=((1 << 63, 1.0),)), "logit_bias"),
        (make_request(0, stop_token_ids=tuple(range(2, 1026))), "stop_token_ids"),
        (make_request(0, logit_bias=tuple((t, 1.0) for t in range(1025))), "logit_bias"),
        (make_request(0, max_tokens=0), "max_tokens"),
        (make_request(0, num_prompt_logprobs=21), "prompt_logprobs"),
        (make_request(0, num_choices=2000), "n"),
        (replace(make_request(0), num_choices=0), "n"),
        (make_request(0, grammar_spec=GrammarSpec(allowed_token_ids=(3, 32))), "allowed_token_ids"),
        (make_request(0, grammar_spec=GrammarSpec(allowed_token_ids=(-1,))), "allowed_token_ids"),
        (
            make_request(0, grammar_spec=GrammarSpec(banned_sequences=((3, 4), (5, 99)))),
            "bad_words",
        ),
    ],
)
def test_what_router_or_tokenizer_should_have_refused_is_an_internal_error(
    request_: Generate, field: str
) -> None:
    failure = failure_of(Loop(make_spec()), request_)
    assert (failure.status, failure.code) == (500, "internal_error")
    assert failure.message == f"A request came to compute with a wrong {field}."
    assert not failure.retryable


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (make_request(0, max_tokens=252), "context_length_exceeded", "max_tokens"),
        (make_request(0, prompt=(2,) * 256, max_tokens=1), "context_length_exceeded", "prompt"),
        (
            make_request(0, grammar_spec=GrammarSpec(banned_sequences=((3,) * 20_000,))),
            "bad_words_too_long",
            "bad_words",
        ),
    ],
)
def test_a_request_that_only_compute_can_judge_is_refused_with_the_field_at_fault(
    request_: Generate, code: str, field: str
) -> None:
    failure = failure_of(Loop(make_spec()), request_)
    assert (failure.status, failure.code, failure.field) == (400, code, field)
    assert not failure.retryable


def test_a_grammar_needs_a_token_that_ends_its_text() -> None:
    grammar_spec = GrammarSpec("start: /a/", field="tools")
    loop = Loop(replace(make_spec(), eos_token_ids=()))
    failure = failure_of(loop, make_request(0, grammar_spec=grammar_spec, ignore_eos=False))
    assert (failure.code, failure.field) == ("grammar_unsupported", "tools")
    fields = {"grammar_spec": grammar_spec, "ignore_eos": False}
    loop.add(make_request(1, stop_token_ids=(3,), **fields))
    assert loop.scheduler.open_attempts("router") == [1]


def test_a_request_that_memory_can_never_hold_is_refused() -> None:
    loop = Loop(make_spec(num_pages=4))
    failure = failure_of(loop, make_request(0, max_tokens=13))
    assert (failure.status, failure.code) == (400, "context_length_exceeded")
    loop.add(make_request(1, max_tokens=12))  # its last token needs no place: 16 positions
    loop.run()
    loop.check_finished()


def test_every_choice_of_a_refused_request_has_its_terminal() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, prompt=(), num_choices=3))
    events = loop.hear()
    assert [event.attempt.counter for event in events] == [0, 1, 2]
    assert all(event.ending and event.ending.reason == "refused" for event in events)


def test_a_full_line_refuses_with_a_failure_that_can_be_retried_elsewhere() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_waiting=3, max_num_seqs=1))
    loop.add(make_request(0))
    loop.step()
    loop.add(make_request(1, num_choices=3))
    loop.add(make_request(10))
    events = loop.hear()
    ending = loop.streams[10].ending
    assert ending is not None
    assert ending.failure is not None
    assert (ending.failure.status, ending.failure.code) == (503, "overloaded")
    assert ending.failure.retryable
    assert events[-1].opened
    loop.run()
    loop.check_finished()


def test_an_empty_line_takes_any_number_of_choices() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_waiting=2))
    loop.add(make_request(0, num_choices=5))
    loop.run()
    loop.check_finished()
    assert len(loop.streams[4].tokens) == 8


def test_the_models_own_ends_count_among_the_stop_ids_that_there_is_room_for() -> None:
    loop = Loop(make_spec(vocab_size=2000))
    stop_ids = tuple(range(2, 2 + MAX_STOP_IDS))
    for counter, more in enumerate(
        [{"ignore_eos": True}, {"stop_token_ids": (EOS, *stop_ids[1:]), "ignore_eos": False}]
    ):
        loop.add(make_request(counter, max_tokens=1, **{"stop_token_ids": stop_ids, **more}))
    loop.run()
    assert all(s.ending and s.ending.reason != "refused" for s in loop.streams.values())
    failure = failure_of(loop, make_request(2, stop_token_ids=stop_ids, ignore_eos=False))
    assert failure.message == "A request came to compute with a wrong stop_token_ids."
