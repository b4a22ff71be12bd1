"""One attempt's text: contexts, stops across tokens, minimum lengths, retries."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.messages.address import Address
from common.messages.generate import StreamHeader
from services.detokenizer.stream import TextStream
from tests.unit.detokenizer.vocabularies import mistral_v1, tekken, vocabulary_of

TEKKEN, MISTRAL = vocabulary_of(tekken), vocabulary_of(mistral_v1)
SINGLE = {TEKKEN.decoding.token_bytes(i): i for i in range(1_000, 1_256)}
REPLY = Address("ipc:///router", "r")


def ids_of(text: str) -> list[int]:
    return [SINGLE[bytes([byte])] for byte in text.encode()]


def header(**settings: object) -> StreamHeader:
    return StreamHeader(reply=REPLY, **settings)  # type: ignore[arg-type]


def run(stream: TextStream, ids: Sequence[int], stopped: bool = False) -> tuple[str, str | None]:
    text = ""
    for token_id in ids[:-1]:
        chunk = stream.push([token_id])
        text += chunk.text
        if chunk.stop is not None:
            return text, chunk.stop
    chunk = stream.finish(ids[-1:], "stop" if stopped else "length")
    return text + chunk.text, chunk.stop


def test_a_stop_string_across_tokens_is_cut_out() -> None:
    stream = TextStream(header(stop=("END",)), TEKKEN.decoding)
    assert run(stream, ids_of("the EN, the END and more")) == ("the EN, the ", "END")
    assert stream.next_index == len("the EN, the END")


def test_a_stop_string_is_kept_when_asked_for() -> None:
    stream = TextStream(header(stop=("END",), include_stop_str_in_output=True), TEKKEN.decoding)
    assert run(stream, ids_of("the END and more")) == ("the END", "END")


def test_what_only_began_a_stop_string_is_shown_at_the_end() -> None:
    stream = TextStream(header(stop=("END",)), TEKKEN.decoding)
    assert run(stream, ids_of("the EN")) == ("the EN", None)


def test_stop_strings_wait_for_the_minimum_number_of_tokens() -> None:
    stream = TextStream(header(stop=("b",), min_tokens=3), TEKKEN.decoding)
    assert run(stream, ids_of("abababab")) == ("aba", "b")


def test_the_token_that_stopped_the_stream_is_not_shown() -> None:
    assert run(TextStream(header(), TEKKEN.decoding), ids_of("ab"), stopped=True) == ("a", None)
    kept = TextStream(header(include_stop_str_in_output=True), TEKKEN.decoding)
    assert run(kept, ids_of("ab"), stopped=True) == ("ab", None)


def test_several_tokens_at_once_end_at_the_one_that_completes_the_stop() -> None:
    stream = TextStream(header(stop=("cd",)), TEKKEN.decoding)
    chunk = stream.push(ids_of("abcdef"))
    assert (chunk.text, chunk.num_ids, chunk.stop) == ("ab", 4, "cd")


def test_output_continues_the_prompt_and_not_a_new_text() -> None:
    hello = mistral_v1().token_to_id("▁Hello")
    fresh = TextStream(header(prompt_tail_ids=(1,)), MISTRAL.decoding)
    after = TextStream(header(prompt_tail_ids=(1, hello)), MISTRAL.decoding)
    assert fresh.push([hello]).text == "Hello"
    assert after.push([hello]).text == " Hello"


TEXTS = st.text("abEND é👍", min_size=2, max_size=20)


@given(TEXTS, st.data())
def test_a_retry_goes_on_where_the_client_stopped_reading(text: str, data: st.DataObject) -> None:
    ids = ids_of(text)
    whole, stop = run(TextStream(header(stop=("END",)), TEKKEN.decoding), ids)
    cut = data.draw(st.integers(1, len(ids) - 1))
    first = TextStream(header(stop=("END",)), TEKKEN.decoding)
    accepted = ""
    for token_id in ids[:cut]:
        chunk = first.push([token_id])
        accepted += chunk.text
        if chunk.stop is not None:
            return
    # The client may have got less than that: the journal holds what the router wrote.
    characters = data.draw(st.integers(0, len(accepted)))
    again = TextStream(
        header(stop=("END",), accepted_ids=tuple(ids[:cut]), accepted_characters=characters),
        TEKKEN.decoding,
    )
    assert again.next_index == cut
    rest, again_stop = run(again, ids[cut:])
    assert (accepted[:characters] + rest, again_stop) == (whole, stop)


def test_a_stop_string_that_begins_with_a_character_of_the_prompts_is_found() -> None:
    euro = ids_of("€")
    settings = {"prompt_tail_ids": (*ids_of("a"), *euro[:2]), "stop": ("€!",)}
    completed = TextStream(header(**settings), TEKKEN.decoding)
    assert run(completed, [euro[2], *ids_of("!b")]) == ("", "€!")
    unfinished = TextStream(header(**settings), TEKKEN.decoding)
    assert run(unfinished, ids_of("!b")) == ("!b", None)


@given(st.sampled_from("é語👍"), TEXTS, st.booleans(), st.data())
def test_a_retry_behind_an_unfinished_character_goes_on_all_the_same(
    character: str, text: str, completes: bool, data: st.DataObject
) -> None:
    whole = ids_of(character)
    part = data.draw(st.integers(1, len(whole) - 1))
    tail = (*ids_of("n"), *whole[:part])
    ids = [*whole[part:], *ids_of(text)] if completes else ids_of(text)
    cut = data.draw(st.integers(1, len(ids) - 1))
    first = TextStream(header(prompt_tail_ids=tail), TEKKEN.decoding)
    accepted = "".join(first.push([token_id]).text for token_id in ids[:cut])
    again = TextStream(
        header(
            prompt_tail_ids=tail,
            accepted_ids=tuple(ids[:cut]),
            accepted_characters=len(accepted),
        ),
        TEKKEN.decoding,
    )
    assert accepted + run(again, ids[cut:])[0] == (character + text if completes else text)
