"""Parsed answers of token ids: markers that are special tokens, retries, counts, stop strings."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.messages.address import Address
from common.messages.failure import EndReason
from common.messages.generate import StreamHeader
from common.messages.text import Part
from common.parameter_kinds import pack_kinds
from services.detokenizer.stream import ParsedStream, TextChunk, parsed_stream
from services.detokenizer.vocabulary import TokenVocabulary
from tests.unit.detokenizer.vocabularies import marked

VOCABULARY = TokenVocabulary(marked())
REPLY = Address("ipc:///router", "r")
HERMES = StreamHeader(
    REPLY, tool_format="hermes", reasoning_format="think", call_key="key", stop=("STOP",)
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"ä": "</tool_call>"}}\n</tool_call>'
ANSWER = f"<think>\nWhy?\n</think>\n\nSee:\n{CALL}\n{CALL}<|end|>"


def ids_of(text: str) -> tuple[int, ...]:
    ids: list[int] = marked().encode(text, add_special_tokens=False).ids
    return tuple(ids)


def stream(header: StreamHeader, choice: int = 0) -> ParsedStream:
    made = parsed_stream(header, choice, VOCABULARY)
    assert made is not None
    return made


def client(parts: list[Part]) -> list[Part]:
    """Parts as a client has them in the end: pieces of one kind that follow each other joined."""
    out: list[Part] = []
    for part in parts:
        if part.kind != "call" and not part.text:
            continue
        same = (
            out and part.kind != "call" and (out[-1].kind, out[-1].index) == (part.kind, part.index)
        )
        if same:
            out[-1] = replace(part, text=out[-1].text + part.text)
        else:
            out.append(part)
    return out


def run(
    taking: ParsedStream, ids: tuple[int, ...], reason: EndReason = "stop"
) -> tuple[str, list[Part], TextChunk]:
    """Push ids one by one and finish; return text, parts and the last chunk."""
    text, parts = "", []
    for token_id in ids[:-1]:
        chunk = taking.push((token_id,))
        assert chunk.parts
        text += chunk.text
        parts += chunk.parts
        if chunk.stop is not None:
            return text, parts, chunk
    chunk = taking.finish(ids[-1:], reason)
    return text + chunk.text, [*parts, *chunk.parts], chunk


def test_markers_that_are_special_tokens_are_seen_and_other_ones_stay_hidden() -> None:
    text, parts, last = run(stream(HERMES), ids_of(ANSWER.replace("See", "S<|hidden|>ee[ARGS]")))
    assert text == ANSWER.removesuffix("<|end|>")
    ids = [part.id for part in parts if part.kind == "call"]
    arguments = '{"ä": "</tool_call>"}'
    assert client(parts) == [
        Part("reasoning", "Why?"),
        Part("content", "See:"),
        Part("call", "f", 0, ids[0]),
        Part("arguments", arguments, 0),
        Part("call", "f", 1, ids[1]),
        Part("arguments", arguments, 1),
    ]
    assert last.num_calls == 2


def test_markers_with_characters_of_their_own_are_seen() -> None:
    header = StreamHeader(REPLY, tool_format="deepseek", reasoning_format="deepseek_r1")
    text = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜><|end|>"
    )
    shown, parts, last = run(
        stream(replace(header, reasoning_open=True)), ids_of("</think>" + text)
    )
    assert shown == "</think>" + text.removesuffix("<|end|>")
    assert [(part.kind, part.text) for part in client(parts)] == [
        ("call", "f"),
        ("arguments", "{}"),
    ]
    assert (last.num_calls, last.reasoning_tokens) == (1, 0)


def test_harmonys_tokens_are_seen_and_its_reasoning_counted() -> None:
    header = StreamHeader(REPLY, tool_format="harmony", reasoning_format="harmony")
    text = (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    shown, parts, last = run(stream(header), ids_of(text))
    assert shown == text.removesuffix("<|call|>")
    assert [(part.kind, part.text) for part in client(parts)] == [
        ("reasoning", "Hm"),
        ("call", "f"),
        ("arguments", '{"a": 1}'),
    ]
    assert (last.num_calls, last.reasoning_tokens) == (1, 2)


def test_values_are_read_by_the_kinds_in_the_header() -> None:
    text = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call><|end|>"
    for kind, value in (("t", '"5"'), ("i", "5"), ("", "5")):
        kinds = pack_kinds({"f": {"a": kind}} if kind else {})
        header = StreamHeader(REPLY, tool_format="glm", parameter_kinds=kinds)
        _, parts, _ = run(stream(header), ids_of(text))
        assert client(parts)[-1].text == f'{{"a": {value}}}'


def test_without_parsers_there_is_no_parsed_stream() -> None:
    assert parsed_stream(StreamHeader(REPLY), 0, VOCABULARY) is None
    assert (
        parsed_stream(StreamHeader(REPLY, tool_format="of a later version"), 0, VOCABULARY) is None
    )


def test_ids_of_calls_are_those_of_their_choice_and_format() -> None:
    def ids(header: StreamHeader, choice: int, text: str = CALL) -> list[str]:
        parts = run(stream(header, choice), ids_of(text + text), "length")[1]
        return [part.id for part in parts if part.kind == "call"]

    plain = ids(HERMES, 0)
    assert plain == ids(HERMES, 0)
    assert all(len(each) == 29 and each.startswith("call_") for each in plain)
    other = ids(replace(HERMES, call_key="other"), 0)
    assert len({*plain, *ids(HERMES, 1), *other}) == 6
    mistral = replace(HERMES, tool_format="mistral")
    for each in ids(mistral, 0, "[TOOL_CALLS]f[ARGS]{}"):
        assert len(each) == 9
        assert each.isalnum()


def test_tokens_of_reasoning_are_those_between_its_markers() -> None:
    whole = stream(HERMES)
    assert run(whole, ids_of(ANSWER))[2].reasoning_tokens == len("\nWhy?\n")
    at_once = stream(HERMES)
    assert at_once.finish(ids_of(ANSWER), "stop").reasoning_tokens == len("\nWhy?\n")
    inside = stream(replace(HERMES, reasoning_open=True))
    assert run(inside, ids_of("Why?<|end|>"))[2].reasoning_tokens == len("Why?")
    cut_off = stream(replace(HERMES, reasoning_open=True))
    assert run(cut_off, ids_of("Why?"), "length")[2].reasoning_tokens == len("Why?")


def test_a_stop_string_ends_the_parts_too() -> None:
    text, parts, last = run(stream(HERMES), ids_of("<think>a</think> b <tool_STOP."))
    assert (text, last.stop) == ("<think>a</think> b <tool_", "STOP")
    assert client(parts) == [Part("reasoning", "a"), Part("content", " b <tool_")]


def test_a_stop_string_is_found_in_reasoning_and_arguments_too() -> None:
    for text in ("<think>a STOP b</think>", '<tool_call>{"name": "f", "arguments": "STOP"'):
        assert run(stream(HERMES), ids_of(text))[2].stop == "STOP"


def test_several_tokens_at_once_come_to_the_same() -> None:
    ids = ids_of(ANSWER)
    _, parts, _ = run(stream(HERMES), ids)
    chunk = stream(HERMES).finish(ids, "stop")
    assert client(list(chunk.parts)) == client(parts)
    assert (chunk.num_ids, chunk.num_calls) == (len(ids), 2)


def test_what_is_held_back_stays_so_when_the_answer_moves() -> None:
    taking = stream(replace(HERMES, reasoning_format=""))
    assert client(list(taking.finish(ids_of(" Hi \n<tool_call>\n"), "moved").parts)) == [
        Part("content", " Hi")
    ]


PIECES = st.lists(
    st.sampled_from([CALL, "<think>", "</think>", "\n", " hi ", "é", "<tool_call>", "{", "STO"]),
    min_size=1,
    max_size=8,
).map("".join)


@given(PIECES, st.data())
def test_a_retry_goes_on_where_the_client_stopped_reading(text: str, data: st.DataObject) -> None:
    ids = ids_of(text + "<|end|>")
    _, whole, end = run(stream(HERMES), ids)
    cut = data.draw(st.integers(1, len(ids) - 1))
    first = stream(HERMES)
    rows = [first.push((token_id,)) for token_id in ids[:cut]]
    # The client has whole rows, and perhaps only the text of earlier ones.
    written = data.draw(st.integers(0, cut))
    accepted = "".join(row.text for row in rows[:written])
    shown = [part for row in rows[:written] for part in row.parts]
    again = stream(
        replace(HERMES, accepted_ids=ids[:cut], accepted_characters=len(accepted)), choice=0
    )
    assert again.next_index == cut
    rest, parts, last = run(again, ids[cut:])
    assert client([*shown, *parts]) == client(whole)
    assert accepted + rest == text
    assert (last.num_calls, last.reasoning_tokens) == (end.num_calls, end.reasoning_tokens)
