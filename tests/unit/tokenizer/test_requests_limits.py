"""Requests are fitted into the model's limits, or refused with the numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.arrays import int32s
from common.messages.failure import Failure
from common.messages.sampling import SamplingParams
from common.messages.tokenize import OutputRules, Structure, TokenLimits
from services.tokenizer.jobs import TextBound
from services.tokenizer.requests import (
    check_ids,
    check_prompt_len,
    check_rules,
    resolve_max_tokens,
    text_bound,
    truncated,
)
from tests.unit.tokenizer.requests import request

LIMITS = TokenLimits(max_model_len=100, max_input_length=90, max_output_length=50, vocab_size=1000)


def sampling(max_tokens: int, min_tokens: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=1, min_tokens=min_tokens)


def refused(prompt_len: int, max_tokens: int, limits: TokenLimits = LIMITS) -> Failure:
    result = resolve_max_tokens(sampling(max_tokens), limits, prompt_len, "messages")
    assert isinstance(result, Failure)
    assert result.status == 400 and not result.retryable
    return result


def test_a_prompt_that_is_too_long_comes_with_its_numbers() -> None:
    assert (refused(95, 0).prompt_tokens, refused(95, 0).most_prompt_tokens) == (95, 90)
    unbounded = replace(LIMITS, max_input_length=0)
    full = refused(100, 0, unbounded)
    assert (full.prompt_tokens, full.most_prompt_tokens) == (100, 99)


def max_tokens_of(prompt_len: int, limits: TokenLimits = LIMITS) -> int:
    result = resolve_max_tokens(sampling(0), limits, prompt_len, "messages")
    assert isinstance(result, SamplingParams)
    return result.max_tokens


def test_no_max_tokens_means_as_much_as_fits() -> None:
    assert max_tokens_of(10) == 50, "the output limit"
    assert max_tokens_of(70) == 30, "what the context leaves"


def test_min_tokens_never_exceed_what_fits() -> None:
    result = resolve_max_tokens(sampling(0, min_tokens=99), LIMITS, 70, "prompt")
    assert isinstance(result, SamplingParams)
    assert (result.max_tokens, result.min_tokens) == (30, 30)


def test_the_usual_sixteen_shrink_to_what_the_context_leaves() -> None:
    usual = replace(LIMITS, max_output_length=16)  # as the router says it for completions
    assert max_tokens_of(10, usual) == 16
    assert max_tokens_of(89, usual) == 11
    result = resolve_max_tokens(sampling(0, min_tokens=16), usual, 89, "prompt")
    assert isinstance(result, SamplingParams)
    assert (result.max_tokens, result.min_tokens) == (11, 11)


def test_a_request_that_just_fits_passes_unchanged() -> None:
    wanted = sampling(20)
    assert resolve_max_tokens(wanted, LIMITS, 80, "prompt") is wanted


@pytest.mark.parametrize(
    ("prompt_len", "wanted", "kept"), [(80, 21, 20), (80, 2**31 - 1, 20), (10, 51, 50)]
)
def test_max_tokens_beyond_what_fits_become_what_fits(
    prompt_len: int, wanted: int, kept: int
) -> None:
    result = resolve_max_tokens(sampling(wanted, min_tokens=wanted), LIMITS, prompt_len, "prompt")
    assert isinstance(result, SamplingParams)
    assert (result.max_tokens, result.min_tokens) == (kept, kept)


def test_a_prompt_over_the_context_is_told_the_numbers() -> None:
    failure = refused(100, 21, replace(LIMITS, max_input_length=0))
    assert failure.code == "context_length_exceeded" and failure.field == "messages"
    assert "100 tokens" in failure.message and "leaves none" in failure.message


def test_a_prompt_over_the_input_limit_is_refused() -> None:
    failure = refused(91, 1)
    assert failure.code == "context_length_exceeded" and "90" in failure.message


def test_a_prompt_that_fills_the_context_is_refused_even_without_max_tokens() -> None:
    failure = refused(100, 0, replace(LIMITS, max_input_length=0))
    assert failure.code == "context_length_exceeded"


def test_an_empty_prompt_is_refused() -> None:
    failure = check_ids(int32s(), 10, "prompt")
    assert failure is not None and failure.status == 400 and failure.field == "prompt"


def test_ids_outside_the_vocabulary_are_named_with_their_place() -> None:
    for ids, culprit in (([1, 2, 10], "10 at position 2"), ([-1, 3], "-1 at position 0")):
        failure = check_ids(int32s(ids), 10, "prompt[1]")
        assert failure is not None and failure.field == "prompt[1]"
        assert culprit in failure.message and "0 to 9" in failure.message


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1), st.integers(1, 2**31 - 1))
def test_ids_pass_exactly_when_they_are_in_range(ids: list[int], vocab_size: int) -> None:
    passed = check_ids(int32s(ids), vocab_size, "prompt") is None
    assert passed == all(0 <= token_id < vocab_size for token_id in ids)


@given(
    prompt_len=st.integers(1, 300),
    max_tokens=st.integers(0, 300),
    model=st.integers(0, 200),
    longest_input=st.integers(0, 200),
    longest_output=st.integers(1, 200),
)
def test_what_passes_fits_every_limit(
    prompt_len: int, max_tokens: int, model: int, longest_input: int, longest_output: int
) -> None:
    limits = TokenLimits(model, longest_input, longest_output, vocab_size=10)
    result = resolve_max_tokens(sampling(max_tokens), limits, prompt_len, "prompt")
    if isinstance(result, Failure):
        return
    assert 1 <= result.max_tokens <= longest_output
    assert max_tokens == 0 or result.max_tokens <= max_tokens
    assert not model or prompt_len + result.max_tokens <= model
    assert not longest_input or prompt_len <= longest_input


def test_what_is_over_is_cut_off_at_one_side() -> None:
    ids = int32s(range(5))
    assert truncated(ids, 2, "left") == int32s([3, 4])
    assert truncated(ids, 2, "right") == int32s([0, 1])
    for enough in (0, 5, 6):
        assert truncated(ids, enough, "left") is ids


def test_a_structure_is_bounded_before_it_is_read() -> None:
    rules = OutputRules(structure=Structure("regex", "a" * 101, "structured_outputs.regex"))
    failure = check_rules(rules, 100)
    assert failure is not None and failure.field == "structured_outputs.regex"
    assert "101" in failure.message and check_rules(rules, 101) is None


def test_a_prompt_that_is_only_read_may_fill_the_context() -> None:
    limits = replace(LIMITS, max_input_length=0)
    assert check_prompt_len(limits, 100, "input") is None
    failure = check_prompt_len(limits, 101, "input")
    assert failure is not None and "101" in failure.message and failure.field == "input"


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, TextBound(90, 32)),
        ({"limits": replace(LIMITS, max_input_length=0)}, TextBound(99, 32)),
        ({"limits": replace(LIMITS, max_input_length=0), "pooling": True}, TextBound(100, 32)),
        ({"limits": TokenLimits(0, 0, 0, 1000)}, TextBound(0, 32)),
        ({"truncate_to": 90}, TextBound(90, 32, "left")),
        ({"truncate_to": 5, "truncate_side": "right"}, TextBound(5, 32, "right")),
        ({"truncate_to": 91}, TextBound(90, 32)),  # what is cut to that is too long all the same
        ({"truncate_to": 5, "limits": TokenLimits(0, 0, 0, 1000)}, TextBound(5, 32, "left")),
    ],
)
def test_as_much_text_is_encoded_as_a_prompt_may_have(
    changes: dict[str, object], bound: TextBound
) -> None:
    assert text_bound(request(1, **{"limits": LIMITS, **changes}), 32) == bound


@given(st.integers(1, 200), st.integers(0, 300), st.sampled_from(["", "left", "right"]))
def test_no_text_is_refused_or_cut_that_could_be_short_enough(
    most: int, length: int, side: Literal["left", "right", ""]
) -> None:
    bound, text = TextBound(most, 3, side), "".join(chr(at) for at in range(length))
    failure, cut = bound.refusal(text), bound.cut(text)
    if length <= 3 * most:
        assert failure is None and cut == text
    elif side:
        assert failure is None and len(cut) == 3 * most
        assert cut == (text[-len(cut) :] if side == "left" else text[: len(cut)])
    else:
        assert failure is not None and failure.prompt_tokens > most
        assert (failure.status, failure.code) == (400, "context_length_exceeded")
        assert failure.most_prompt_tokens == most


def test_without_a_bound_all_is_encoded() -> None:
    for bound in (TextBound(0, 32), TextBound(100, 0), TextBound()):
        assert bound.refusal("a" * 10_000) is None
        assert bound.cut("a" * 10_000) == "a" * 10_000
