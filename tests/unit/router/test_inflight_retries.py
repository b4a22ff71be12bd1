"""Choices that are tried again: in which order, from where on, and when no more."""

from __future__ import annotations

import pytest

from common.messages.arrays import int32s
from common.messages.failure import Ending, Failure, Usage
from common.messages.logprobs import Candidate, TokenLogprob
from common.messages.text import TextGenerated
from services.router.attempts import LOST
from services.router.breaker import MAX_FAILURES, CircuitBreakers
from services.router.failover import MAX_TRIES, POISON
from services.router.inflight import InflightTable
from tests.text_rows import columns
from tests.unit.router.recorder import open_request, reasons, route, row, waiting

FULL = Failure(503, "full", "the queue is full", None, True)


def test_a_request_that_meets_two_compute_deaths_fails_and_goes_nowhere_else() -> None:
    table = InflightTable()
    sink, request, first = open_request(table)
    table.text(row(first, 0, "a"), 1.0)
    table.lose_worker("compute.0", 1.0)
    (retry,) = table.attempt(request.choices, route(1), 2.0)
    table.text(row(retry.counter, 1, "b"), 3.0)
    aborted = table.lose_worker("compute.1", 3.0)
    assert sink.failures == [POISON]
    assert reasons(aborted) == [(retry.counter, "superseded")]
    assert (len(table), waiting(table), table.num_requests) == (0, [], 0)


def test_a_choice_that_never_gets_on_is_given_up() -> None:
    table = InflightTable()
    sink, request, counter = open_request(table)
    for _ in range(MAX_TRIES - 1):
        table.text(row(counter, 7, "x"), 1.0)
        assert sink.failures == []
        counter = table.attempt(request.choices, route(), 1.0)[0].counter
    table.text(row(counter, 7, "x"), 1.0)
    assert sink.failures == [LOST]


def test_a_request_that_is_closed_while_it_waits_leaves_nothing() -> None:
    table = InflightTable()
    _, request, _ = open_request(table, 2)
    table.lose_worker("compute.0", 1.0)
    assert table.close(request) == []
    assert (len(table), waiting(table), table.num_requests) == (0, [], 0)


def test_when_all_fails_what_waits_fails_too() -> None:
    table = InflightTable()
    waits, _, _ = open_request(table)
    table.lose_worker("compute.0", 1.0)
    runs, _, _ = open_request(table, station=1)
    table.fail_all(FULL)
    assert (waits.failures, runs.failures) == ([FULL], [FULL])
    assert (len(table), waiting(table), table.num_requests) == (0, [], 0)


def test_a_retry_goes_on_where_the_journal_ends() -> None:
    table = InflightTable()
    sink, request, first = open_request(table)
    rows = row(first, 0, "ab")
    rows.open(5, 3, int32s())
    table.text(rows, 1.0)
    table.lose_worker("compute.0", 1.0)
    (choice,) = request.choices
    assert (bytes(choice.token_ids.tolist()), choice.num_characters) == (b"ab", 2)
    (retry,) = table.attempt(request.choices, route(1), 1.0)
    assert (retry.next_index, waiting(table)) == (2, [])
    table.text(row(first, 2, "x"), 2.0)  # of the former attempt
    again = row(retry.counter, 2, "c")
    again.open(5, 5, int32s())
    table.text(again, 2.0)
    assert table.text(row(retry.counter, 3, "d", "stop"), 2.0) == []
    assert sink.texts == {0: "abcd"}
    assert sink.ends[0].usage == Usage(5, 3, 4), "tokens once, and what was cached at first"
    assert (len(table), table.num_requests) == (0, 0)


def test_logprobs_of_a_prompt_that_a_retry_cuts_elsewhere_are_handed_on_once() -> None:
    table = InflightTable()
    sink, request, counter = open_request(table)
    scores = [TokenLogprob(Candidate(i, "b", b"b", -0.5), (), 1) for i in range(1, 9)]

    def say(counter: int, first: int, stop: int) -> None:
        rows = TextGenerated()
        rows.add(counter, 0, [], "")
        rows.score(first, columns(*scores[first - 1 : stop - 1]))
        table.text(rows, 1.0)

    say(counter, 1, 4)
    table.lose_worker("compute.0", 1.0)
    retry = table.attempt(request.choices, route(1), 1.0)[0].counter
    say(retry, 1, 3)
    say(retry, 3, 7)
    assert request.choices[0].attempt is not None
    say(retry, 8, 9)  # before it one is missing
    assert (request.choices[0].attempt, request.choices[0].setbacks.failure) == (None, LOST)
    say(table.attempt(request.choices, route(1), 1.0)[0].counter, 1, 9)
    assert sink.prompt_logprobs == {0: columns(*scores)}


def test_the_most_advanced_goes_first_and_fresh_neighbours_go_together() -> None:
    table = InflightTable()
    _, _, first = open_request(table, 5)
    table.text(row(first + 1, 0, "ab"), 1.0)
    table.text(row(first + 4, 0, "abc"), 1.0)
    open_request(table, 2, station=1)
    table.lose_worker("compute.0", 2.0)
    assert waiting(table) == [[4], [1], [0], [2, 3]]
    table.lose_worker("compute.1", 2.0)
    assert waiting(table) == [[4], [1], [0], [0, 1], [2, 3]]


@pytest.mark.parametrize("listed", [False, True])
def test_a_tokenizer_has_done_well_what_compute_has(listed: bool) -> None:
    breakers = CircuitBreakers()
    table = InflightTable(breakers)
    _, _, counter = open_request(table)
    for second in range(MAX_FAILURES):
        breakers.failed("mem://tokenizer.0", second, "dead")
    table.listed("tokenizer.0", [counter], 1.0)
    assert not breakers.allows("mem://tokenizer.0", 1.0)
    if listed:
        table.listed("compute.0", [counter], 1.0)
    else:
        table.text(row(counter, 0, "a"), 1.0)
    assert breakers.allows("mem://tokenizer.0", 1.0)


def test_tokens_of_a_former_attempt_are_not_counted() -> None:
    table = InflightTable()
    _, request, first = open_request(table)
    table.text(row(first, 0, "a"), 1.0)
    table.lose_worker("compute.0", 1.0)
    (retry,) = table.attempt(request.choices, route(1), 1.0)
    rows = TextGenerated()
    rows.add(first, 1, [1, 2], "xx")  # of the former attempt
    rows.add(retry.counter, 1, [3], "b")
    rows.add(retry.counter, 1, [3], "b")  # again
    table.text(rows, 2.0)
    assert table.stats["demo"].num_generated_tokens == 2


def test_breakers_hear_of_answers_that_fail_by_the_servers_fault_and_of_good_ones() -> None:
    breakers = CircuitBreakers()
    table = InflightTable(breakers)
    nan = Failure(500, "nonfinite_logits", "not finite")
    for now_s, failure in enumerate((nan, nan, Failure(400, "bad", "bad"), FULL)):
        table.text(row(open_request(table)[2], 0, "", "failed", failure), now_s)
    assert breakers.allows("mem://compute.0", 5.0)
    table.text(row(open_request(table)[2], 0, "a", "stop"), 5.0)
    for now_s in range(6, 6 + MAX_FAILURES):
        assert breakers.allows("mem://compute.0", now_s)
        table.text(row(open_request(table)[2], 0, "", "failed", nan), now_s)
    assert not breakers.allows("mem://compute.0", now_s)


def test_the_choices_that_fail_in_one_step_are_one_failure_of_their_compute() -> None:
    breakers = CircuitBreakers()
    table = InflightTable(breakers)
    again = Failure(500, "nonfinite_logits", "not finite", None, True)
    _, _, first = open_request(table, 20)
    rows = TextGenerated()
    for counter in range(first, first + 20):
        rows.add(counter, 0, [], "")
        rows.end(Ending("failed", Usage(5, 0, 0), None, again))
    table.text(rows, 1.0)
    assert len(table.displaced) == 20
    assert breakers.allows("mem://compute.0", 1.0)
