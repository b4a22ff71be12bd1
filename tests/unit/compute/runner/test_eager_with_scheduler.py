"""Behind the real scheduler, with too few pages: preempted, swapped, forked and shared sequences
still say what transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.messages.generate import Generate
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.scheduler.outputs import sequence_outputs
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.generate_requests import generate_request
from tests.unit.compute.tiny_models import VOCAB_SIZE, greedy_ids, make_model, save_model

COUNT = 30
GREEDY = SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A model, and what transformers says to each of the prompts."""
    model = make_model(request.param)
    expected = [greedy_ids(model, prompt, COUNT) for prompt in prompts()]
    return save_model(model, tmp_path_factory.mktemp(request.param)), expected


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, VOCAB_SIZE, (40,), generator=generator).tolist()
    return [
        shared[:keep] + torch.randint(3, VOCAB_SIZE, (own,), generator=generator).tolist()
        for keep, own in ((40, 7), (0, 30), (40, 1), (24, 20), (0, 3), (40, 15), (33, 9))
    ]


def serve(
    folder: Path, requests: list[Generate], in_flight: int, **changes: object
) -> tuple[dict[int, list[int]], Scheduler]:
    """Run all requests to their end, each arriving a step after the one before."""
    settings = ComputeSettings(
        device="cpu", dtype="float32", page_tokens=8, max_num_seqs=8, num_threads=1, warmup=False
    ).model_copy(update=changes)
    runner = load_on_cpu(folder, settings)
    scheduler = Scheduler(
        runner.spec(),
        SchedulerSettings(max_num_seqs=8, max_prefill_tokens=24, in_flight_steps=in_flight),
        DecodeFirst(),
    )
    outputs: dict[int, list[int]] = {}
    waiting, in_the_air, now_s = list(requests), [], 0.0
    while waiting or in_the_air or scheduler.has_work():
        now_s += 0.01
        if waiting:
            scheduler.add_request(waiting.pop(0), now_s)
        plan = scheduler.plan(now_s)
        for transfer in scheduler.take_transfers():
            assert runner.transferred(runner.transfer(transfer.direction, transfer.pages))
            scheduler.transferred(transfer)
        if plan is not None:
            in_the_air.append((plan, runner.sample(runner.forward(plan))))
        if in_the_air and (plan is None or len(in_the_air) > in_flight):
            oldest, ticket = in_the_air.pop(0)
            scheduler.commit(oldest, runner.result(ticket), now_s)
        for event in sequence_outputs(scheduler.drain_outputs()):
            outputs.setdefault(event.attempt.counter, []).extend(event.token_ids)
            assert event.ending is None or event.ending.failure is None
        assert now_s < 50.0, "the scheduler does not come to an end"
    return outputs, scheduler


def request(number: int, prompt: list[int], num_choices: int = 1) -> Generate:
    return generate_request(number, prompt, GREEDY, num_choices=num_choices)


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("swap_space", [0.0, 0.01])
def test_too_few_pages_change_no_token(
    family: tuple[Path, list[list[int]]], in_flight: int, swap_space: float
) -> None:
    folder, expected = family
    requests = [request(number, prompt) for number, prompt in enumerate(prompts())]
    outputs, scheduler = serve(
        folder, requests, in_flight, max_batched_token_mem=200, swap_space=swap_space
    )
    assert scheduler.stats().preemptions_total > 0
    assert outputs == dict(enumerate(expected))


def test_prefixes_and_forks_share_pages_and_change_no_token(
    family: tuple[Path, list[list[int]]],
) -> None:
    folder, expected = family
    requests = [request(4 * n, p, num_choices=2) for n, p in enumerate(prompts()[:3])]
    outputs, scheduler = serve(folder, requests, 1, max_batched_token_mem=2048)
    assert scheduler.stats().cached_tokens_total > 0
    for number, ids in enumerate(expected[:3]):
        assert outputs[4 * number] == outputs[4 * number + 1] == ids
