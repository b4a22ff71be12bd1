"""Bad words are banned as they stand at the start of a text, and behind a blank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from services.tokenizer.lark import Vocabulary
from tests.unit.tokenizer.vocabularies import KINDS


def holds(ids: list[int], sequence: tuple[int, ...]) -> bool:
    size = len(sequence)
    return any(tuple(ids[at : at + size]) == sequence for at in range(len(ids)))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_word_is_found_at_the_start_and_inside(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    banned = Vocabulary(tokenizer).bad_word_sequences(["dog"])
    # Unlike a real model's, the small vocabulary of ▁ has tokens across words.
    for text in ("dog",) if make is KINDS["metaspace"] else ("dog", "the dog", "a dog"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert any(holds(ids, sequence) for sequence in banned), text
    assert not any(holds(tokenizer.encode("fox").ids, sequence) for sequence in banned)


def test_blanks_around_a_word_do_not_matter_and_nothing_is_listed_twice() -> None:
    vocabulary = Vocabulary(KINDS["byte_level"]())
    once = vocabulary.bad_word_sequences(["dog"])
    assert vocabulary.bad_word_sequences([" dog", "dog ", "dog"]) == once
    assert len(once) == 2
    assert vocabulary.bad_word_sequences([]) == vocabulary.bad_word_sequences([""]) == ()


def test_what_ends_in_a_banned_sequence_is_not_listed_again() -> None:
    tokenizer = KINDS["byte_level"]()
    (alone,) = Vocabulary(tokenizer).bad_word_sequences(["7"])
    within = tokenizer.encode(" 7", add_special_tokens=False).ids
    assert tuple(within[-len(alone) :]) == alone
