"""The table of attempts: one terminal each, nothing left behind, losses noticed."""

from __future__ import annotations

from common.link.codec import pack
from common.messages.address import Address, AttemptId
from common.messages.arrays import float32s, int32s
from common.messages.failure import Ending, EndReason, Usage
from common.messages.generate import StreamHeader
from common.messages.logprobs import Logprobs, PromptLogprobs
from common.messages.text import TextOpened
from common.messages.tokens import TokenLogprobs, TokensGenerated
from services.detokenizer.streams import LOST, AbortOrder, Streams
from tests.text_rows import TextRow, rows
from tests.unit.detokenizer.vocabularies import tekken, vocabulary_of

VOCABULARY = vocabulary_of(tekken)
SINGLE = {VOCABULARY.decoding.token_bytes(i): i for i in range(1_000, 1_256)}
REPLY, COMPUTE = Address("ipc:///router", "r"), Address("ipc:///compute", "c")
ATTEMPT = AttemptId("r", 7)
OPENED = TextOpened(0, 5, 2, int32s(), 0.5)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(SINGLE[bytes([byte])] for byte in text.encode())


def header(*stop: str) -> bytes:
    return pack(StreamHeader(reply=REPLY, stop=stop))


def row(
    text: str, first_index: int, opened: bytes | None = None, ended: Ending | None = None
) -> TokensGenerated:
    return step(ids_of(text), first_index, opened, ended)


def step(
    ids: tuple[int, ...],
    first_index: int,
    opened: bytes | None = None,
    ended: Ending | None = None,
    logprobs: tuple[TokenLogprobs, ...] = (),
) -> TokensGenerated:
    message = TokensGenerated(1)
    message.add(ATTEMPT, first_index, ids, logprobs, opened, (5, 2, 0.5))
    if ended is not None:
        message.end(header(), ended)
    return message


def end(reason: EndReason, completion_tokens: int) -> Ending:
    return Ending(reason, Usage(5, 2, completion_tokens))


def take(streams: Streams, message: TokensGenerated) -> list[TextRow | AbortOrder]:
    """Rows of text for the router, then what goes to compute."""
    outcome = streams.take(message, COMPUTE, 0.0)
    assert list(outcome.texts) in ([], ["r"])
    texts = [row for text in outcome.texts.values() for row in rows(text)]
    return [*texts, *outcome.aborts]


def text_row(
    text: str,
    first_index: int,
    shown: str,
    ended: Ending | None = None,
    opened: TextOpened | None = None,
) -> TextRow:
    return TextRow(7, first_index, ids_of(text), shown, (), ended, (), opened)


def test_a_stream_opens_goes_on_and_ends() -> None:
    streams = Streams(VOCABULARY)
    assert take(streams, row("ab", 0, header())) == [text_row("ab", 0, "ab", opened=OPENED)]
    assert streams.open_counters("r") == [7]
    assert streams.reply_to("r") == REPLY
    assert take(streams, row("c", 2, ended=end("length", 3))) == [
        text_row("c", 2, "c", end("length", 3))
    ]
    assert len(streams) == 0


def test_a_stop_string_ends_the_stream_at_once_and_at_compute() -> None:
    streams = Streams(VOCABULARY)
    take(streams, row("ab", 0, header("cd")))
    assert take(streams, row("cde", 2)) == [
        text_row("cd", 2, "", Ending("stop", Usage(5, 2, 4), "cd")),
        AbortOrder(COMPUTE, ATTEMPT, "stop_string"),
    ]
    assert take(streams, row("f", 5)) == []
    assert take(streams, row("", 6, ended=end("aborted", 6))) == []
    assert len(streams) == 0


def test_a_stop_string_in_the_last_tokens_needs_no_abort() -> None:
    streams = Streams(VOCABULARY)
    take(streams, row("ab", 0, header("cd")))
    assert take(streams, row("cdef", 2, ended=end("length", 6))) == [
        text_row("cd", 2, "", Ending("stop", Usage(5, 2, 4), "cd"))
    ]
    assert len(streams) == 0


def test_a_gap_fails_the_attempt_on_both_sides() -> None:
    streams = Streams(VOCABULARY)
    take(streams, row("ab", 0, header()))
    assert take(streams, row("d", 3)) == [
        text_row("", 2, "", Ending("failed", Usage(5, 2, 2), failure=LOST)),
        AbortOrder(COMPUTE, ATTEMPT, "lost"),
    ]
    assert take(streams, row("e", 4)) == []


def test_rows_of_an_unknown_attempt_are_answered_once() -> None:
    streams = Streams(VOCABULARY)
    assert take(streams, row("d", 3)) == [AbortOrder(COMPUTE, ATTEMPT, "lost")]
    assert take(streams, row("e", 4)) == []


def test_a_refusal_without_tokens_reaches_the_router() -> None:
    streams = Streams(VOCABULARY)
    assert take(streams, row("", 0, ended=end("refused", 0))) == [
        text_row("", 0, "", end("refused", 0))
    ]
    assert len(streams) == 0


def test_an_ending_whose_first_message_was_lost_says_so() -> None:
    streams = Streams(VOCABULARY)
    (lost,) = take(streams, row("", 4, ended=end("length", 4)))
    assert isinstance(lost, TextRow)
    assert lost.ended == Ending("failed", Usage(5, 2, 0), failure=LOST)
    assert len(streams) == 0


def test_an_aborted_attempt_leaves_nothing_and_its_late_rows_are_silent() -> None:
    streams = Streams(VOCABULARY)
    take(streams, row("ab", 0, header()))
    streams.drop(ATTEMPT, 0.0)
    assert take(streams, row("c", 2)) == []
    assert len(streams) == 0


def test_a_dead_routers_attempts_end_at_compute() -> None:
    streams = Streams(VOCABULARY)
    take(streams, row("ab", 0, header()))
    assert streams.drop_router("other", 0.0) == []
    assert streams.drop_router("r", 0.0) == [AbortOrder(COMPUTE, ATTEMPT, "lost")]
    assert len(streams) == 0


def test_a_header_that_does_not_parse_ends_the_attempt_and_not_the_service() -> None:
    streams = Streams(VOCABULARY)
    assert take(streams, row("ab", 0, b"\xc1")) == [AbortOrder(COMPUTE, ATTEMPT, "lost")]


def test_logprobs_name_their_tokens_by_bytes() -> None:
    streams = Streams(VOCABULARY)
    e_acute = ids_of("é")
    scores = tuple(TokenLogprobs(-0.5, (e_acute[0],), (-0.25,)) for _ in e_acute)
    (first,) = take(streams, step(e_acute, 0, header(), logprobs=scores))
    assert isinstance(first, TextRow)
    assert [entry.chosen.data for entry in first.logprobs] == [b"\xc3", b"\xa9"]
    assert first.logprobs[0].top[0].logprob == -0.25
    assert first.logprobs[0].chosen.text == "\N{REPLACEMENT CHARACTER}"


def test_the_first_row_says_what_the_prompt_took_and_later_ones_do_not() -> None:
    streams = Streams(VOCABULARY)
    prompt_ids = int32s((5, 6, 7))
    head = pack(StreamHeader(reply=REPLY, prompt_ids=prompt_ids.tobytes()))
    (first,) = take(streams, row("", 0, head))
    (second,) = take(streams, row("a", 0))
    (third,) = take(streams, row("b", 1, ended=end("length", 2)))
    assert isinstance(first, TextRow)
    assert first.opened == TextOpened(0, 5, 2, prompt_ids, 0.5)
    assert isinstance(second, TextRow)
    assert isinstance(third, TextRow)
    assert (second.opened, third.opened) == (None, None)


def test_prompt_ids_that_are_none_end_the_attempt_and_not_the_service() -> None:
    streams = Streams(VOCABULARY)
    head = pack(StreamHeader(reply=REPLY, prompt_ids=b"12345"))
    assert take(streams, row("a", 0, head)) == [AbortOrder(COMPUTE, ATTEMPT, "lost")]


def test_an_answer_that_is_only_a_terminal_says_what_its_prompt_took() -> None:
    streams = Streams(VOCABULARY)
    embedding = float32s((0.5, -1.0)).tobytes()
    ended = Ending("stop", Usage(9, 4, 0), embedding=embedding)
    assert take(streams, row("", 0, ended=ended)) == [
        text_row("", 0, "", ended, TextOpened(0, 9, 4, int32s()))
    ]


def test_scores_of_a_prompt_name_its_tokens_and_the_candidates() -> None:
    streams = Streams(VOCABULARY)
    a, b, c = ids_of("abc")
    logprobs = Logprobs()
    logprobs.add((a, a, b), (-0.25, -0.25, -1.0), rank=1)
    logprobs.add((b, c, a), (-4.0, -0.5, -2.0), rank=40)
    opened = row("", 0, header())
    opened.score(PromptLogprobs(0, 1, logprobs))
    (first,) = take(streams, opened)
    assert isinstance(first, TextRow)
    (scored,) = first.scored
    assert scored.first == 1
    shown = [
        (t.chosen.text, t.chosen.logprob, t.rank, [c.text for c in t.top]) for t in scored.logprobs
    ]
    assert shown == [("a", -0.25, 1, ["a", "b"]), ("b", -4.0, 40, ["c", "a"])]


def test_what_is_held_back_stays_so_when_the_answer_moves() -> None:
    streams = Streams(VOCABULARY)
    take(streams, row("ab", 0, header("cd")))
    assert take(streams, row("c", 2, ended=end("moved", 3))) == [
        text_row("c", 2, "", end("moved", 3))
    ]
