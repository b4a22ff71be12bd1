"""Reasoning before an answer: it may come where the prompt lets it, and no longer than it may."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat_formats import REASONING_FORMATS
from common.messages.sampling import GrammarSpec
from common.messages.tokenize import OutputRules, Structure
from services.tokenizer.answer_grammar import compose, stage_of
from services.tokenizer.jobs import ReasoningStage, TemplateFormat
from tests.unit.tokenizer.walks import Model, model

DIGITS = Structure("regex", "[0-9]+", "structured_outputs.regex")
THINK = REASONING_FORMATS["think"]
EVERY_MODEL = pytest.mark.parametrize("kind", ["tokens", "text"])


def grammar_spec(
    subject: Model,
    stage: ReasoningStage,
    budget: int = -1,
    structure: Structure | None = DIGITS,
    reasoning: str = "think",
) -> GrammarSpec | None:
    rules = OutputRules(structure=structure, thinking_budget=budget)
    return compose(rules, [], TemplateFormat("", reasoning, stage), subject.vocabulary)


@EVERY_MODEL
def test_an_open_thought_is_ended_before_the_answer(kind: str) -> None:
    subject = model(kind)
    rules = grammar_spec(subject, "inside")
    for thoughts in ("", "so\n", "1 < 2, </b> and </thin", "<think>again"):
        for breaks in ("", "\n", "\n\n"):
            assert subject.takes(rules, f"{thoughts}</think>{breaks}42"), thoughts
    for wrong in ("42", "so", "so</think>", "so</think>x", "so</think>42</think>"):
        assert not subject.takes(rules, wrong)


def test_the_first_tag_ends_the_thought_in_however_many_tokens() -> None:
    subject = model("tokens")
    rules = grammar_spec(subject, "inside")
    assert rules is not None
    spelled = [token for letter in "</think>" for token in subject.ids(letter)]
    so = subject.ids("so ")
    assert subject.takes_ids(rules, so + spelled + subject.ids("42"))
    assert not subject.takes_ids(rules, so + spelled + so + subject.ids("</think>42"))


@EVERY_MODEL
def test_a_model_that_has_not_begun_may_think_or_not(kind: str) -> None:
    subject = model(kind)
    rules = grammar_spec(subject, "before")
    for right in ("42", "<think>so</think>42", "<think>\nso\n</think>\n\n42"):
        assert subject.takes(rules, right)
    for wrong in ("so</think>42", "<think>42", "<think>so</think>x", "</think>42"):
        assert not subject.takes(rules, wrong)


@EVERY_MODEL
def test_behind_its_reasoning_a_model_answers(kind: str) -> None:
    subject = model(kind)
    rules = grammar_spec(subject, "behind")
    assert subject.takes(rules, "42")
    assert not subject.takes(rules, "<think>so</think>42")
    assert grammar_spec(subject, "behind", budget=5, structure=None) is None


@EVERY_MODEL
@pytest.mark.parametrize("structure", [DIGITS, None])
def test_a_budget_bounds_the_tokens_of_an_open_thought(
    structure: Structure | None, kind: str
) -> None:
    subject = model(kind)
    answer = "42"
    for budget in (1, 5, 40):
        rules = grammar_spec(subject, "inside", budget, structure)
        assert rules is not None
        letter, end = subject.ids("x"), subject.ids("</think>" + answer)
        assert subject.takes_ids(rules, letter * budget + end)
        assert not subject.takes_ids(rules, letter * (budget + 1) + end)
        assert subject.takes_ids(rules, end)
        assert not subject.takes_ids(rules, letter)


@EVERY_MODEL
@pytest.mark.parametrize("structure", [DIGITS, None])
def test_a_budget_bounds_thoughts_that_the_model_begins(
    structure: Structure | None, kind: str
) -> None:
    subject = model(kind)
    rules = grammar_spec(subject, "before", 3, structure)
    assert rules is not None
    begin, letter, end = subject.ids("<think>"), subject.ids("x"), subject.ids("</think>42")
    assert subject.takes_ids(rules, begin + letter * 3 + end)
    assert not subject.takes_ids(rules, begin + letter * 4 + end)
    assert subject.takes_ids(rules, subject.ids("42"))
    assert subject.takes_ids(rules, subject.ids("4 or 2")) == (structure is None)


@EVERY_MODEL
def test_no_budget_means_no_thoughts(kind: str) -> None:
    subject = model(kind)
    inside = grammar_spec(subject, "inside", 0)
    assert subject.takes(inside, "</think>42") and not subject.takes(inside, "x</think>42")
    before = grammar_spec(subject, "before", 0)
    assert subject.takes(before, "42") and not subject.takes(before, "<think></think>42")
    free = grammar_spec(subject, "before", 0, None)
    assert subject.takes(free, "<think>\n\n</think>\n\nHi!") and not subject.takes(free, "Hi!")


@EVERY_MODEL
def test_without_a_bound_free_text_needs_no_grammar(kind: str) -> None:
    for stage in ("inside", "before", "behind"):
        assert grammar_spec(model(kind), stage, structure=None) is None
    assert grammar_spec(model(kind), "before", 7, None, reasoning="") is None


@pytest.mark.parametrize("name", REASONING_FORMATS)
@EVERY_MODEL
def test_every_format_is_bounded_by_its_own_tags(name: str, kind: str) -> None:
    subject = model(kind)
    markers = REASONING_FORMATS[name]
    for budget in (-1, 6):
        rules = grammar_spec(subject, "before", budget, reasoning=name)
        thoughts, answer = f"{markers.begin}so{markers.end}{markers.next}", markers.answer
        assert subject.takes(rules, f"{thoughts}{answer}42")
        assert not subject.takes(rules, f"{thoughts}{answer}x")
        assert subject.takes(rules, f"{answer}42")


def test_a_budget_bounds_harmonys_analysis() -> None:
    subject = model()
    thought = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    answers = (
        "<|channel|>final<|message|>Hi!",
        "<|channel|>commentary to=functions.f<|message|>{}",
    )
    for answer in answers:
        three = grammar_spec(subject, "before", 3, None, "harmony")
        assert subject.takes(three, thought.format("xxx") + answer)
        assert subject.takes(three, answer)
        assert not subject.takes(three, thought.format("xxxx") + answer)
        none = grammar_spec(subject, "before", 0, None, "harmony")
        assert subject.takes(none, answer)
        assert not subject.takes(none, thought.format("") + answer)
        inside = grammar_spec(subject, "inside", 3, None, "harmony")
        assert subject.takes(inside, f"xxx<|end|><|start|>assistant{answer}")
        assert not subject.takes(inside, f"xxxx<|end|><|start|>assistant{answer}")


@given(
    kind=st.sampled_from(["tokens", "text"]),
    stage=st.sampled_from(["inside", "before"]),
    budget=st.integers(-1, 12),
    seed=st.integers(0, 2**32),
    num_free=st.integers(0, 40),
)
@settings(deadline=None)
def test_whatever_obeys_the_masks_ends_in_an_answer(
    kind: str, stage: ReasoningStage, budget: int, seed: int, num_free: int
) -> None:
    subject = model(kind)
    rules = grammar_spec(subject, stage, budget)
    assert rules is not None
    text = subject.walk(rules, Random(seed), num_free)
    if text is not None:
        answer = text.partition("</think>")[2] if "</think>" in text else text
        assert answer.lstrip("\n").isdigit()


@pytest.mark.parametrize(
    ("end", "continued", "stage"),
    [
        ("<|assistant|>", None, "before"),
        ("<|assistant|><think>", None, "inside"),
        ("<|assistant|><think>\n", None, "inside"),
        ("<|assistant|><think>\n\n</think>\n\n", None, "behind"),
        ("<|assistant|></think>", None, "behind"),
        ("tell me about <think> and </think>.<|assistant|>", None, "before"),
        ("<think>\nI was", "<think>\nI was", "inside"),
        ("<think>\nI was\n</think>\n\nThe", "<think>\nI was\n</think>\n\nThe", "behind"),
        ("The answer is", "The answer is", "behind"),
        ("<|assistant|>", "", "before"),
    ],
)
def test_the_stage_is_where_the_prompt_ends(
    end: str, continued: str | None, stage: ReasoningStage
) -> None:
    assert stage_of(f"<|user|>Hi<think>{end}", THINK, continued) == stage
