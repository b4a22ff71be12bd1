"""The guide's client with a process that only listens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.messages.failure import Failure
from common.messages.guidance import Guidance
from services.compute.grammar.client import (
    MAX_EARLY_DEATHS,
    RETRY_S,
    START_TIMEOUT_S,
    GuideClient,
)
from services.compute.grammar.frames import (
    Advance,
    Broken,
    Failed,
    Made,
    Order,
    Place,
    Prepare,
    Prepared,
    Ready,
)
from services.compute.grammar.masks import MaskMemory, stamp
from services.compute.grammar.process import Exited, Reported
from services.compute.grammar.settings import GuideSettings
from tests.unit.compute.grammar.guided_plans import make_delta, make_plan, make_result


class Listener:
    """A process that does nothing by itself."""

    def __init__(self, memory: MaskMemory, reported: Reported, exited: Exited) -> None:
        self.memory, self.report, self.exit = memory, reported, exited
        self.orders: list[Order] = []
        self.killed = self.closed = False

    def send(self, order: Order) -> None:
        self.orders.append(order)

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True

    def make(self, slot: int, epoch: int, index: int) -> None:
        self.memory.name(slot, 0, epoch, index)
        self.report(Made())


class Desk:
    """A client whose processes are listeners, and the time."""

    def __init__(self) -> None:
        self.processes: list[Listener] = []
        self.spawn_errors: list[OSError] = []
        self.now_s = 0.0
        self.num_news = 0
        self.told: list[Failure | None] = []
        settings = GuideSettings(
            folder="", vocab_size=64, eos_token_ids=(2,), num_slots=4, max_grammar_bytes=100
        )
        self.client = GuideClient(settings, self._spawn, self._news, lambda: self.now_s)

    def _spawn(
        self, settings: GuideSettings, memory: MaskMemory, reported: Reported, exited: Exited
    ) -> Listener:
        if self.spawn_errors:
            raise self.spawn_errors.pop()
        self.processes.append(Listener(memory, reported, exited))
        return self.processes[-1]

    def _news(self) -> None:
        self.num_news += 1

    def prepare(self, grammar: str) -> int:
        return self.client.prepare(Guidance(grammar, field="tools"), self.told.append)

    @property
    def process(self) -> Listener:
        return self.processes[-1]


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.client.close()


def test_what_comes_before_the_guide_is_ready_waits(desk: Desk) -> None:
    desk.client.start()
    desk.prepare("start: /a/")
    desk.prepare("")
    assert desk.process.orders == [] and desk.told == []
    desk.process.report(Ready())
    assert desk.told == [None]  # without a grammar there is nothing more to wait for
    assert desk.process.orders == [Prepare(1, "start: /a/")]
    desk.process.report(Prepared(1))
    assert desk.told == [None, None]


def test_the_first_that_needs_a_guide_starts_it(desk: Desk) -> None:
    assert desk.processes == []
    desk.prepare("start: /a/")
    desk.prepare("")
    assert len(desk.processes) == 1


def test_a_refused_grammar_is_told_with_its_field(desk: Desk) -> None:
    desk.client.start()
    desk.process.report(Ready())
    desk.prepare("start: b")
    desk.process.report(Prepared(1, "unknown name"))
    (failure,) = desk.told
    assert failure is not None
    assert (failure.status, failure.code, failure.field) == (400, "invalid_grammar", "tools")
    assert "unknown name" in failure.message


def test_a_grammar_beyond_the_limit_never_reaches_the_guide(desk: Desk) -> None:
    desk.client.start()
    desk.process.report(Ready())
    desk.prepare("ä" * 51)
    (failure,) = desk.told
    assert failure is not None and failure.code == "grammar_too_large"
    assert desk.process.orders == []


def test_who_has_gone_is_not_told(desk: Desk) -> None:
    desk.client.start()
    for number in (desk.prepare("start: /a/"), desk.prepare("")):
        desk.client.cancel(number)
    desk.process.report(Ready())
    assert desk.told == []


def test_a_new_guide_is_told_all_that_the_old_one_knew(desk: Desk) -> None:
    desk.client.start()
    desk.process.report(Ready())
    desk.client.place([make_delta(0), make_delta(1)])
    desk.process.make(0, 1, 0)
    plan = make_plan((0, 1, 0))
    desk.client.advance(plan, make_result(7), frozenset())
    desk.prepare("start: /a/")
    assert [type(order) for order in desk.process.orders] == [Place, Place, Advance, Prepare]
    desk.process.exit(-9)
    assert len(desk.processes) == 2
    desk.client.place([make_delta(2)])
    assert desk.process.orders == []
    desk.process.report(Ready())
    placed = [order for order in desk.process.orders if isinstance(order, Place)]
    assert [(order.slot, order.output_ids) for order in placed] == [(0, (7,)), (1, ()), (2, ())]
    assert desk.process.orders[-1] == Prepare(1, "start: /a/")


def test_masks_and_failures_are_news(desk: Desk) -> None:
    desk.client.start()
    desk.process.report(Ready())
    desk.client.place([make_delta(0), make_delta(1)])
    plan = make_plan((0, 1, 0), (1, 1, 0))
    desk.process.make(0, 1, 0)
    assert desk.client.look(plan).ready.tolist() == [True, False]
    desk.process.report(Failed(1, 1, "too many states"))
    assert list(desk.client.look(plan).failures) == [1]
    assert desk.num_news == 2


def test_a_guide_that_is_stuck_in_a_grammar_is_killed(desk: Desk) -> None:
    desk.client.start()
    desk.process.report(Ready())
    desk.prepare("start: /a/")
    desk.client.tick(4.9)
    assert not desk.process.killed
    desk.client.tick(5.0)
    assert desk.process.killed
    (failure,) = desk.told
    assert failure is not None and failure.code == "grammar_timeout"


def test_a_guide_that_is_stuck_in_a_mask_is_killed(desk: Desk) -> None:
    desk.client.start()
    desk.process.report(Ready())
    desk.client.place([make_delta(0)])
    desk.client.tick(9.9)
    assert not desk.process.killed
    desk.process.memory.lane_slots[0], desk.process.memory.lanes[0] = 0, stamp(1, 0)
    desk.client.tick(10.0)
    assert not desk.process.killed
    desk.client.tick(20.0)
    assert desk.process.killed
    assert list(desk.client.look(make_plan((0, 1, 0))).failures) == [0]


def test_a_guide_that_starts_slowly_is_given_time_but_not_any(desk: Desk) -> None:
    desk.client.start()
    desk.prepare("start: /a/")
    desk.client.tick(100.0)
    assert not desk.process.killed and desk.told == []
    desk.client.tick(START_TIMEOUT_S)
    assert desk.process.killed


def test_a_guide_that_never_comes_up_is_given_up(desk: Desk) -> None:
    desk.client.start()
    desk.prepare("start: /a/")
    desk.prepare("")
    for deaths in range(1, MAX_EARLY_DEATHS + 1):
        assert len(desk.processes) == deaths
        desk.process.exit(1)
        desk.client.tick(desk.now_s)
        assert len(desk.processes) == deaths, "it waits a little"
        desk.now_s += 10.0
        desk.client.tick(desk.now_s)
    assert [failure and failure.code for failure in desk.told] == ["guide_failed"] * 2
    desk.prepare("start: /b/")
    assert len(desk.told) == 3
    assert len(desk.processes) == MAX_EARLY_DEATHS


def test_a_guide_that_was_given_up_is_tried_again_later(desk: Desk) -> None:
    desk.client.start()
    for _ in range(MAX_EARLY_DEATHS):
        desk.process.exit(-9)
        desk.now_s += 10.0
        desk.client.tick(desk.now_s)
    desk.now_s += RETRY_S
    desk.client.tick(desk.now_s)
    assert len(desk.processes) == MAX_EARLY_DEATHS + 1
    desk.prepare("start: /a/")
    desk.process.report(Ready())
    desk.prepare("start: /b/")
    desk.process.report(Prepared(1))
    assert [failure and failure.code for failure in desk.told] == ["guide_failed", None]


def test_a_guide_that_cannot_be_started_now_is_started_later(desk: Desk) -> None:
    desk.spawn_errors = [OSError("too many open files")] * 2
    desk.prepare("start: /a/")
    assert desk.processes == [] and desk.told == []
    for _ in range(2):
        desk.now_s += 1.0
        desk.client.tick(desk.now_s)
    desk.process.report(Ready())
    assert desk.process.orders == [Prepare(1, "start: /a/")]


def test_a_guide_that_cannot_load_says_why(desk: Desk) -> None:
    desk.client.start()
    desk.client.place([make_delta(0)])
    desk.prepare("start: /a/")
    desk.process.report(Broken("the tokenizer is damaged"))
    desk.process.exit(1)
    (failure,) = desk.told
    assert failure is not None and "the tokenizer is damaged" in failure.message
    assert list(desk.client.look(make_plan((0, 1, 0))).failures) == [0]
    desk.now_s += 100.0
    desk.client.tick(desk.now_s)
    assert len(desk.processes) == 1


def test_the_end_closes_the_process(desk: Desk) -> None:
    desk.client.start()
    desk.client.close()
    desk.client.close()
    assert desk.process.closed
