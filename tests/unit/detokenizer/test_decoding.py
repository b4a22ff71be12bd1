"""Whatever the ids and however they are split: the pieces joined are the whole decoded at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordPiece

from services.detokenizer.decoding import (
    ByteFallbackDecoding,
    ByteLevelDecoding,
    Decoding,
    WindowDecoding,
)
from services.detokenizer.vocabulary import TokenVocabulary
from tests.unit.detokenizer.vocabularies import mistral_v1, tekken, vocabulary_of

TEKKEN, MISTRAL = vocabulary_of(tekken), vocabulary_of(mistral_v1)

BYTE_IDS = st.integers(3, 258)  # Mistral's byte tokens
MISTRAL_IDS = st.lists(st.one_of(st.integers(0, 32_000), BYTE_IDS), max_size=24)
TEKKEN_IDS = st.lists(
    st.one_of(st.integers(0, 131_071), st.integers(1_000, 1_255), st.integers(0, 20)), max_size=24
)
UNICODE = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("日本語中文한국어👍🏽👩‍👩‍👧🇫🇷é́ \n▁")),
    max_size=24,
)


def streamed(decoding: Decoding, ids: list[int], skip: bool, cut: int) -> str:
    stream = decoding.stream(skip)
    return stream.push(ids[:cut]) + "".join(stream.push([i]) for i in ids[cut:]) + stream.flush()


def whole(make: Callable[[], Tokenizer], ids: list[int], skip: bool) -> str:
    """Decode ids at once, as the library does."""
    return make().decode(ids, skip_special_tokens=skip)


@given(TEKKEN_IDS, st.booleans(), st.integers(0, 24))
def test_byte_level_pieces_join_to_the_whole(ids: list[int], skip: bool, cut: int) -> None:
    assert streamed(TEKKEN.decoding, ids, skip, cut) == whole(tekken, ids, skip)


@given(MISTRAL_IDS, st.booleans(), st.integers(0, 24))
def test_byte_fallback_pieces_join_to_the_whole(ids: list[int], skip: bool, cut: int) -> None:
    assert streamed(MISTRAL.decoding, ids, skip, cut) == whole(mistral_v1, ids, skip)


@given(UNICODE)
def test_any_text_in_bytes_survives_the_byte_fallback(text: str) -> None:
    ids = [3 + byte for byte in text.encode()]
    assert streamed(MISTRAL.decoding, [1, 28725, *ids], True, 0) == "," + text


@given(UNICODE)
def test_any_text_in_bytes_survives_the_byte_level(text: str) -> None:
    single = {TEKKEN.decoding.token_bytes(i): i for i in range(1_000, 1_256)}
    ids = [single[bytes([byte])] for byte in text.encode()]
    assert streamed(TEKKEN.decoding, ids, True, 0) == text


def test_each_kind_of_decoder_gets_its_decoding() -> None:
    assert isinstance(TEKKEN.decoding, ByteLevelDecoding)
    assert isinstance(MISTRAL.decoding, ByteFallbackDecoding)
    assert isinstance(TokenVocabulary(metaspace()).decoding, WindowDecoding)


def metaspace() -> Tokenizer:
    tokens = {
        token: i for i, token in enumerate(["<unk>", "▁a", "▁bc", "d", "▁", "e▁f", "é", "▁▁"])
    }
    tokenizer = Tokenizer(BPE(tokens, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    tokens = {token: i for i, token in enumerate(["[UNK]", "play", "##ing", "##s", "now", "##ed"])}
    tokenizer = Tokenizer(WordPiece(tokens, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[UNK]"])
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


@pytest.mark.parametrize("make", [metaspace, word_piece])
@example(ids=[0, 6, 6, 6, 6, 6, 0], skip=False, cut=0)
@given(ids=st.lists(st.integers(0, 7), max_size=20), skip=st.booleans(), cut=st.integers(0, 20))
def test_other_decoders_go_through_a_window(make, ids, skip, cut) -> None:
    decoding = vocabulary_of(make).decoding
    assert streamed(decoding, ids, skip, cut) == whole(make, ids, skip)


@pytest.mark.parametrize("make", [tekken, mistral_v1, metaspace])
def test_special_tokens_that_are_to_be_shown_are_and_others_are_not(make) -> None:
    vocabulary = vocabulary_of(make)
    shown, *hidden = sorted(vocabulary.special_ids)
    ids = [shown, *hidden[:2], shown]
    for _ in range(2):
        stream = vocabulary.decoding.stream(True, frozenset({shown}))
        text = stream.push(ids) + stream.flush()
        assert text.split() == whole(make, [shown, shown], False).split()
        assert vocabulary.decoding.stream(True).push([*ids, *ids]) == ""


def test_an_unfinished_character_waits_for_its_last_byte() -> None:
    single = {TEKKEN.decoding.token_bytes(i): i for i in range(1_000, 1_256)}
    stream = TEKKEN.decoding.stream(True)
    pieces = [stream.push([single[bytes([byte])]]) for byte in "né👍".encode()]
    assert pieces == ["n", "", "é", "", "", "", "👍"]


def test_a_run_of_bytes_is_shown_when_it_has_ended() -> None:
    stream = MISTRAL.decoding.stream(True)
    pieces = [stream.push([3 + byte]) for byte in "👍".encode()]
    assert pieces == ["", "", "", ""]
    assert stream.push([28725]) == "👍,"


def test_the_first_word_loses_its_space_only_at_the_beginning_of_a_text() -> None:
    hello = mistral_v1().token_to_id("▁Hello")
    assert MISTRAL.decoding.stream(True).push([hello]) == "Hello"
    behind_a_prompt = MISTRAL.decoding.stream(True)
    behind_a_prompt.push([1, hello])
    assert behind_a_prompt.push([hello]) == " Hello"


def test_ids_outside_the_vocabulary_are_no_text() -> None:
    assert TEKKEN.decoding.stream(False).push([-1, 10**6]) == ""
    assert MISTRAL.decoding.stream(False).push([-1, 10**6]) == ""
    assert TEKKEN.decoding.token_bytes(10**6) == b""
    assert MISTRAL.decoding.token_bytes(-1) == b""


@pytest.mark.parametrize("make", [metaspace, word_piece])
@pytest.mark.parametrize("token_id", [-1, 10**6, 1 << 40])
def test_ids_that_no_vocabulary_can_have_are_no_text_in_a_window_either(make, token_id) -> None:
    decoding = TokenVocabulary(make()).decoding
    assert streamed(decoding, [1, token_id, 2], False, 0) == streamed(decoding, [1, 2], False, 0)
    assert decoding.token_bytes(token_id) == b""
