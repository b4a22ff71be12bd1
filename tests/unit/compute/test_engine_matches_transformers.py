"""The whole engine in float32 greedy: transformers' tokens, whatever happens to a sequence."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from common.messages.address import Address, AttemptId
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.device import scheduler_settings
from services.compute.engine import Engine
from services.compute.runner.eager import EagerRunner
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.protocol import Request
from services.compute.scheduler.scheduler import ContinuousScheduler
from services.compute.scheduler.schools import make_policy
from services.compute.step import StepPlan, StepResult
from tests.unit.compute.runner.test_eager_matches_transformers import prompt_of
from tests.unit.compute.tiny_models import VARIANTS, greedy_ids, make_model, save_model

COUNT = 20
PROMPTS = [prompt_of(length, length) for length in (5, 16, 37, 61)]
SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=8, max_batched_token_mem=2048, num_threads=1
)


class LaunchAhead:
    """An eager runner that is driven a step ahead, as an asynchronous device would be."""

    def __init__(self, runner: EagerRunner) -> None:
        self._runner = runner

    def spec(self) -> RunnerSpec:
        return replace(self._runner.spec(), overlaps=True)

    def forward(self, plan: StepPlan) -> Any:
        return self._runner.forward(plan)

    def sample(self, ticket: Any) -> Any:
        return self._runner.sample(ticket)

    def result(self, ticket: Any) -> StepResult:
        return self._runner.result(ticket)

    def ready(self, ticket: Any) -> bool:
        return self._runner.ready(ticket)

    def close(self) -> None:
        self._runner.close()


class Server:
    """Scheduler and engine over one model folder, without mail."""

    def __init__(self, folder: Path, settings: ComputeSettings) -> None:
        runner = LaunchAhead(EagerRunner.load(folder, settings))
        policy = make_policy(settings.schedule, settings.static_batch_window_s)
        spec = runner.spec()
        self.scheduler = ContinuousScheduler(spec, scheduler_settings(settings, spec), policy)
        self.errors: list[Exception] = []
        self.engine = Engine(
            self.scheduler,
            runner,
            settings.in_flight_steps,
            time.monotonic,
            lambda error, attempts: self.errors.append(error),
        )
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.reasons: dict[int, str] = {}
        self.cached: dict[int, int] = {}

    def ask(self, counter: int, prompt: list[int], **fields: Any) -> None:
        sampling = SamplingParams(
            max_tokens=COUNT, seed=1, temperature=0.0, ignore_eos=fields.pop("ignore_eos", True)
        )
        request = Request(
            attempt=AttemptId("r", counter),
            detokenizer=Address("mem://d", "d"),
            prompt_ids=tuple(prompt),
            output_ids=tuple(fields.pop("output_ids", ())),
            sampling=sampling,
            header=b"",
            **fields,
        )
        self.scheduler.add(request, time.monotonic())

    def turn(self) -> None:
        launched = self.engine.launch()
        if not (launched and self.engine.has_room):
            self.engine.collect(force=True)
        for event in self.scheduler.take_events():
            counter = event.attempt.counter
            self.tokens[counter] += event.token_ids
            if event.ending is not None:
                self.reasons[counter] = event.ending.reason
                self.cached[counter] = event.ending.usage.cached_tokens

    def run(self) -> None:
        for _ in range(2_000):
            if not self.scheduler.has_work() and not self.engine.num_in_flight:
                break
            self.turn()
        assert not self.errors
        assert not self.scheduler.has_work()


@cache
def reference(variant: str) -> tuple[PreTrainedModel, list[list[int]]]:
    model = make_model(variant)
    return model, [greedy_ids(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=list(VARIANTS))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    model, expected = reference(request.param)
    return save_model(model, tmp_path_factory.mktemp(request.param)), expected


@pytest.mark.parametrize("in_flight_steps", [0, 1])
def test_together_and_in_chunks(family: tuple[Path, list[list[int]]], in_flight_steps: int) -> None:
    folder, expected = family
    settings = SETTINGS.model_copy(
        update={"max_prefill_tokens": 13, "in_flight_steps": in_flight_steps}
    )
    server = Server(folder, settings)
    for counter, prompt in enumerate(PROMPTS):
        server.ask(counter, prompt)
    server.run()
    assert [server.tokens[counter] for counter in range(4)] == expected


def test_alone_and_again_from_the_prefix_tree(family: tuple[Path, list[list[int]]]) -> None:
    folder, expected = family
    server = Server(folder, SETTINGS)
    for counter in (3, 13):
        server.ask(counter, PROMPTS[3])
        server.run()
        assert server.tokens[counter] == expected[3]
    assert (server.cached[3], server.cached[13]) == (0, 48)


@pytest.mark.parametrize("swap_space", [0.0, 0.01])
def test_preempted(family: tuple[Path, list[list[int]]], swap_space: float) -> None:
    folder, expected = family
    settings = SETTINGS.model_copy(
        update={"max_batched_token_mem": 112, "max_model_len": 96, "swap_space": swap_space}
    )
    server = Server(folder, settings)
    was_swapped = 0
    for counter, prompt in enumerate(PROMPTS):
        server.ask(counter, prompt)
    while server.scheduler.has_work():
        server.turn()
        was_swapped = max(was_swapped, server.scheduler.stats().num_swapped)
    server.run()
    assert [server.tokens[counter] for counter in range(4)] == expected
    assert server.scheduler.stats().preemptions_total > 0
    assert bool(was_swapped) == (swap_space > 0)


def test_forks_share_the_prompt(family: tuple[Path, list[list[int]]]) -> None:
    folder, expected = family
    server = Server(folder, SETTINGS)
    server.ask(0, PROMPTS[2], num_choices=3)
    server.run()
    assert [server.tokens[counter] for counter in range(3)] == [expected[2]] * 3
    assert sorted(server.cached.values()) == [0, 32, 32]


def test_a_retry_goes_on_from_the_journal(family: tuple[Path, list[list[int]]]) -> None:
    folder, expected = family
    server = Server(folder, SETTINGS)
    server.ask(0, PROMPTS[2], output_ids=expected[2][:7])
    server.run()
    assert server.tokens[0] == expected[2][7:]


@pytest.mark.parametrize("schedule", ["prefill_first", "static_batch"])
def test_other_schools_give_the_same_tokens(schedule: str, tmp_path: Path) -> None:
    model, expected = reference("llama")
    settings = SETTINGS.model_copy(update={"schedule": schedule, "static_batch_window_s": 0.0})
    server = Server(save_model(model, tmp_path), settings)
    for counter, prompt in enumerate(PROMPTS):
        server.ask(counter, prompt)
    server.run()
    assert [server.tokens[counter] for counter in range(4)] == expected


@pytest.mark.parametrize("in_flight_steps", [0, 1])
def test_a_late_eos_ends_the_text_where_transformers_ends_it(
    tmp_path: Path, in_flight_steps: int
) -> None:
    model, expected = reference("llama")
    eos = expected[0][6]
    end = expected[0].index(eos) + 1
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [eos]
    settings = SETTINGS.model_copy(update={"in_flight_steps": in_flight_steps})
    try:
        server = Server(save_model(model, tmp_path), settings)
    finally:
        model.generation_config.eos_token_id = 2
    server.ask(0, PROMPTS[0], ignore_eos=False)
    server.ask(1, PROMPTS[1])
    server.run()
    assert server.tokens[0] == expected[0][:end]
    assert (server.reasons[0], server.reasons[1]) == ("stop", "length")
    assert server.tokens[1] == expected[1]
    stats = server.scheduler.stats()
    assert stats.pages_free == stats.pages_total
