"""Lists of allowed tokens and banned sequences, against the plainest way to say the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.messages.sampling import GrammarSpec
from services.compute.grammar.backend import MaskRow, TokenRules, bits_of
from services.compute.grammar.protocol import StartSequence
from tests.unit.compute.grammar.structured_plans import make_start, tokens_in

VOCAB_SIZE = 70  # not a multiple of 32
ids = st.integers(0, 12)


def expected(place: StartSequence, outputs: list[int], accepting: bool) -> set[int]:
    grammar_spec = place.grammar_spec
    allowed = set(grammar_spec.allowed_token_ids or range(VOCAB_SIZE))
    for banned in grammar_spec.banned_sequences:
        before = list(banned[:-1])
        if not before or outputs[-len(before) :] == before:
            allowed.discard(banned[-1])
    eos = set(place.eos_ids)
    ends = eos | set(place.stop_ids)
    allowed = allowed | ends if accepting else allowed - eos
    held_back = ends if len(outputs) < place.min_tokens else eos if place.ignore_eos else set()
    return allowed - held_back or allowed


@given(
    allowed=st.lists(ids, max_size=6),
    banned=st.lists(st.lists(ids, min_size=1, max_size=4), max_size=6),
    before=st.lists(ids, max_size=6),
    after=st.lists(ids, max_size=6),
    accepting=st.booleans(),
    ending=st.fixed_dictionaries(
        {
            "stop_ids": st.sampled_from(((), (3,), (3, 4))),
            "min_tokens": st.integers(0, 8),
            "ignore_eos": st.booleans(),
        }
    ),
)
def test_a_mask_has_exactly_what_no_rule_forbids(
    allowed: list[int],
    banned: list[list[int]],
    before: list[int],
    after: list[int],
    accepting: bool,
    ending: dict[str, Any],
) -> None:
    grammar_spec = GrammarSpec("", tuple(allowed), tuple(map(tuple, banned)))
    place = make_start(grammar_spec, output_ids=tuple(before), **ending)
    everything = bits_of(range(VOCAB_SIZE), VOCAB_SIZE)
    rules = TokenRules(place, everything)
    for token in after:
        rules.follow((token,))
    mask_W = everything.copy()
    outputs = before + after
    rules.apply(MaskRow(mask_W), accepting, len(outputs))
    assert tokens_in(mask_W) == expected(place, outputs, accepting)


def test_ids_beyond_the_vocabulary_have_no_bit() -> None:
    assert tokens_in(bits_of((-1, 0, 31, 32, 69, 70, 95, 96, 10**9), VOCAB_SIZE)) == {0, 31, 32, 69}


def test_the_bits_beyond_the_vocabulary_stay_empty() -> None:
    grammar_spec = GrammarSpec("", allowed_token_ids=(69, 70, 95), banned_sequences=((95,),))
    everything = bits_of(range(VOCAB_SIZE), VOCAB_SIZE)
    rules = TokenRules(make_start(grammar_spec, eos_ids=(90,)), everything)
    mask_W = everything.copy()
    rules.apply(MaskRow(mask_W), True, 0)
    assert tokens_in(mask_W) == {69}
