"""The in-flight table: rows in, at most one terminal out, nothing left behind."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.address import AttemptId
from common.messages.arrays import int32s
from common.messages.failure import EndReason, Failure
from common.messages.logprobs import Candidate, TokenLogprob
from common.messages.text import AttemptRefused, Part, TextGenerated
from services.router.attempts import ABORTED, MOVED, WORKER_LOST
from services.router.inflight import InflightTable
from tests.text_rows import columns
from tests.unit.router.recorder import CARD, Recorder, open_request, reasons, route, row, waiting

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


def test_a_gap_loses_the_attempt_and_no_other() -> None:
    table = InflightTable()
    sink, _, first = open_request(table, 2)
    table.text(row(first, 0, "a"), 1.0)
    aborted = table.text(row(first, 2, "c"), 1.0)
    assert reasons(aborted) == [(first, "lost")]
    assert [each.past_tokenizer for each in aborted] == [True]
    assert (len(table), waiting(table), sink.failures) == (1, [[0]], [])
    assert table.text(row(first, 3, "d", "stop"), 1.0) == []
    table.text(row(first + 1, 0, "b", "stop"), 1.0)
    assert sink.texts == {0: "a", 1: "b"}


def test_a_terminal_behind_a_gap_is_a_loss_too() -> None:
    table = InflightTable()
    sink, _, counter = open_request(table)
    table.text(row(counter, 0, "a"), 1.0)
    table.text(row(counter, 5, "", "stop"), 1.0)
    assert (waiting(table), sink.ends) == ([[0]], {})


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
    assert (waiting(table), sink.texts) == ([[0]], {0: "ab"})


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
    assert table.refused(AttemptRefused(AttemptId("router.0", first), 3, refusal), 1.0) != []
    assert table.refused(AttemptRefused(AttemptId("router.0", first), 3, refusal), 1.0) == []
    assert sink.failures == [refusal]
    assert (len(table), table.num_requests) == (0, 0)


def test_a_failing_choice_fails_the_request_and_aborts_the_others() -> None:
    table = InflightTable()
    sink, _, first = open_request(table, 2)
    aborted = table.text(row(first, 0, "", "failed", NAN), 1.0)
    assert sink.failures == [NAN]
    assert reasons(aborted) == [(first + 1, "superseded")]
    assert (len(table), waiting(table), table.num_requests) == (0, [], 0)


@pytest.mark.parametrize(
    ("reason", "given", "why", "refused_by", "kept"),
    [
        ("refused", FULL, FULL, {"compute.0"}, ""),
        ("moved", None, MOVED, set(), "compute.0"),
        ("aborted", None, ABORTED, set(), "compute.0"),
        ("failed", FULL, FULL, set(), "compute.0"),
    ],
)
def test_a_choice_that_another_worker_may_take_waits_for_one(
    reason: EndReason, given: Failure | None, why: Failure, refused_by: set[str], kept: str
) -> None:
    table = InflightTable()
    sink, request, first = open_request(table)
    aborted = table.text(row(first, 0, "ab", reason, given), 1.0)
    assert reasons(aborted) == ([] if reason == "refused" else [(first, "superseded")])
    setbacks = request.choices[0].setbacks
    assert (setbacks.failure, setbacks.refused_by) == (why, refused_by)
    assert setbacks.kept_compute == kept
    assert (waiting(table), sink.failures, table.num_requests) == ([[0]], [], 1)


def test_what_a_tokenizer_has_no_room_for_waits_for_another() -> None:
    table = InflightTable()
    sink, request, first = open_request(table, 3)
    assert table.refused(AttemptRefused(AttemptId("router.0", first), 3, FULL), 1.0) == []
    assert waiting(table) == [[0, 1, 2]], "one message asks for all of them"
    assert request.choices[1].setbacks.refused_by == {"tokenizer.0"}
    assert sink.failures == []


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
def test_a_dead_worker_displaces_its_choices_and_no_others(service: str) -> None:
    table = InflightTable()
    sink, request, first = open_request(table, station=0)
    other, _, _ = open_request(table, station=1)
    aborted = table.lose_worker(f"{service}.0", 1.0)
    assert reasons(aborted) == [(first, "superseded")]
    assert list(table.displaced) == request.choices
    setbacks = request.choices[0].setbacks
    assert setbacks.failure == WORKER_LOST
    assert setbacks.kept_compute == ("" if service == "compute" else "compute.0")
    assert (setbacks.num_deaths, setbacks.num_compute_deaths) == (1, service == "compute")
    assert (len(table), sink.failures, other.failures) == (1, [], [])


def test_a_dead_tokenizer_does_not_concern_what_reached_compute() -> None:
    table = InflightTable()
    heard, _, first = open_request(table)
    listed, _, second = open_request(table)
    table.text(row(first, 0, "a"), 1.0)
    assert table.listed("compute.0", [second], 1.0) == []
    assert table.lose_worker("tokenizer.0", 2.0) == []
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
    missing = partial(table.lose_missing, lambda instance_id: beats[instance_id])
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
    assert (waiting(table), sink.failures) == ([[0]], [])


def test_an_attempt_whose_terminal_never_reached_the_detokenizer_is_lost() -> None:
    table = InflightTable()
    sink, _, counter = open_request(table)
    beats = dict.fromkeys(("tokenizer.0", "compute.0", "detokenizer.0"), 2.0)
    missing = partial(table.lose_missing, lambda instance_id: beats[instance_id])
    table.listed("detokenizer.0", [counter], 2.4)
    assert missing(2.5) == []
    beats = dict.fromkeys(beats, 3.0)
    table.listed("detokenizer.0", [counter], 3.4)
    assert reasons(missing(3.5)) == [(counter, "lost")]
    assert (waiting(table), sink.failures) == ([[0]], [])


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
def test_any_split_with_losses_and_repeats_gives_every_stream_once(
    streams: list[tuple[str, list[str], int]], random: Random, lose: bool, late: bool
) -> None:
    table = InflightTable()
    opened = [open_request(table) for _ in streams]
    transport: list[list[TextGenerated]] = []

    def send(text: str, rows: list[str], broken: int, counter: int, done: int) -> None:
        """Queue the rows of an attempt that begins with `done` tokens; one may go wrong."""
        queue, index = [], 0
        for number, piece in enumerate(rows):
            begin, index = max(index, done), index + len(piece)
            if index <= done or (number == broken and lose):
                continue
            message = row(counter, begin, text[begin:index])
            queue += [message, message] if number == broken else [message]
        queue.append(row(counter, index, "", "stop"))
        queue += [queue[-1]] if late else []
        transport.append(queue)

    for (text, rows, broken), (_, _, counter) in zip(streams, opened, strict=True):
        send(text, rows, broken, counter, 0)
    while any(transport):
        queue = random.choice([each for each in transport if each])
        table.text(queue.pop(0), 1.0)
        for (choice,) in table.to_retry():
            number = [request for _, request, _ in opened].index(choice.request)
            (retry,) = table.attempt([choice], route(), 1.0)
            send(*streams[number][:2], -1, retry.counter, len(choice.token_ids))
    assert (len(table), table.num_requests) == (0, 0)
    for (text, _, _), (sink, _, _) in zip(streams, opened, strict=True):
        assert sink.texts.get(0, "") == text
        assert list(sink.ends) == [0] and not sink.failures
        assert sink.ends[0].usage.completion_tokens == len(text)


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
        request = table.open(sink, 1, CARD, 0.0)
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
