"""What the in-flight table observes of times: first tokens, intervals, queues."""

from __future__ import annotations

from common.messages.arrays import int32s
from common.messages.failure import Ending, Usage
from common.messages.text import TextGenerated
from services.router.inflight import InflightTable
from tests.unit.router.recorder import open_request, row


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


def test_a_request_of_which_one_choice_has_ended_has_begun_also_without_tokens() -> None:
    table = InflightTable()
    _, request, first = open_request(table, 2)
    assert not request.has_begun
    table.text(row(first, 0, "", "stop"), 1.0)  # an embedding
    assert request.num_open == 1
    assert request.has_begun
