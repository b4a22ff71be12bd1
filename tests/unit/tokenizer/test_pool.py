"""The pool gives each process one job at a time and survives whatever processes do."""

from __future__ import annotations

import asyncio
import json
import signal
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from common.errors import ModelError
from common.messages.failure import Failure
from common.messages.tokenize import ChatPrompt, OutputRules, Structure, TextPrompt
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.jobs import Job, Outcome
from services.tokenizer.pool import LARGE_PROMPT_BYTES, Pool
from tests.unit.tokenizer.scripted import HandClock, Processes, ScriptedProcess

NO_RULES = OutputRules()


class Bench:
    """A pool over scripted processes, and what became of its jobs by their text."""

    def __init__(self, num_processes: int = 2) -> None:
        self.processes = Processes()
        self.clock = HandClock()
        settings = TokenizerSettings(pool_size=num_processes)
        self.pool = Pool(settings, self.processes.spawn, self.clock)
        self.outcomes: dict[str, Outcome] = {}
        self.numbers: dict[str, int] = {}

    async def start(self) -> Bench:
        starting = asyncio.ensure_future(self.pool.start())
        await asyncio.sleep(0)
        self.processes.all_ready()
        await starting
        return self

    def submit(self, text: str, chat: bool = False, rules: OutputRules = NO_RULES) -> None:
        prompt = ChatPrompt(json.dumps(text).encode()) if chat else TextPrompt(text)
        self.numbers[text] = self.pool.submit(
            Job(prompt, 0.0, rules=rules), lambda outcome: self.outcomes.__setitem__(text, outcome)
        )

    def failure(self, text: str) -> Failure:
        failure = self.outcomes[text].failure
        assert failure is not None
        return failure


async def test_jobs_go_to_free_processes_and_wait_for_the_next_one() -> None:
    bench = await Bench().start()
    for text in "abc":
        bench.submit(text)
    first, second = bench.processes.started
    assert [len(first.jobs), len(second.jobs)] == [1, 1]
    second.answer(7)
    assert bench.outcomes["b"].ids == array("i", [7])
    assert [job.prompt for job in second.jobs] == [TextPrompt("b"), TextPrompt("c")]
    assert bench.pool.num_running == 2


async def test_a_job_waits_for_a_process_that_still_loads() -> None:
    bench = Bench()
    starting = asyncio.ensure_future(bench.pool.start())
    await asyncio.sleep(0)
    bench.submit("early")
    first, second = bench.processes.started
    assert not first.jobs
    second.ready()
    await starting
    assert second.jobs and not first.jobs


async def test_a_dead_process_is_replaced_and_its_job_tried_once_more() -> None:
    bench = await Bench(num_processes=1).start()
    bench.submit("a")
    bench.submit("b")
    bench.processes.started[0].die()
    replacement = bench.processes.started[1]
    assert not replacement.jobs, "it still loads"
    replacement.ready()
    assert replacement.jobs[0].prompt == TextPrompt("a"), "it keeps its place"
    replacement.answer(1)
    replacement.answer(2)
    assert [bench.outcomes[text].ids.tolist() for text in "ab"] == [[1], [2]]


async def test_a_job_that_kills_two_processes_fails_and_the_others_go_on() -> None:
    bench = await Bench(num_processes=1).start()
    bench.submit("poison")
    bench.submit("good")
    bench.processes.started[0].die()
    bench.processes.started[1].ready()
    bench.processes.started[1].die()
    assert bench.failure("poison").status == 500
    assert bench.failure("poison").code == "tokenizer_failed"
    bench.processes.started[2].ready()
    bench.processes.started[2].answer(3)
    assert bench.outcomes["good"].ids.tolist() == [3]


async def test_a_template_killed_by_its_timer_is_the_requests_fault() -> None:
    bench = await Bench().start()
    bench.submit("loop", chat=True)
    bench.processes.busy()[0].die(-signal.SIGALRM)
    failure = bench.failure("loop")
    assert (failure.status, failure.code, failure.retryable) == (400, "template_error", False)
    assert "5 s" in failure.message


async def test_a_grammar_killed_by_its_timer_is_told_as_such() -> None:
    bench = await Bench().start()
    bench.submit("bomb", rules=OutputRules(bad_words=("x",)))
    bench.processes.busy()[0].die(-signal.SIGALRM)
    failure = bench.failure("bomb")
    assert failure.status == 400 and "the answer's grammar" in failure.message


async def test_a_schema_that_kills_two_processes_is_the_requests_fault() -> None:
    bench = await Bench(num_processes=1).start()
    bench.submit("bomb", rules=OutputRules(Structure("json_schema", "{}", "response_format")))
    bench.processes.started[0].die()
    bench.processes.started[1].ready()
    bench.processes.started[1].die()
    failure = bench.failure("bomb")
    assert (failure.status, failure.code) == (400, "invalid_grammar")
    assert failure.field == "response_format"


async def test_a_process_that_takes_too_long_is_killed_and_its_job_not_tried_again() -> None:
    bench = await Bench(num_processes=1).start()
    bench.submit("slow")
    process = bench.processes.started[0]
    bench.clock.now_s += 29.9
    bench.pool.tick()
    assert not process.killed
    bench.clock.now_s += 0.2
    bench.pool.tick()
    assert process.killed
    process.die(-signal.SIGKILL)
    assert bench.failure("slow").code == "tokenizer_timeout"


async def test_a_job_that_waited_too_long_is_given_to_another_replica() -> None:
    bench = await Bench(num_processes=1).start()
    bench.submit("first")
    bench.submit("second")
    bench.clock.now_s += 31
    bench.pool.tick()
    failure = bench.failure("second")
    assert (failure.status, failure.retryable) == (503, True)


async def test_large_prompts_leave_one_process_to_small_ones() -> None:
    bench = await Bench(num_processes=2).start()
    for letter in "xy":
        bench.submit(letter * LARGE_PROMPT_BYTES)
    assert len(bench.processes.busy()) == 1
    bench.submit("small")
    assert len(bench.processes.busy()) == 2
    large = bench.processes.busy()[0]
    large.answer(1)
    assert large.jobs[-1].prompt == TextPrompt("y" * LARGE_PROMPT_BYTES)


async def test_a_pool_of_one_takes_large_prompts_too() -> None:
    bench = await Bench(num_processes=1).start()
    bench.submit("x" * LARGE_PROMPT_BYTES)
    assert bench.processes.busy()


async def test_a_cancelled_job_is_not_begun_and_not_reported() -> None:
    bench = await Bench(num_processes=1).start()
    for text in "abc":
        bench.submit(text)
    bench.pool.cancel(bench.numbers["a"])
    bench.pool.cancel(bench.numbers["b"])
    process = bench.processes.started[0]
    process.answer(1)
    assert [job.prompt for job in process.jobs] == [TextPrompt("a"), TextPrompt("c")]
    process.answer(3)
    assert list(bench.outcomes) == ["c"]
    assert bench.pool.num_running == 0


async def test_a_retiring_process_gets_no_further_job() -> None:
    bench = await Bench(num_processes=1).start()
    bench.submit("hungry", chat=True)
    bench.submit("next")
    process = bench.processes.started[0]
    process.fail(Failure(400, "template_error", "too much memory"), retiring=True)
    assert len(process.jobs) == 1
    process.die(0)
    bench.clock.now_s += 1
    bench.pool.tick()
    bench.processes.started[1].ready()
    assert bench.processes.started[1].jobs[0].prompt == TextPrompt("next")


@pytest.mark.parametrize("why", ["no template", ""])
async def test_the_log_says_at_the_start_if_chats_will_be_refused(why: str) -> None:
    processes = Processes()
    trial = Job(ChatPrompt(b"[]"), 0.0)
    pool = Pool(TokenizerSettings(pool_size=1), processes.spawn, HandClock(), trial)
    starting = asyncio.ensure_future(pool.start())
    await asyncio.sleep(0)
    processes.all_ready()
    await starting
    (process,) = processes.started
    assert process.jobs == [trial]
    with capture_logs() as logs:
        process.fail(Failure(400, "template_error", why)) if why else process.answer(7)
    said = [("warning", why)] if why else []
    assert [(entry["log_level"], entry["why"]) for entry in logs] == said


async def test_a_folder_that_cannot_be_loaded_fails_the_start() -> None:
    bench = Bench(num_processes=1)
    starting = asyncio.ensure_future(bench.pool.start())
    await asyncio.sleep(0)
    bench.processes.started[0].cannot_load("tokenizer.json is missing")
    await asyncio.sleep(0)
    bench.processes.started[0].die(1)
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        await starting


async def test_a_process_that_dies_thrice_before_it_is_ready_fails_the_start() -> None:
    bench = Bench(num_processes=1)
    starting = asyncio.ensure_future(bench.pool.start())
    for num_started in (1, 2, 3):
        bench.clock.now_s += 1.0
        await asyncio.sleep(0)
        bench.pool.tick()
        assert len(bench.processes.started) == num_started
        bench.processes.started[-1].die(-11)
    with pytest.raises(ModelError, match="status -11"):
        await starting


async def test_a_process_killed_before_it_is_ready_is_started_again() -> None:
    bench = Bench(num_processes=1)
    starting = asyncio.ensure_future(bench.pool.start())
    await asyncio.sleep(0)
    bench.processes.started[0].die(-9)
    bench.clock.now_s += 1.0
    bench.pool.tick()
    bench.processes.started[1].ready()
    await starting


async def test_restarts_back_off_while_nothing_becomes_ready() -> None:
    bench = await Bench(num_processes=1).start()
    bench.processes.started[0].die()
    assert len(bench.processes.started) == 2
    for _ in range(600):
        if len(bench.processes.started) > bench.pool.num_restarts:
            bench.processes.started[-1].die()
        bench.clock.now_s += 0.1
        bench.pool.tick()
    assert len(bench.processes.started) < 25, "60 s at 0.1, 0.2, 0.4 … 5 s"


async def test_stopping_ends_every_process_and_reports_nothing_more() -> None:
    bench = await Bench().start()
    bench.submit("a")
    bench.pool.stop()
    first, second = bench.processes.started
    assert first.closed and second.closed
    first.answer(1)  # was in the pipe already
    first.die()
    second.die()
    bench.clock.now_s += 10
    bench.pool.tick()
    assert not bench.outcomes and len(bench.processes.started) == 2


class History:
    """Random events on a pool of three; what was submitted, cancelled and reported."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.submitted: list[int] = []
        self.cancelled: set[int] = set()
        self.reported: list[int] = []

    def small(self) -> None:
        self._submit("x")

    def large(self) -> None:
        self._submit("x" * LARGE_PROMPT_BYTES)

    def cancel(self) -> None:
        if self.submitted and self.submitted[0] not in self.reported:
            self.bench.pool.cancel(self.submitted[0])
            self.cancelled.add(self.submitted[0])

    def ready(self) -> None:
        for process in self.bench.processes.started:
            if process.alive and not process.is_ready:
                process.ready()

    def answer(self) -> None:
        for process in self._working()[:1]:
            process.answer(1)

    def die(self) -> None:
        for process in self._working()[:1]:
            process.die()

    def settle(self) -> None:
        while self.bench.pool.num_running:
            self.bench.clock.now_s += 0.2
            self.bench.pool.tick()
            self.ready()
            self.answer()

    def _working(self) -> list[ScriptedProcess]:
        return [process for process in self.bench.processes.started if process.working]

    def _submit(self, text: str) -> None:
        number = len(self.submitted) + 1
        job = Job(TextPrompt(text), 0.0)
        assert self.bench.pool.submit(job, lambda _: self.reported.append(number)) == number
        self.submitted.append(number)


@given(st.lists(st.sampled_from(["small", "large", "answer", "die", "cancel", "ready"])))
async def test_every_job_is_reported_once_whatever_happens(events: list[str]) -> None:
    history = History(await Bench(num_processes=3).start())
    for event in events:
        getattr(history, event)()
    history.settle()
    assert sorted(history.reported) == sorted(set(history.submitted) - history.cancelled)
