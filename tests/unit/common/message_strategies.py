"""Hypothesis strategies for every message, made from the messages' own type hints."""

from __future__ import annotations

import dataclasses
import types
import typing
from array import array
from collections.abc import Sequence
from typing import Any, Literal, Union

from hypothesis import strategies as st

from common.messages.address import AttemptId
from common.messages.arrays import MAX_CHOICES, MAX_COUNTER
from common.messages.experts import ExpertLoad
from common.messages.failure import Ending, EndReason, Failure, Usage
from common.messages.generate import ComputeInbox
from common.messages.logprobs import Logprobs, PromptLogprobs
from common.messages.queries import Track, TrackArg
from common.messages.text import RouterInbox, TextGenerated
from common.messages.tokenize import TokenizerInbox
from common.messages.tokens import DetokenizerInbox, TokenLogprobs, TokensGenerated

INBOXES = (TokenizerInbox, ComputeInbox, DetokenizerInbox, RouterInbox)

int64 = st.integers(-(1 << 63), (1 << 63) - 1)
int32 = st.integers(-(1 << 31), (1 << 31) - 1)
token_ids = st.integers(0, (1 << 31) - 1)
counters = st.integers(0, MAX_COUNTER - 1)
attempts = st.builds(AttemptId, st.sampled_from(["r1", "r2", "né"]), counters)
float32 = st.floats(width=32, allow_nan=False)
logprob_values = st.floats(max_value=0.0, width=32, allow_nan=False)
usages = st.builds(Usage, int64, int64, int64)
reasons = st.sampled_from(typing.get_args(EndReason))

_COLUMNS = {
    "i": int32,
    "q": int64,
    "I": st.integers(0, (1 << 32) - 1),
    "Q": st.integers(0, (1 << 64) - 1),
    "f": float32,
    "d": st.floats(allow_nan=False),
}
_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: int64,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=10).map(lambda data: 4 * data),  # packed integers, too
    bool: st.booleans(),
    type(None): st.none(),
}


wire_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=12),
    max_leaves=20,
)
"""Whatever a list in a message may hold, right or wrong."""


@st.composite
def logprobs_of(draw: st.DrawFn, num_tokens: int) -> Logprobs:
    logprobs = Logprobs()
    for _ in range(num_tokens):
        ids = draw(st.lists(token_ids, min_size=1, max_size=3))
        values = st.lists(logprob_values, min_size=len(ids), max_size=len(ids))
        logprobs.add(ids, draw(values), draw(st.integers(0, 1 << 20)))
    names = draw(st.lists(st.binary(max_size=4), min_size=1, max_size=3))
    logprobs.name(lambda token_id: names[token_id % len(names)])
    return logprobs


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    first = draw(st.integers(1, 1 << 20))
    return PromptLogprobs(draw(int64), first, draw(logprobs_of(draw(st.integers(0, 3)))))


@st.composite
def token_messages(draw: st.DrawFn) -> TokensGenerated:
    rows = TokensGenerated(draw(int64))
    for attempt in draw(st.lists(attempts, max_size=6, unique=True)):
        ids = draw(st.lists(token_ids, max_size=4))
        num_top = draw(st.integers(-1, 3))
        scores = [
            TokenLogprobs(
                draw(logprob_values),
                tuple(draw(st.lists(token_ids, min_size=num_top, max_size=num_top))),
                tuple(draw(st.lists(logprob_values, min_size=num_top, max_size=num_top))),
            )
            for _ in ids
            if num_top >= 0
        ]
        header = draw(st.none() | st.binary(max_size=8))
        rows.add(attempt, draw(st.integers(0, 1 << 20)), ids, scores, header)
        if draw(st.booleans()):
            rows.end(b"h", Ending(draw(reasons), draw(usages), draw(st.none() | token_ids)))
        elif draw(st.booleans()):
            rows.draft(draw(st.integers(0, 1 << 20)), draw(st.integers(0, 1 << 20)))
    return rows


@st.composite
def text_messages(draw: st.DrawFn) -> TextGenerated:
    rows = TextGenerated()
    for counter in draw(st.lists(counters, max_size=6, unique=True)):
        ids = draw(st.lists(token_ids, max_size=4))
        logprobs = draw(st.none() | logprobs_of(len(ids)))
        text = draw(st.text(max_size=10))
        rows.add(counter, draw(st.integers(0, 1 << 20)), ids, text, logprobs)
        if draw(st.booleans()):
            failure = draw(st.none() | st.builds(Failure, int64, st.text(), st.text()))
            stop = draw(st.none() | st.text() | int64)
            rows.end(Ending(draw(reasons), draw(usages), stop, failure))
    return rows


@st.composite
def tracks(draw: st.DrawFn) -> Track:
    length = draw(st.integers(0, 4))
    numbers = st.floats(allow_nan=False)
    columns = st.lists(numbers, min_size=length, max_size=length).map(lambda n: array("d", n))
    args = draw(st.lists(st.builds(TrackArg, st.text(max_size=4), columns), max_size=2))
    return Track(draw(st.text(max_size=4)), "step", draw(columns), draw(columns), tuple(args))


@st.composite
def expert_loads(draw: st.DrawFn) -> ExpertLoad:
    layers = draw(st.lists(_COLUMNS["I"], min_size=1, max_size=3))
    num_tokens = len(layers) * draw(st.integers(1, 4))
    tokens = draw(st.lists(_COLUMNS["Q"], min_size=num_tokens, max_size=num_tokens))
    return ExpertLoad(array("I", layers), array("Q", tokens))


_SPECIAL: dict[Any, st.SearchStrategy[Any]] = {
    AttemptId: attempts,
    TokensGenerated: token_messages(),
    TextGenerated: text_messages(),
    Track: tracks(),
    PromptLogprobs: prompt_logprobs(),
    ExpertLoad: expert_loads(),
}


def members(inbox: Any) -> tuple[Any, ...]:
    return typing.get_args(inbox)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a type that messages use."""
    if hint in _SPECIAL:
        return _SPECIAL[hint]
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        kind, code = arguments
        columns = st.lists(_COLUMNS[code], max_size=5).map(lambda items: array(code, items))
        return columns.map(array.tobytes) if kind is bytes else columns
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return st.lists(values_of(arguments[0]), max_size=3).map(origin)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    hints = typing.get_type_hints(hint, localns={"array": Sequence}, include_extras=True)
    fields = {field.name: values_of(hints[field.name]) for field in dataclasses.fields(hint)}
    if "num_choices" in fields:
        fields["num_choices"] = st.integers(1, MAX_CHOICES)
    if "first_choice" in fields:
        fields["first_choice"] = st.integers(0, MAX_CHOICES)
    return st.builds(hint, **fields)
