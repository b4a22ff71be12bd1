"""Requests that wait for their grammars: whatever happens meanwhile, each has one terminal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.messages.address import AttemptId
from common.messages.failure import Failure
from common.messages.generate import Generate
from common.messages.sampling import GrammarSpec
from services.compute.grammar_queue import GrammarQueue
from services.compute.scheduler.outputs import Output, SequenceOutput, sequence_outputs
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.scheduler_loop import ROUTER, make_request

BAD = Failure(400, "invalid_grammar", "No.", "tools")


class Desk:
    """A grammar queue whose grammars are ready when the test says so."""

    def __init__(self, max_held: int = 8) -> None:
        self.scheduler = Scheduler(make_spec(), SchedulerSettings(), DecodeFirst())
        self.events: list[SequenceOutput] = []
        self.compilations: dict[int, Callable[[Failure | None], None]] = {}
        self.going_on: list[bool] = []
        self.num_calls = 0
        self.queue = GrammarQueue(self.scheduler, self, max_held, self._tell, lambda: 0.0)

    def prepare(
        self,
        grammar_spec: GrammarSpec,
        done: Callable[[Failure | None], None],
        client: str = "",
        goes_on: bool = False,
    ) -> int:
        number = len(self.compilations) + 1
        self.going_on.append(goes_on)
        self.compilations[number] = done
        return number

    def cancel(self, number: int) -> None:
        self.compilations.pop(number, None)

    def _tell(self, news: list[Output]) -> None:
        self.num_calls += 1
        self.events += sequence_outputs(news)

    def add(self, counter: int, **more: object) -> None:
        self.queue.add_request(make_request(counter, **more), 0.0)  # type: ignore[arg-type]

    def hold(self, counter: int, **more: object) -> None:
        grammar_spec = GrammarSpec("start: /a/", field="tools")
        self.add(counter, ignore_eos=False, grammar_spec=grammar_spec, **more)

    def abort(self, counter: int) -> None:
        self.queue.abort(AttemptId(ROUTER, counter), 0.0)

    @property
    def ends(self) -> dict[int, str]:
        """How each attempt ended, here or in the scheduler; a second end is an error."""
        self.events += sequence_outputs(self.scheduler.drain_outputs())
        ends: dict[int, str] = {}
        for event in self.events:
            assert event.ending is not None and event.opened
            assert event.attempt.counter not in ends
            ends[event.attempt.counter] = event.ending.reason
        return ends

    def ready(self, failure: Failure | None = None) -> None:
        (number,) = self.compilations
        self.compilations.pop(number)(failure)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_requests_without_guidance_pass(desk: Desk) -> None:
    desk.add(1)
    assert desk.scheduler.open_attempts(ROUTER) == [1]
    assert desk.compilations == {}


def test_a_structured_request_goes_on_when_its_grammar_is_ready(desk: Desk) -> None:
    desk.hold(1, num_choices=2)
    assert desk.scheduler.open_attempts(ROUTER) == []
    assert desk.queue.open_attempts(ROUTER) == [1, 2]
    assert desk.queue.open_attempts("another") == []
    assert len(desk.queue) == 2
    desk.ready()
    assert len(desk.queue) == 0
    assert desk.scheduler.open_attempts(ROUTER) == [1, 2]
    assert desk.num_calls == 1


def test_a_bad_grammar_refuses_every_choice(desk: Desk) -> None:
    desk.hold(1, num_choices=3)
    desk.ready(BAD)
    assert desk.ends == {1: "refused", 2: "refused", 3: "refused"}
    assert all(event.ending and event.ending.failure == BAD for event in desk.events)
    assert desk.events[0].header == b"header 1"
    assert len(desk.queue) == 0


def test_an_abort_ends_one_choice_and_the_others_go_on_as_they_were(desk: Desk) -> None:
    desk.hold(1, num_choices=5, first_choice=10)
    for counter in (2, 4):
        desk.abort(counter)
    assert desk.ends == {2: "aborted", 4: "aborted"}
    assert desk.queue.open_attempts(ROUTER) == [1, 3, 5]
    desk.ready()
    assert desk.scheduler.open_attempts(ROUTER) == [1, 3, 5]
    assert sorted(s.choice for s in desk.scheduler._state.attempts) == [10, 12, 14]


def test_who_aborts_all_of_a_request_is_not_prepared_for(desk: Desk) -> None:
    desk.hold(1, num_choices=2)
    desk.abort(1)
    assert desk.compilations
    desk.abort(2)
    assert desk.compilations == {}
    assert desk.ends == {1: "aborted", 2: "aborted"}


def test_an_abort_of_what_is_not_here_is_the_schedulers(desk: Desk) -> None:
    desk.abort(1)
    desk.hold(1)
    desk.ready()
    assert desk.ends == {1: "aborted"}


def test_the_same_attempt_twice_is_held_once(desk: Desk) -> None:
    desk.hold(1, num_choices=2)
    desk.hold(1, num_choices=2)
    desk.ready()
    desk.hold(1, num_choices=3)
    desk.ready()
    assert desk.scheduler.open_attempts(ROUTER) == [1, 2, 3]
    assert desk.ends == {}


def test_an_attempt_that_runs_is_not_held_as_well_and_ends_once(desk: Desk) -> None:
    desk.hold(1)
    desk.ready()
    desk.hold(1)
    assert len(desk.queue) == 0
    desk.abort(1)
    assert desk.queue.open_attempts(ROUTER) == []
    assert desk.ends == {1: "aborted"}


def test_the_end_of_all_finds_those_that_are_held(desk: Desk) -> None:
    desk.add(1)
    desk.hold(2, num_choices=2)
    desk.hold(5)

    def is_not_five(request: Generate) -> bool:
        return request.attempt.counter != 5

    desk.queue.end_all(is_not_five, "moved", 0.0)
    assert desk.ends == {1: "moved", 2: "moved", 3: "moved"}
    desk.ready()
    assert desk.scheduler.open_attempts(ROUTER) == [5]


def test_beyond_its_bound_it_refuses_for_now() -> None:
    desk = Desk(max_held=3)
    desk.hold(1, num_choices=5)  # alone, any number
    desk.hold(10)
    assert desk.ends == {10: "refused"}
    (event,) = desk.events
    assert event.ending is not None and event.ending.failure is not None
    assert event.ending.failure.retryable and event.ending.failure.status == 503


def test_an_absurd_number_of_choices_is_for_the_door_to_refuse(desk: Desk) -> None:
    desk.hold(1, num_choices=10**6)
    assert len(desk.queue) == 0
    assert desk.compilations == {}


def test_a_client_that_fills_the_queue_gives_up_its_latest_places_to_others() -> None:
    desk = Desk(max_held=4)
    desk.hold(1, client="flood")
    desk.hold(2, num_choices=3, client="flood")
    desk.hold(5, client="other")
    assert desk.ends == {4: "refused"}
    assert desk.queue.open_attempts(ROUTER) == [1, 2, 3, 5]
    desk.hold(6, client="flood")
    desk.hold(7, num_choices=2, client="other")
    assert desk.ends == dict.fromkeys((4, 6, 7, 8), "refused"), "nobody keeps more than they have"
    failures = [event.ending.failure for event in desk.events if event.ending is not None]
    assert {failure.code for failure in failures if failure is not None} == {"overloaded"}


def test_a_request_that_gave_up_its_place_is_not_compiled_for() -> None:
    desk = Desk(max_held=2)
    desk.hold(1, client="flood")
    desk.hold(2, client="flood")
    given_up = desk.compilations[2]
    desk.hold(3, client="other")
    assert desk.ends == {2: "refused"}
    assert given_up not in desk.compilations.values() and len(desk.compilations) == 2


def test_its_compiler_is_told_what_a_client_reads_already(desk: Desk) -> None:
    desk.hold(1)
    desk.hold(2, output_ids=(7, 8))
    assert desk.going_on == [False, True]
