"""Who is compiled when, and whose fault a dead compiler is."""

from __future__ import annotations

import pytest

from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec
from services.compute.grammar.manager import CompileQueue


class Request:
    """Somebody who waits for a grammar."""

    def __init__(
        self, queue: CompileQueue, grammar: str, client: str = "", goes_on: bool = False
    ) -> None:
        self.answers: list[Failure | None] = []
        spec = GrammarSpec(grammar, field="tools")
        self.number = queue.add(spec, self.answers.append, client, goes_on)

    @property
    def code(self) -> str:
        (failure,) = self.answers
        return "" if failure is None else failure.code


@pytest.fixture
def queue() -> CompileQueue:
    return CompileQueue(timeout_s=5.0, max_known=2)


def sent(queue: CompileQueue, now_s: float = 0.0) -> list[str]:
    return [grammar for _, grammar in queue.next(now_s)]


def test_unknown_grammars_are_compiled_one_at_a_time(queue: CompileQueue) -> None:
    first, second = Request(queue, "a"), Request(queue, "b")
    assert sent(queue) == ["a"]
    assert sent(queue) == []
    queue.finished(first.number, "", 0.0)
    assert first.answers == [None]
    assert sent(queue) == ["b"]
    queue.finished(second.number, "no such rule", 0.0)
    assert second.code == "invalid_grammar"
    assert second.answers[0] is not None and second.answers[0].field == "tools"
    assert len(queue) == 0


def test_known_grammars_pass_one_that_is_being_compiled(queue: CompileQueue) -> None:
    known = Request(queue, "a")
    sent(queue)
    queue.finished(known.number, "", 0.0)
    Request(queue, "slow"), Request(queue, "other"), Request(queue, "a"), Request(queue, "a")
    assert sent(queue) == ["slow", "a", "a"]


def test_what_is_not_used_is_forgotten(queue: CompileQueue) -> None:
    for grammar in "abc":
        request = Request(queue, grammar)
        sent(queue)
        queue.finished(request.number, "", 0.0)
    for grammar in "abc":
        Request(queue, grammar)
    assert sent(queue) == ["a", "b", "c"]  # a as an unknown one, b and c as known ones


def test_what_takes_too_long_is_refused_and_the_worker_must_die(queue: CompileQueue) -> None:
    slow, other = Request(queue, "slow"), Request(queue, "other")
    sent(queue, 1.0)
    assert queue.overdue(5.9) is False
    assert queue.overdue(6.0) is True
    assert slow.code == "grammar_timeout"
    queue.worker_died(6.0)
    assert other.answers == []
    assert sent(queue, 7.0) == ["other"]


def test_a_grammar_at_whose_compilation_the_worker_dies_twice_is_refused(
    queue: CompileQueue,
) -> None:
    deadly, other = Request(queue, "deadly"), Request(queue, "other")
    sent(queue)
    queue.worker_died(0.0)
    assert deadly.answers == []
    assert sent(queue) == ["deadly"]
    queue.worker_died(0.0)
    assert deadly.code == "invalid_grammar"
    assert sent(queue) == ["other"]
    queue.finished(other.number, "", 0.0)
    assert other.answers == [None]


def test_a_cancelled_request_gets_no_answer(queue: CompileQueue) -> None:
    running, waiting = Request(queue, "a"), Request(queue, "b")
    sent(queue)
    queue.cancel(running.number)
    queue.cancel(waiting.number)
    queue.cancel(999)
    queue.finished(running.number, "", 0.0)
    assert running.answers == waiting.answers == []
    assert len(queue) == 0
    queue.finished(running.number, "", 0.0)


def test_a_cancelled_grammar_is_not_compiled_again(queue: CompileQueue) -> None:
    running = Request(queue, "a")
    sent(queue)
    queue.cancel(running.number)
    queue.worker_died(0.0)
    assert len(queue) == 0
    assert sent(queue) == []


def test_without_a_worker_every_request_fails(queue: CompileQueue) -> None:
    requests = [Request(queue, "a"), Request(queue, "b")]
    sent(queue)
    queue.fail_all(Failure(500, "guide_failed", "It cannot start."))
    assert [request.code for request in requests] == ["guide_failed"] * 2


def compiled(queue: CompileQueue, now_s: float, seconds: dict[str, float]) -> list[str]:
    """Compile all that wait; what is not in `seconds` takes none. Returns what came when."""
    order = []
    while len(queue):
        ((number, grammar),) = queue.next(now_s)
        now_s += seconds.get(grammar, 0.0)
        queue.finished(number, "", now_s)
        order.append(grammar)
    return order


def test_a_client_with_many_costly_grammars_makes_another_wait_for_one_of_them() -> None:
    queue = CompileQueue(timeout_s=5.0, max_known=1000)
    costly = {f"costly {number}": 4.0 for number in range(500)}
    for grammar in costly:
        Request(queue, grammar, "flood")
    assert sent(queue) == ["costly 0"]
    for grammar in ("small 0", "small 1", "small 2"):
        Request(queue, grammar, "other")
    assert sent(queue) == [], "one at a time"
    queue.finished(1, "", 4.0)
    order = compiled(queue, 4.0, costly)
    assert order[:4] == ["small 0", "small 1", "small 2", "costly 1"]


def test_clients_of_equal_grammars_take_turns() -> None:
    queue = CompileQueue(timeout_s=5.0, max_known=1000)
    names = [f"{client}{number}" for client in "ab" for number in range(3)]
    for name in names:
        Request(queue, name, name[0])
    assert compiled(queue, 0.0, dict.fromkeys(names, 1.0)) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_nobody_saves_up_time_at_the_compiler_and_what_fails_counts() -> None:
    queue = CompileQueue(timeout_s=5.0, max_known=1000)
    seconds = {f"a{number}": 1.0 for number in range(8)}
    for name in list(seconds)[:4]:
        Request(queue, name, "a")
    compiled(queue, 0.0, seconds)
    for name in ("a4", "a5", "b0", "b1", "b2"):
        Request(queue, name, name[0])
    order = compiled(queue, 10.0, {**seconds, "b0": 1.0, "b1": 1.0, "b2": 1.0})
    assert order == ["a4", "b0", "a5", "b1", "b2"]
    slow, other = Request(queue, "slow", "a"), Request(queue, "c0", "c")
    assert sent(queue, 20.0) == ["slow"]
    assert queue.overdue(25.0)
    queue.worker_died(0.0)
    assert slow.code == "grammar_timeout" and other.answers == []
    Request(queue, "a7", "a")
    assert sent(queue, 25.0) == ["c0"]


def test_a_client_pays_for_the_time_in_which_the_worker_died_of_its_grammar(
    queue: CompileQueue,
) -> None:
    Request(queue, "deadly", "flood")
    assert sent(queue) == ["deadly"]
    Request(queue, "later", "flood"), Request(queue, "small", "other")
    queue.worker_died(4.0)
    assert compiled(queue, 4.0, {}) == ["small", "deadly", "later"]


def test_what_a_client_reads_already_is_compiled_first(queue: CompileQueue) -> None:
    Request(queue, "costly", "other")
    sent(queue)
    Request(queue, "new"), Request(queue, "goes on", "other", goes_on=True)
    queue.finished(1, "", 4.0)
    assert compiled(queue, 4.0, {}) == ["goes on", "new"]
