"""The grammar manager with a process that only listens."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import pytest

from common.child_main import HEADER
from common.child_process import Exited, Received
from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec
from services.compute.grammar.manager import (
    MAX_FAILED_STARTS,
    RETRY_S,
    START_TIMEOUT_S,
    GrammarManager,
)
from services.compute.grammar.protocol import (
    AcceptTokens,
    CompileGrammar,
    GrammarCompiled,
    GrammarSettings,
    MaskMemory,
    MasksWritten,
    Order,
    Report,
    SequenceFailed,
    StartSequence,
    pack_report,
    stamp,
    unpack_order,
)
from tests.unit.compute.grammar.structured_plans import make_delta, make_result, structured_plan


class Listener:
    """A process that does nothing by itself."""

    is_stopped = False

    def __init__(self, memory: MaskMemory, received: Received, exited: Exited) -> None:
        self.memory, self.exit = memory, exited
        self._received = received
        self.orders: list[Order] = []
        self.killed = self.closed = False

    def send(self, frame: bytes) -> None:
        self.orders.append(unpack_order(frame[HEADER.size :]))

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True

    def ready(self) -> None:
        self._received(msgpack.packb(["ready"]))

    def cannot_load(self, why: str) -> None:
        self._received(msgpack.packb(["broken", why]))

    def report(self, report: Report) -> None:
        self._received(pack_report(report)[HEADER.size :])

    def make(self, slot: int, epoch: int, index: int) -> None:
        self.memory.name(slot, 0, epoch, index)
        self.report(MasksWritten())


class Desk:
    """A manager whose processes are listeners, and the time."""

    def __init__(self) -> None:
        self.processes: list[Listener] = []
        self.spawn_errors: list[OSError] = []
        self.now_s = 0.0
        self.num_notified = 0
        self.answers: list[Failure | None] = []
        settings = GrammarSettings(
            folder="", vocab_size=64, eos_token_ids=(2,), num_slots=4, max_grammar_bytes=100
        )
        self.manager = GrammarManager(settings, self._spawn, self._notified, lambda: self.now_s)

    def _spawn(
        self, settings: GrammarSettings, memory: MaskMemory, received: Received, exited: Exited
    ) -> Listener:
        if self.spawn_errors:
            raise self.spawn_errors.pop()
        self.processes.append(Listener(memory, received, exited))
        return self.processes[-1]

    def _notified(self) -> None:
        self.num_notified += 1

    def prepare(self, grammar: str) -> int:
        return self.manager.prepare(GrammarSpec(grammar, field="tools"), self.answers.append)

    @property
    def process(self) -> Listener:
        return self.processes[-1]


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.manager.close()


def test_what_comes_before_the_worker_is_ready_waits(desk: Desk) -> None:
    desk.manager.start()
    desk.prepare("start: /a/")
    desk.prepare("")
    assert desk.process.orders == [] and desk.answers == []
    desk.process.ready()
    assert desk.answers == [None]  # without a grammar there is nothing more to wait for
    assert desk.process.orders == [CompileGrammar(1, "start: /a/")]
    desk.process.report(GrammarCompiled(1))
    assert desk.answers == [None, None]


def test_the_first_that_needs_a_worker_starts_it(desk: Desk) -> None:
    assert desk.processes == []
    desk.prepare("start: /a/")
    desk.prepare("")
    assert len(desk.processes) == 1


def test_a_refused_grammar_names_its_field(desk: Desk) -> None:
    desk.manager.start()
    desk.process.ready()
    desk.prepare("start: b")
    desk.process.report(GrammarCompiled(1, "unknown name"))
    (failure,) = desk.answers
    assert failure is not None
    assert (failure.status, failure.code, failure.field) == (400, "invalid_grammar", "tools")
    assert "unknown name" in failure.message


def test_a_grammar_beyond_the_limit_never_reaches_the_worker(desk: Desk) -> None:
    desk.manager.start()
    desk.process.ready()
    desk.prepare("ä" * 51)
    (failure,) = desk.answers
    assert failure is not None and failure.code == "grammar_too_large"
    assert desk.process.orders == []


def test_a_cancelled_request_gets_no_answer(desk: Desk) -> None:
    desk.manager.start()
    for number in (desk.prepare("start: /a/"), desk.prepare("")):
        desk.manager.cancel(number)
    desk.process.ready()
    assert desk.answers == []


def test_a_new_worker_gets_all_that_the_old_one_had(desk: Desk) -> None:
    desk.manager.start()
    desk.process.ready()
    desk.manager.place([make_delta(0), make_delta(1)])
    desk.process.make(0, 1, 0)
    plan = structured_plan((0, 1, 0))
    desk.manager.advance(plan, make_result(7), frozenset())
    desk.prepare("start: /a/")
    assert [type(order) for order in desk.process.orders] == [
        StartSequence,
        StartSequence,
        AcceptTokens,
        CompileGrammar,
    ]
    desk.process.exit(-9)
    assert len(desk.processes) == 2
    desk.manager.place([make_delta(2)])
    assert desk.process.orders == []
    desk.process.ready()
    placed = [order for order in desk.process.orders if isinstance(order, StartSequence)]
    assert [(order.slot, order.output_ids) for order in placed] == [(0, (7,)), (1, ()), (2, ())]
    assert desk.process.orders[-1] == CompileGrammar(1, "start: /a/")


def test_masks_and_failures_are_notified(desk: Desk) -> None:
    desk.manager.start()
    desk.process.ready()
    desk.manager.place([make_delta(0), make_delta(1)])
    plan = structured_plan((0, 1, 0), (1, 1, 0))
    desk.process.make(0, 1, 0)
    assert desk.manager.look(plan).ready.tolist() == [True, False]
    desk.process.report(SequenceFailed(1, 1, "too many states"))
    assert list(desk.manager.look(plan).failures) == [1]
    assert desk.num_notified == 2


def test_a_worker_that_is_stuck_in_a_grammar_is_killed(desk: Desk) -> None:
    desk.manager.start()
    desk.process.ready()
    desk.prepare("start: /a/")
    desk.manager.tick(4.9)
    assert not desk.process.killed
    desk.manager.tick(5.0)
    assert desk.process.killed
    (failure,) = desk.answers
    assert failure is not None and failure.code == "grammar_timeout"


def test_a_worker_that_is_stuck_in_a_mask_is_killed(desk: Desk) -> None:
    desk.manager.start()
    desk.process.ready()
    desk.manager.place([make_delta(0)])
    desk.manager.tick(9.9)
    assert not desk.process.killed
    desk.process.memory.thread_slots[0], desk.process.memory.thread_stamps[0] = 0, stamp(1, 0)
    desk.manager.tick(10.0)
    assert not desk.process.killed
    desk.manager.tick(20.0)
    assert desk.process.killed
    assert list(desk.manager.look(structured_plan((0, 1, 0))).failures) == [0]


def test_a_worker_that_starts_slowly_is_given_time_but_not_any(desk: Desk) -> None:
    desk.manager.start()
    desk.prepare("start: /a/")
    desk.manager.tick(100.0)
    assert not desk.process.killed and desk.answers == []
    desk.manager.tick(START_TIMEOUT_S)
    assert desk.process.killed


def test_a_worker_that_never_comes_up_is_given_up(desk: Desk) -> None:
    desk.manager.start()
    desk.manager.place([make_delta(0)])
    desk.prepare("start: /a/")
    desk.prepare("")
    for deaths in range(1, MAX_FAILED_STARTS + 1):
        assert len(desk.processes) == deaths
        desk.process.exit(1)
        desk.manager.tick(desk.now_s)
        assert len(desk.processes) == deaths, "it waits a little"
        desk.now_s += 10.0
        desk.manager.tick(desk.now_s)
    assert [failure and failure.code for failure in desk.answers] == ["guide_failed"] * 2
    assert all(failure and failure.retryable for failure in desk.answers), "at another replica"
    assert desk.manager.look(structured_plan((0, 1, 0))).failures[0].retryable
    desk.prepare("start: /b/")
    assert len(desk.answers) == 3
    assert len(desk.processes) == MAX_FAILED_STARTS


def test_a_worker_that_was_given_up_is_tried_again_later(desk: Desk) -> None:
    desk.manager.start()
    for _ in range(MAX_FAILED_STARTS):
        desk.process.exit(-9)
        desk.now_s += 10.0
        desk.manager.tick(desk.now_s)
    desk.now_s += RETRY_S
    desk.manager.tick(desk.now_s)
    assert len(desk.processes) == MAX_FAILED_STARTS + 1
    desk.prepare("start: /a/")
    desk.process.ready()
    desk.prepare("start: /b/")
    desk.process.report(GrammarCompiled(1))
    assert [failure and failure.code for failure in desk.answers] == ["guide_failed", None]


def test_a_worker_that_cannot_be_started_now_is_started_later(desk: Desk) -> None:
    desk.spawn_errors = [OSError("too many open files")] * 2
    desk.prepare("start: /a/")
    assert desk.processes == [] and desk.answers == []
    for _ in range(2):
        desk.now_s += 1.0
        desk.manager.tick(desk.now_s)
    desk.process.ready()
    assert desk.process.orders == [CompileGrammar(1, "start: /a/")]


def test_a_worker_that_cannot_load_says_why(desk: Desk) -> None:
    desk.manager.start()
    desk.manager.place([make_delta(0)])
    desk.prepare("start: /a/")
    desk.process.cannot_load("the tokenizer is damaged")
    desk.process.exit(1)
    (failure,) = desk.answers
    assert failure is not None and "the tokenizer is damaged" in failure.message
    assert not failure.retryable, "the others have the same tokenizer"
    assert list(desk.manager.look(structured_plan((0, 1, 0))).failures) == [0]
    desk.now_s += 100.0
    desk.manager.tick(desk.now_s)
    assert len(desk.processes) == 1


def test_the_end_closes_the_process(desk: Desk) -> None:
    desk.manager.start()
    desk.manager.close()
    desk.manager.close()
    assert desk.process.closed
