"""What goes to the processes and back survives its frame."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.child_main import HEADER, framed
from common.errors import MalformedMessage
from common.link.codec import pack, unpack
from common.messages.arrays import int32s
from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec
from common.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    OutputRules,
    Structure,
    TextPrompt,
    ToolUse,
)
from common.tokenized import ExpectedAnswer
from services.tokenizer.jobs import (
    Job,
    Outcome,
    pack_outcome,
    size_of,
    unpack_outcome,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
IDS = st.lists(st.integers(-(2**31), 2**31 - 1)).map(int32s)
PROMPTS = st.one_of(
    st.builds(ChatPrompt, st.binary(), st.binary(), st.booleans(), st.booleans(), st.binary()),
    st.builds(TextPrompt, TEXT, st.booleans()),
    st.builds(IdsPrompt, IDS),
)
FAILURES = st.builds(Failure, st.integers(400, 599), TEXT, TEXT, st.none() | TEXT, st.just(False))
NUMBERS = st.lists(st.integers(0, 2**31 - 1)).map(tuple)
RULES = st.builds(
    OutputRules,
    st.none() | st.builds(Structure, st.sampled_from(["regex", "json_object"]), TEXT, TEXT),
    st.none() | st.builds(ToolUse, st.sampled_from(["auto", "named"]), TEXT, st.booleans()),
    st.integers(-1, 10_000),
    NUMBERS,
    st.lists(TEXT).map(tuple),
)
GRAMMAR_SPEC = st.builds(GrammarSpec, TEXT, NUMBERS, st.lists(NUMBERS).map(tuple), TEXT)
ANSWERS = st.builds(ExpectedAnswer, st.none() | GRAMMAR_SPEC, TEXT, TEXT, st.booleans())
OUTCOMES = st.builds(
    Outcome, IDS, st.lists(TEXT).map(tuple), st.none() | FAILURES, st.booleans(), ANSWERS
)


@given(st.builds(Job, PROMPTS, st.floats(allow_nan=False), st.booleans(), RULES))
def test_a_job_survives_its_frame(job: Job) -> None:
    frame = framed(pack(job))
    assert HEADER.unpack(frame[: HEADER.size])[0] == len(frame) - HEADER.size
    assert unpack(Job, frame[HEADER.size :]) == job


@given(OUTCOMES)
def test_an_outcome_survives_its_frame(outcome: Outcome) -> None:
    report = msgpack.unpackb(pack_outcome(outcome)[HEADER.size :])
    assert unpack_outcome(report) == outcome


def test_a_text_that_is_not_unicode_cannot_be_packed() -> None:
    with pytest.raises(MalformedMessage):
        pack(Job(TextPrompt("\ud800"), 0.0))


def test_sizes_are_bytes() -> None:
    assert size_of(TextPrompt("abc")) == 3
    assert size_of(TextPrompt("é🎉\ud800")) == 9
    assert size_of(IdsPrompt(int32s([1, 2]))) == 8
    assert size_of(ChatPrompt(b"12", b"345", template_kwargs_json=b"6")) == 6


def test_templates_and_clients_rules_are_confined() -> None:
    assert Job(ChatPrompt(b"[]"), 0.0).is_confined
    assert Job(TextPrompt("x"), 0.0, rules=OutputRules(bad_words=("x",))).is_confined
    assert not Job(TextPrompt("x"), 0.0).is_confined
