"""A prompt of ids may end in the middle of a character: whose it is, the answer's bytes decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from services.detokenizer.decoding import Decoding, WindowDecoding, num_completing, unfinished
from services.detokenizer.vocabulary import TokenVocabulary
from tests.unit.detokenizer.vocabularies import mistral_v1, tekken, vocabulary_of

TEKKEN, MISTRAL = vocabulary_of(tekken), vocabulary_of(mistral_v1)
SINGLE = {TEKKEN.decoding.token_bytes(i): i for i in range(1_000, 1_256)}


class Kind(NamedTuple):
    """A decoding, and its token of each byte."""

    decoding: Decoding
    byte_ids: Sequence[int]

    def ids(self, data: bytes) -> list[int]:
        return [self.byte_ids[byte] for byte in data]

    def answer(self, prompt: bytes, answer: bytes, cut: int = 0) -> str:
        """What of it the client gets, the first `cut` bytes at once and the rest one by one."""
        stream = self.decoding.stream(True)
        stream.follow(self.ids(prompt))
        ids = self.ids(answer)
        text = stream.push(ids[:cut]) + "".join(stream.push([i]) for i in ids[cut:])
        return text + stream.flush()


TEKKEN_IDS = [SINGLE[bytes([byte])] for byte in range(256)]
BYTE_LEVEL = Kind(TEKKEN.decoding, TEKKEN_IDS)
BYTE_FALLBACK = Kind(MISTRAL.decoding, range(3, 259))
WINDOW = Kind(WindowDecoding(tekken(), TEKKEN.special_ids), TEKKEN_IDS)
every_kind = pytest.mark.parametrize(
    "kind", [BYTE_LEVEL, BYTE_FALLBACK, WINDOW], ids=["byte level", "byte fallback", "window"]
)

TEXTS = st.text(st.sampled_from("ab é\u00dfあ語👍🏽\n"), max_size=6)
WIDE = st.sampled_from("éßあ語€👍🏽\u07ff\u0800\uffff\U0010ffff")
CUTS = st.integers(0, 12)


@every_kind
@given(before=TEXTS, character=WIDE, after=TEXTS, part=st.integers(1, 3), cut=CUTS)
def test_a_character_that_the_answer_completes_is_the_answers(
    kind: Kind, before: str, character: str, after: str, part: int, cut: int
) -> None:
    data = character.encode()
    part = min(part, len(data) - 1)
    prompt, answer = before.encode() + data[:part], data[part:] + after.encode()
    assert kind.answer(prompt, answer, cut) == character + after


@every_kind
@given(before=TEXTS, character=WIDE, answer=TEXTS, part=st.integers(1, 3), cut=CUTS)
def test_nothing_shows_of_a_character_that_stays_unfinished(
    kind: Kind, before: str, character: str, answer: str, part: int, cut: int
) -> None:
    data = character.encode()
    prompt = before.encode() + data[: min(part, len(data) - 1)]
    assert kind.answer(prompt, answer.encode(), cut) == answer


@every_kind
@given(prompt=TEXTS, answer=TEXTS, cut=CUTS)
def test_whole_characters_of_a_prompt_never_show(
    kind: Kind, prompt: str, answer: str, cut: int
) -> None:
    assert kind.answer(b"a" + prompt.encode(), answer.encode(), cut) == answer


@given(character=WIDE, part=st.integers(1, 3), answer=st.binary(max_size=6), cut=CUTS)
def test_any_bytes_are_decoded_with_the_prompts_or_alone(
    character: str, part: int, answer: bytes, cut: int
) -> None:
    begun = character.encode()[:part]
    begun = begun[: len(character.encode()) - 1]
    count = num_completing(begun, answer)
    whole = begun + answer if count else answer
    assert BYTE_LEVEL.answer(b"a" + begun, answer, cut) == whole.decode(errors="replace")
    assert WINDOW.answer(b"a" + begun, answer, cut) == whole.decode(errors="replace")


@every_kind
def test_an_answer_that_breaks_off_inside_the_character_shows_its_own_bytes_only(
    kind: Kind,
) -> None:
    assert kind.answer(b"a\xf0\x9f", b"") == ""
    assert kind.answer(b"a\xf0\x9f", b"\x91") == "\ufffd"


def test_a_run_that_is_wrong_behind_the_character_is_replaced_and_the_character_kept() -> None:
    assert BYTE_FALLBACK.answer(b"a\xe2\x82", b"\xac\xff") == "€\ufffd"


def test_a_run_that_ends_with_the_prompt_is_none_of_the_answers() -> None:
    hello = mistral_v1().token_to_id("▁Hello")
    stream = MISTRAL.decoding.stream(True)
    assert stream.follow(BYTE_FALLBACK.ids("né".encode())) == "né"
    assert stream.push([hello]) + stream.flush() == " Hello"


@every_kind
@given(before=TEXTS, character=WIDE, part=st.integers(0, 3))
def test_a_prompts_text_ends_before_its_unfinished_character(
    kind: Kind, before: str, character: str, part: int
) -> None:
    data = character.encode()[: min(part, len(character.encode()) - 1)]
    stream = kind.decoding.stream(True)
    assert stream.follow(kind.ids(b"a" + before.encode() + data)) == "a" + before


def test_a_token_that_ends_inside_a_character_leaves_its_text_to_the_prompt() -> None:
    tokens = {"abâĤ": 0, "¬": 1, "x": 2}
    tokenizer = Tokenizer(BPE(tokens, []))
    tokenizer.decoder = decoders.ByteLevel()
    for decoding in (WindowDecoding(tokenizer, frozenset()), TokenVocabulary(tokenizer).decoding):
        for answer, text in (([1, 2], "€x"), ([2], "x")):
            stream = decoding.stream(True)
            assert stream.follow([0]) == "ab"
            assert stream.push(answer) + stream.flush() == text


@given(st.binary(max_size=6))
def test_what_is_unfinished_at_an_end_is_what_more_bytes_could_complete(data: bytes) -> None:
    begun = unfinished(data)
    assert data.endswith(begun) and len(begun) < 4
    assert data.decode(errors="replace").endswith("\ufffd" if begun else "")
    if begun:
        assert num_completing(begun, b"") is None
        assert num_completing(begun, b"a") == 0
