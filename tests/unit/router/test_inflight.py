"""The in-flight table: rows in, at most one terminal out, nothing left behind."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.address import AttemptId
from common.messages.arrays import int32s
from common.messages.failure import Ending, EndReason, Failure, Usage
from common.messages.logprobs import Candidate, TokenLogprob
from common.messages.text import AttemptRefused, Part, TextGenerated
from services.router.inflight import (
    LOST,
    MOVED,
    WORKER_LOST,
    InflightTable,
)
from tests.text_rows import columns
from tests.unit.router.recorder import Recorder, open_request, reasons, route, row

NAN = Failure(500, "not_finite", "the logits are not finite")
FULL = Failure(503, "full", "the queue is full", None, True)


def test_text_reaches_the_sink_and_the_journal() -> None:
    table = InflightTable()
    sink, request, counter = open_request(table)
    assert table.text(row(counter, 0, "ab"), 1.0) == []
    assert table.text(row(counter, 2, "c", "stop"), 1.0) == []
    assert sink.texts == {0: "abc"}
    assert sink.ends[0].usage.completion_tokens == 3
    assert bytes(request.choices[0].token_ids.tolist()) == b"abc"
    assert (len(table), table.num_requests) == (0, 0)


def test_choices_take_consecutive_counters_and_end_one_by_one() -> None:
    table = InflightTable()
    sink, _, first = open_request(table, 3)
    table.text(row(first + 2, 0, "c", "length"), 1.0)
    assert (len(table), table.num_requests) == (2, 1)
    table.text(row(first, 0, "a", "stop"), 1.0)
    table.text(row(first + 1, 0, "b", "stop"), 1.0)
    assert sink.texts == {0: "a", 1: "b", 2: "c"}
    assert table.num_requests == 0


def test_a_gap_loses_the_attempt_and_fails_its_request() -> None:
    table = InflightTable()
    sink, _, first = open_request(table, 2)
    table.text(row(first, 0, "a"), 1.0)
    aborted = table.text(row(first, 2, "c"), 1.0)
    assert sink.failures == [LOST]
    assert reasons(aborted) == [(first, "lost"), (first + 1, "lost")]
    assert [each.past_tokenizer for each in aborted] == [True, False]
    assert len(table) == 0
    assert table.text(row(first, 3, "d", "stop"), 1.0) == []


def test_a_terminal_behind_a_gap_is_a_loss_too() -> None:
    table = InflightTable()
    sink, _, counter = open_request(table)
    table.text(row(counter, 0, "a"), 1.0)
    table.text(row(counter, 5, "", "stop"), 1.0)
    assert sink.failures == [LOST]


def test_a_row_seen_before_is_passed_over() -> None:
    table = InflightTable()
    sink, _, counter = open_request(table)
    table.text(row(counter, 0, "ab"), 1.0)
    table.text(row(counter, 0, "ab"), 1.0)
    table.text(row(counter, 1, "b"), 1.0)
    table.text(row(counter, 2, "c", "stop"), 1.0)
    assert sink.texts == {0: "abc"}


def test_a_row_that_overlaps_and_goes_further_is_a_loss() -> None:
    table = InflightTable()
    sink, _, counter = open_request(table)
    table.text(row(counter, 0, "ab"), 1.0)
    assert table.text(row(counter, 1, "bc"), 1.0)
    assert sink.failures == [LOST]


def test_rows_of_ended_and_never_opened_attempts_are_passed_over() -> None:
    table = InflightTable()
    _, request, counter = open_request(table)
    table.close(request)
    assert table.text(row(counter, 0, "a"), 1.0) == []
    assert table.text(row(999, 0, "a", "stop"), 1.0) == []


def test_a_refusal_fails_the_request_once() -> None:
    table = InflightTable()
    sink, _, first = open_request(table, 3)
    refusal = Failure(400, "too_long", "messages: too long", "messages")
    assert table.refused(AttemptRefused(AttemptId("router.0", first), 3, refusal)) != []
    assert table.refused(AttemptRefused(AttemptId("router.0", first), 3, refusal)) == []
    assert sink.failures == [refusal]
    assert (len(table), table.num_requests) == (0, 0)


@pytest.mark.parametrize(
    ("reason", "given", "shown"),
    [
        ("failed", Failure(500, "nan", "not finite"), Failure(500, "nan", "not finite")),
        (
            "refused",
            Failure(503, "full", "full", None, True),
            Failure(503, "full", "full", None, True),
        ),
        ("moved", None, MOVED),
    ],
)
def test_a_failing_choice_fails_the_request_and_aborts_the_others(
    reason: EndReason, given: Failure | None, shown: Failure
) -> None:
    table = InflightTable()
    sink, _, first = open_request(table, 2)
    aborted = table.text(row(first, 0, "", reason, given), 1.0)
    assert sink.failures == [shown]
    assert reasons(aborted) == [(first + 1, "superseded")]


def test_closing_aborts_what_is_open_and_silences_the_sink() -> None:
    table = InflightTable()
    sink, request, first = open_request(table, 2)
    table.text(row(first, 0, "a", "stop"), 1.0)
    assert reasons(table.close(request)) == [(first + 1, "client_gone")]
    assert table.close(request) == []
    table.text(row(first + 1, 0, "b", "stop"), 1.0)
    assert sink.texts == {0: "a"}
    assert (len(table), table.num_requests, sink.failures) == (0, 0, [])


@pytest.mark.parametrize("service", ["compute", "detokenizer", "tokenizer"])
def test_a_dead_worker_fails_its_requests_and_no_others(service: str) -> None:
    table = InflightTable()
    sink, _, _ = open_request(table, station=0)
    other, _, _ = open_request(table, station=1)
    table.lose_worker(f"{service}.0")
    assert (sink.failures, other.failures) == ([WORKER_LOST], [])
    assert len(table) == 1


def test_a_dead_tokenizer_does_not_concern_what_reached_compute() -> None:
    table = InflightTable()
    heard, _, first = open_request(table)
    listed, _, second = open_request(table)
    table.text(row(first, 0, "a"), 1.0)
    assert table.listed("compute.0", [second], 1.0) == []
    assert table.lose_worker("tokenizer.0") == []
    assert heard.failures == listed.failures == []


def test_unknown_attempts_in_a_heartbeat_are_returned() -> None:
    table = InflightTable()
    _, request, first = open_request(table)
    _, _, second = open_request(table)
    table.close(request)
    assert table.listed("compute.0", [first, second, 77], 1.0) == [first, 77]


def test_an_attempt_that_no_stage_lists_for_two_beats_is_lost() -> None:
    table = InflightTable()
    sink, _, counter = open_request(table)
    beats = {"tokenizer.0": 0.0, "compute.0": 0.0, "detokenizer.0": 0.0}
    missing = partial(table.fail_missing, lambda instance_id: beats[instance_id])
    assert missing(0.5) == []
    beats = dict.fromkeys(beats, 0.5)
    assert missing(1.0) == []
    table.listed("compute.0", [counter], 1.2)
    beats = dict.fromkeys(beats, 1.3)
    assert missing(1.5) == []
    beats.update({"tokenizer.0": 2.0, "compute.0": 2.0})
    assert missing(2.5) == []
    beats["detokenizer.0"] = 2.4  # what compute sent last may still have been on its way
    assert missing(2.7) == []
    beats["detokenizer.0"] = 2.9
    assert reasons(missing(3.4)) == [(counter, "lost")]
    assert sink.failures == [LOST]


def test_an_attempt_whose_terminal_never_reached_the_detokenizer_is_lost() -> None:
    table = InflightTable()
    sink, _, counter = open_request(table)
    beats = dict.fromkeys(("tokenizer.0", "compute.0", "detokenizer.0"), 2.0)
    missing = partial(table.fail_missing, lambda instance_id: beats[instance_id])
    table.listed("detokenizer.0", [counter], 2.4)
    assert missing(2.5) == []
    beats = dict.fromkeys(beats, 3.0)
    table.listed("detokenizer.0", [counter], 3.4)
    assert reasons(missing(3.5)) == [(counter, "lost")]
    assert sink.failures == [LOST]


def test_a_choice_can_hold_several_attempts() -> None:
    table = InflightTable()
    sink, request, first = open_request(table)
    table.text(row(first, 0, "ab"), 1.0)
    (retry,) = table.attempt(request.choices, route(1), 1.0)
    assert retry.next_index == 2
    table.text(row(retry.counter, 2, "c"), 1.0)
    aborted = table.text(row(retry.counter, 3, "d", "stop"), 1.0)
    assert reasons(aborted) == [(first, "superseded")]
    assert sink.texts == {0: "abcd"}
    assert (len(table), table.num_requests) == (0, 0)


@st.composite
def _histories(draw: st.DrawFn) -> list[tuple[str, list[str], int]]:
    """Draw streams: their text cut into rows, and where messages go wrong (-1: nowhere)."""
    streams = []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.text(st.characters(codec="ascii"), max_size=12))
        rows, rest = [], text
        while rest:
            count = draw(st.integers(1, len(rest)))
            rows.append(rest[:count])
            rest = rest[count:]
        broken = draw(st.integers(-1, len(rows) - 1)) if rows else -1
        streams.append((text, rows, broken))
    return streams


@given(_histories(), st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_any_split_with_losses_and_repeats_ends_every_stream_once(
    streams: list[tuple[str, list[str], int]], random: object, lose: bool, late: bool
) -> None:
    table = InflightTable()
    opened = [open_request(table) for _ in streams]
    transport: list[list[TextGenerated]] = []
    for (_, rows, broken), (_, _, counter) in zip(streams, opened, strict=True):
        queue, index = [], 0
        for number, piece in enumerate(rows):
            message = row(counter, index, piece)
            index += len(piece)
            if number == broken and lose:
                continue
            queue += [message, message] if number == broken else [message]
        queue.append(row(counter, index, "", "stop"))
        queue += [queue[-1]] if late else []
        transport.append(queue)
    while any(transport):
        queue = random.choice([each for each in transport if each])  # type: ignore[attr-defined]
        table.text(queue.pop(0), 1.0)
    assert (len(table), table.num_requests) == (0, 0)
    for (text, _, broken), (sink, _, _) in zip(streams, opened, strict=True):
        received = sink.texts.get(0, "")
        if broken >= 0 and lose:
            assert sink.failures == [LOST] and not sink.ends
            assert text.startswith(received)
        else:
            assert received == text
            assert list(sink.ends) == [0] and not sink.failures


def test_what_is_said_of_a_prompt_is_handed_on_once() -> None:
    table = InflightTable()
    sink, _, counter = open_request(table)
    rows = TextGenerated()
    rows.add(counter, 0, [], "")
    rows.open(5, 3, int32s([1, 2]))
    scores = columns(TokenLogprob(Candidate(2, "b", b"b", -0.5), (), 1))
    rows.score(1, scores)
    again = rows
    table.text(again, 1.0)
    table.text(again, 1.0)
    assert (sink.prompts[0].prompt_tokens, sink.prompts[0].cached_tokens) == (5, 3)
    assert sink.prompt_logprobs == {0: scores}


def test_a_sink_gets_ids_only_if_it_wants_them() -> None:
    table = InflightTable()
    for wanted in (False, True):
        sink = Recorder(wants_ids=wanted)
        request = table.open(sink, 1, "demo", 0.0)
        counter = table.attempt(request.choices, route(), 0.0)[0].counter
        rows = TextGenerated()
        rows.add(counter, 0, [7, 8], "ab")
        table.text(rows, 1.0)
        assert sink.token_ids == ([7, 8] if wanted else [])


def test_parts_of_a_parsed_answer_reach_the_sink() -> None:
    table = InflightTable()
    sink, _, counter = open_request(table)
    rows = TextGenerated()
    parts = (Part("reasoning", "hm"), Part("content", "yes"))
    rows.add(counter, 0, [7], "<think>hm</think>yes", parts=parts)
    table.text(rows, 1.0)
    assert sink.parts == list(parts)


def test_times_are_observed_by_choice_and_step() -> None:
    table = InflightTable()
    first = [open_request(table)[2] for _ in range(3)]
    for index, now_s in enumerate((1.0, 1.5, 2.5)):
        rows = TextGenerated()
        for counter in first:
            rows.add(counter, index, [7], "a")
        table.text(rows, now_s)
    late = open_request(table)[2]  # admitted at 0.0, as the others
    rows = TextGenerated()
    rows.add(late, 0, [7], "a")
    rows.add(first[0], 3, [7], "a")
    rows.end(Ending("stop", Usage(5, 2, 4)))
    table.text(rows, 4.0)
    stats = table.stats["demo"]
    assert (stats.first_token_s.sum, sum(stats.first_token_s.counts)) == (3 * 1.0 + 4.0, 4)
    assert stats.inter_token_s.sum == 3 * 0.5 + 3 * 1.0 + 1.5
    assert sum(stats.inter_token_s.counts) == 7
    assert (stats.latency_s.sum, stats.decode_s.sum) == (4.0, 3.0)
    assert stats.num_generated_tokens == 11
    assert stats.generated_tokens.sum == 4


def test_the_prefill_is_the_time_to_the_first_token_without_that_in_the_queue() -> None:
    table = InflightTable()
    for queued_s in (0.5, None, 3.0):
        counter = open_request(table)[2]
        rows = TextGenerated()
        rows.add(counter, 0, [], "")
        rows.open(5, 3, int32s(), queued_s)
        table.text(rows, 1.0)
        table.text(row(counter, 0, "a"), 2.0)
    stats = table.stats["demo"]
    assert (stats.queue_s.sum, sum(stats.queue_s.counts)) == (3.5, 2)
    assert (stats.prefill_s.sum, sum(stats.prefill_s.counts)) == (1.5, 2)


def test_rows_of_several_steps_are_observed_with_their_own_intervals() -> None:
    table = InflightTable()
    ahead, behind = open_request(table)[2], open_request(table)[2]
    table.text(row(ahead, 0, "a"), 1.0)
    table.text(row(behind, 0, "a"), 2.0)
    rows = TextGenerated()
    for counter in (ahead, behind):
        rows.add(counter, 1, [7], "b")
    table.text(rows, 4.0)
    assert table.stats["demo"].inter_token_s.sum == 3.0 + 2.0


def test_a_row_without_a_token_is_no_step() -> None:
    table = InflightTable()
    counter = open_request(table)[2]
    for text, now_s in (("", 1.0), ("a", 2.0), ("", 3.0), ("b", 5.0)):
        table.text(row(counter, 0 if now_s < 3.0 else 1, text), now_s)
    stats = table.stats["demo"]
    assert (stats.first_token_s.sum, stats.inter_token_s.sum) == (2.0, 3.0)
