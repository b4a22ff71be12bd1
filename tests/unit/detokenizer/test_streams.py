"""The table of attempts: one terminal each, nothing left behind, losses noticed."""

from __future__ import annotations

from common.link.codec import pack
from common.messages.address import Address, AttemptId
from common.messages.arrays import float32s, int32s
from common.messages.failure import Usage
from common.messages.stream import StreamHeader
from common.messages.text import TextOpened
from common.messages.token_rows import TokenLogprobs, TokenRow
from common.messages.tokens import EndReason, PromptScores, StreamEnded
from services.detokenizer.streams import LOST, AbortOrder, Streams, TextEnd, TextNews
from tests.unit.detokenizer.vocabularies import tekken, vocabulary_of

VOCABULARY = vocabulary_of(tekken)
SINGLE = {VOCABULARY.decoding.token_bytes(i): i for i in range(1_000, 1_256)}
REPLY, COMPUTE = Address("ipc:///router", "r"), Address("ipc:///compute", "c")
ATTEMPT = AttemptId("r", 7)
OPENED = TextOpened(0, 5, 2, int32s())


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(SINGLE[bytes([byte])] for byte in text.encode())


def header(*stop: str) -> bytes:
    return pack(StreamHeader(reply=REPLY, stop=stop))


def row(
    text: str, first_index: int, opened: bytes | None = None, ended: StreamEnded | None = None
) -> TokenRow:
    return TokenRow(ATTEMPT, first_index, ids_of(text), None, opened, ended, 5, 2)


def end(reason: EndReason, completion_tokens: int, head: bytes = b"") -> StreamEnded:
    return StreamEnded(0, head or header(), reason, Usage(5, 2, completion_tokens))


def test_a_stream_opens_goes_on_and_ends() -> None:
    streams = Streams(VOCABULARY)
    assert streams.take(row("ab", 0, header()), COMPUTE, 0.0) == [
        TextNews(REPLY, ATTEMPT, 0, ids_of("ab"), "ab", (), opened=OPENED)
    ]
    assert streams.open_counters("r") == [7]
    assert streams.take(row("c", 2, ended=end("length", 3)), COMPUTE, 0.0) == [
        TextNews(REPLY, ATTEMPT, 2, ids_of("c"), "c", (), TextEnd("length", Usage(5, 2, 3)))
    ]
    assert len(streams) == 0


def test_a_stop_string_ends_the_stream_at_once_and_at_compute() -> None:
    streams = Streams(VOCABULARY)
    streams.take(row("ab", 0, header("cd")), COMPUTE, 0.0)
    assert streams.take(row("cde", 2), COMPUTE, 0.0) == [
        TextNews(REPLY, ATTEMPT, 2, ids_of("cd"), "", (), TextEnd("stop", Usage(5, 2, 4), "cd")),
        AbortOrder(COMPUTE, ATTEMPT, "stop_string"),
    ]
    assert streams.take(row("f", 5), COMPUTE, 0.0) == []
    assert streams.take(row("", 6, ended=end("aborted", 6)), COMPUTE, 0.0) == []
    assert len(streams) == 0


def test_a_stop_string_in_the_last_tokens_needs_no_abort() -> None:
    streams = Streams(VOCABULARY)
    streams.take(row("ab", 0, header("cd")), COMPUTE, 0.0)
    outcomes = streams.take(row("cdef", 2, ended=end("length", 6)), COMPUTE, 0.0)
    assert [news.end for news in outcomes if isinstance(news, TextNews)] == [
        TextEnd("stop", Usage(5, 2, 4), "cd")
    ]
    assert len(outcomes) == 1
    assert len(streams) == 0


def test_a_gap_fails_the_attempt_on_both_sides() -> None:
    streams = Streams(VOCABULARY)
    streams.take(row("ab", 0, header()), COMPUTE, 0.0)
    assert streams.take(row("d", 3), COMPUTE, 0.0) == [
        TextNews(REPLY, ATTEMPT, 2, (), "", (), TextEnd("failed", Usage(5, 2, 2), failure=LOST)),
        AbortOrder(COMPUTE, ATTEMPT, "lost"),
    ]
    assert streams.take(row("e", 4), COMPUTE, 0.0) == []


def test_rows_of_an_unknown_attempt_are_answered_once() -> None:
    streams = Streams(VOCABULARY)
    assert streams.take(row("d", 3), COMPUTE, 0.0) == [AbortOrder(COMPUTE, ATTEMPT, "lost")]
    assert streams.take(row("e", 4), COMPUTE, 0.0) == []


def test_a_refusal_without_tokens_reaches_the_router() -> None:
    streams = Streams(VOCABULARY)
    assert streams.take(row("", 0, ended=end("refused", 0)), COMPUTE, 0.0) == [
        TextNews(REPLY, ATTEMPT, 0, (), "", (), TextEnd("refused", Usage(5, 2, 0)))
    ]
    assert len(streams) == 0


def test_a_terminal_whose_first_mail_was_lost_says_so() -> None:
    streams = Streams(VOCABULARY)
    (news,) = streams.take(row("", 4, ended=end("length", 4)), COMPUTE, 0.0)
    assert isinstance(news, TextNews)
    assert news.end == TextEnd("failed", Usage(5, 2, 0), failure=LOST)
    assert len(streams) == 0


def test_an_aborted_attempt_leaves_nothing_and_its_late_rows_are_silent() -> None:
    streams = Streams(VOCABULARY)
    streams.take(row("ab", 0, header()), COMPUTE, 0.0)
    streams.drop(ATTEMPT, 0.0)
    assert streams.take(row("c", 2), COMPUTE, 1.0) == []
    assert len(streams) == 0


def test_a_dead_routers_attempts_end_at_compute() -> None:
    streams = Streams(VOCABULARY)
    streams.take(row("ab", 0, header()), COMPUTE, 0.0)
    assert streams.drop_router("other", 0.0) == []
    assert streams.drop_router("r", 0.0) == [AbortOrder(COMPUTE, ATTEMPT, "lost")]
    assert len(streams) == 0


def test_a_header_that_does_not_parse_ends_the_attempt_and_not_the_service() -> None:
    streams = Streams(VOCABULARY)
    assert streams.take(row("ab", 0, b"\xc1"), COMPUTE, 0.0) == [
        AbortOrder(COMPUTE, ATTEMPT, "lost")
    ]


def test_logprobs_name_their_tokens_by_bytes() -> None:
    streams = Streams(VOCABULARY)
    e_acute = ids_of("é")
    scores = tuple(TokenLogprobs(-0.5, (e_acute[0],), (-0.25,)) for _ in e_acute)
    opened = TokenRow(ATTEMPT, 0, e_acute, scores, header(), None)
    (news,) = streams.take(opened, COMPUTE, 0.0)
    assert isinstance(news, TextNews)
    assert [entry.chosen.data for entry in news.logprobs] == [b"\xc3", b"\xa9"]
    assert news.logprobs[0].top[0].logprob == -0.25
    assert news.logprobs[0].chosen.text == "\N{REPLACEMENT CHARACTER}"


def test_the_first_news_say_what_the_prompt_took_and_later_ones_do_not() -> None:
    streams = Streams(VOCABULARY)
    prompt_ids = int32s((5, 6, 7))
    head = pack(StreamHeader(reply=REPLY, prompt_ids=prompt_ids.tobytes()))
    (first,) = streams.take(row("", 0, head), COMPUTE, 0.0)
    (second,) = streams.take(row("a", 0), COMPUTE, 0.0)
    (third,) = streams.take(row("b", 1, ended=end("length", 2)), COMPUTE, 0.0)
    assert isinstance(first, TextNews)
    assert first.opened == TextOpened(0, 5, 2, prompt_ids)
    assert isinstance(second, TextNews)
    assert isinstance(third, TextNews)
    assert (second.opened, third.opened) == (None, None)


def test_prompt_ids_that_are_none_end_the_attempt_and_not_the_service() -> None:
    streams = Streams(VOCABULARY)
    head = pack(StreamHeader(reply=REPLY, prompt_ids=b"12345"))
    assert streams.take(row("a", 0, head), COMPUTE, 0.0) == [AbortOrder(COMPUTE, ATTEMPT, "lost")]


def test_an_answer_that_is_only_a_terminal_says_what_its_prompt_took() -> None:
    streams = Streams(VOCABULARY)
    embedding = float32s((0.5, -1.0)).tobytes()
    ended = StreamEnded(0, header(), "stop", Usage(9, 4, 0), embedding=embedding)
    (news,) = streams.take(TokenRow(ATTEMPT, 0, (), None, None, ended), COMPUTE, 0.0)
    assert news == TextNews(
        REPLY,
        ATTEMPT,
        0,
        (),
        "",
        (),
        TextEnd("stop", Usage(9, 4, 0), embedding=embedding),
        opened=TextOpened(0, 9, 4, int32s()),
    )


def test_scores_of_a_prompt_name_its_tokens_and_the_candidates() -> None:
    streams = Streams(VOCABULARY)
    a, b, c = ids_of("abc")
    scores = PromptScores(
        0,
        first=1,
        num_top=2,
        ids=int32s((a, b)),
        ranks=int32s((1, 40)),
        logprobs=float32s((-0.25, -4.0)),
        top_ids=int32s((a, b, c, a)),
        top_logprobs=float32s((-0.25, -1.0, -0.5, -2.0)),
    )
    opened = TokenRow(ATTEMPT, 0, (), None, header(), None, 3, 0, (scores,))
    (news,) = streams.take(opened, COMPUTE, 0.0)
    assert isinstance(news, TextNews)
    (scored,) = news.scored
    assert scored.first == 1
    shown = [
        (t.chosen.text, t.chosen.logprob, t.rank, [c.text for c in t.top]) for t in scored.tokens
    ]
    assert shown == [("a", -0.25, 1, ["a", "b"]), ("b", -4.0, 40, ["c", "a"])]


def test_what_is_held_back_stays_so_when_the_answer_moves() -> None:
    streams = Streams(VOCABULARY)
    streams.take(row("ab", 0, header("cd")), COMPUTE, 0.0)
    (news,) = streams.take(row("c", 2, ended=end("moved", 3)), COMPUTE, 0.0)
    assert isinstance(news, TextNews)
    assert news.text == ""
