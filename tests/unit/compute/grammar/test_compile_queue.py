"""Who is compiled when, and whose fault a dead compiler is."""

from __future__ import annotations

import pytest

from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec
from services.compute.grammar.compile_queue import CompileQueue


class Asked:
    """Somebody who waits for a grammar."""

    def __init__(self, queue: CompileQueue, grammar: str) -> None:
        self.told: list[Failure | None] = []
        self.number = queue.add(GrammarSpec(grammar, field="tools"), self.told.append)

    @property
    def code(self) -> str:
        (failure,) = self.told
        return "" if failure is None else failure.code


@pytest.fixture
def queue() -> CompileQueue:
    return CompileQueue(timeout_s=5.0, max_known=2)


def sent(queue: CompileQueue, now_s: float = 0.0) -> list[str]:
    return [grammar for _, grammar in queue.next(now_s)]


def test_unknown_grammars_are_compiled_one_at_a_time(queue: CompileQueue) -> None:
    first, second = Asked(queue, "a"), Asked(queue, "b")
    assert sent(queue) == ["a"]
    assert sent(queue) == []
    queue.finished(first.number, "")
    assert first.told == [None]
    assert sent(queue) == ["b"]
    queue.finished(second.number, "no such rule")
    assert second.code == "invalid_grammar"
    assert second.told[0] is not None and second.told[0].field == "tools"
    assert len(queue) == 0


def test_known_grammars_pass_one_that_is_being_compiled(queue: CompileQueue) -> None:
    known = Asked(queue, "a")
    sent(queue)
    queue.finished(known.number, "")
    Asked(queue, "slow"), Asked(queue, "other"), Asked(queue, "a"), Asked(queue, "a")
    assert sent(queue) == ["slow", "a", "a"]


def test_what_is_not_used_is_forgotten(queue: CompileQueue) -> None:
    for grammar in "abc":
        asked = Asked(queue, grammar)
        sent(queue)
        queue.finished(asked.number, "")
    for grammar in "abc":
        Asked(queue, grammar)
    assert sent(queue) == ["a", "b", "c"]  # a as an unknown one, b and c as known ones


def test_what_takes_too_long_is_refused_and_the_worker_must_die(queue: CompileQueue) -> None:
    slow, other = Asked(queue, "slow"), Asked(queue, "other")
    sent(queue, 1.0)
    assert queue.overdue(5.9) is False
    assert queue.overdue(6.0) is True
    assert slow.code == "grammar_timeout"
    queue.worker_died()
    assert other.told == []
    assert sent(queue, 7.0) == ["other"]


def test_a_grammar_at_whose_compilation_the_worker_dies_twice_is_refused(
    queue: CompileQueue,
) -> None:
    deadly, other = Asked(queue, "deadly"), Asked(queue, "other")
    sent(queue)
    queue.worker_died()
    assert deadly.told == []
    assert sent(queue) == ["deadly"]
    queue.worker_died()
    assert deadly.code == "invalid_grammar"
    assert sent(queue) == ["other"]
    queue.finished(other.number, "")
    assert other.told == [None]


def test_who_has_gone_is_not_told(queue: CompileQueue) -> None:
    running, waiting = Asked(queue, "a"), Asked(queue, "b")
    sent(queue)
    queue.cancel(running.number)
    queue.cancel(waiting.number)
    queue.cancel(999)
    queue.finished(running.number, "")
    assert running.told == waiting.told == []
    assert len(queue) == 0
    queue.finished(running.number, "")


def test_a_cancelled_grammar_is_not_compiled_again(queue: CompileQueue) -> None:
    running = Asked(queue, "a")
    sent(queue)
    queue.cancel(running.number)
    queue.worker_died()
    assert len(queue) == 0
    assert sent(queue) == []


def test_without_a_worker_every_request_fails(queue: CompileQueue) -> None:
    asked = [Asked(queue, "a"), Asked(queue, "b")]
    sent(queue)
    queue.fail_all(Failure(500, "guide_failed", "It cannot start."))
    assert [each.code for each in asked] == ["guide_failed"] * 2
