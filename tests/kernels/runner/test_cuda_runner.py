"""What the CUDA runner promises beside the right tokens: every runner's promises, and its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import FatalError
from common.messages.sampling import SamplingParams
from services.compute.runner.packing_runner import PackingRunner, Ticket
from services.compute.runner.uploads import MAX_PAGE_ENTRIES
from services.compute.step import StepPlan
from tests.kernels.runner.cuda_runners import ON_GPU, ONE_LAYER, SETTINGS, load_runner
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.hand_scheduler import GREEDY, HandScheduler
from tests.unit.compute.runner_promises import (
    PROMPT,
    FewSteps,
    Load,
    RunnerPromises,
)
from tests.unit.compute.tiny_models import VOCAB_SIZE, greedy_ids, make_model, save_model

# numpy says so of the sequence that is broken on purpose
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

SAMPLINGS = [
    replace(GREEDY, num_logprobs=2),
    replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(max_tokens=100, seed=5, temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=100, seed=6, top_p=0.9, min_p=0.01, logit_bias=((9, 2.0),)),
]
PROMPTS = [[3 + (7 * i * i + n) % 190 for i in range(n)] for n in (3, 16, 50, 100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama", **ONE_LAYER), tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["fast", "batch_invariant"] if ON_GPU else ["batch_invariant"])
def load(request: pytest.FixtureRequest, device: torch.device) -> Load:
    """Runners of the same settings are one, so that no test has two at a time."""
    runners: dict[str, PackingRunner] = {}
    settings = SETTINGS.model_copy(update={"batch_invariant": request.param == "batch_invariant"})

    def make(folder: Path, **changes: object) -> HandScheduler:
        changed = settings.model_copy(update=changes)
        key = f"{folder} {changed}"
        if key not in runners:
            runners.clear()
            runners[key] = load_runner(folder, changed, device)
        return HandScheduler(runners[key], changed.page_tokens)

    return make


def run_ahead(hand: HandScheduler, count: int) -> list[list[int]]:
    """Every way of sampling at once, each step launched before the last one's tokens are known."""
    sequences = [
        hand.add(prompt, sampling, stop_ids=(2,))
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    previous = hand.launch(*((s, len(s.prompt)) for s in sequences))
    for _ in range(count - 1):
        ahead = hand.launch(*((s, 1) for s in sequences))
        hand.finish(previous)
        previous = ahead
    hand.finish(previous)
    return [s.output for s in sequences]


def test_it_draws_the_tokens_that_the_cpu_draws(load: Load, folder: Path) -> None:
    count = 24 if ON_GPU else 4
    roomy = {"max_prefill_tokens": 200}
    cpu = SETTINGS.model_copy(update={"device": "cpu", "num_threads": 1, **roomy})
    expected = HandScheduler(load_on_cpu(folder, cpu), cpu.page_tokens)
    ours = load(folder, **roomy)
    assert run_ahead(ours, count) == run_ahead(expected, count)
    for our_result, their_result in zip(ours.results, expected.results, strict=True):
        assert our_result.logprobs.keys() == their_result.logprobs.keys() == {0}
        (our_score,), (their_score,) = our_result.logprobs[0], their_result.logprobs[0]
        assert our_score.chosen == pytest.approx(their_score.chosen, abs=1e-4)
        assert our_score.top_ids == their_score.top_ids


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device_before_the_result(load: Load, folder: Path) -> None:
    hand = load(folder, max_prefill_tokens=200)
    run_ahead(hand, 3)
    away = hand.add(PROMPTS[1])
    hand.run(away, 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = hand.launch(*((s, 1) for s in hand.sequences[:4]))
        newcomers = [hand.add(PROMPTS[0], sampling, stop_ids=(2,)) for sampling in SAMPLINGS[1:]]
        also = hand.launch(*((s, 3) for s in newcomers), swap_out=(away,))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    hand.finish(launched)
    hand.finish(also)
    assert all(0 <= s.output[-1] < VOCAB_SIZE for s in hand.sequences)


@pytest.mark.gpu
def test_a_launch_returns_while_the_device_is_busy_with_the_steps_before(
    load: Load, folder: Path
) -> None:
    """With transfers both ways and newcomers whose settings need uploads of their own."""
    hand = load(folder, max_prefill_tokens=200)
    run_ahead(hand, 3)
    away, back = hand.add(PROMPTS[1]), hand.add(PROMPTS[0])
    hand.run(away, 3)
    hand.run(back, 3)
    hand.step((hand.sequences[0], 1), swap_out=(back,))
    newcomers = [hand.add(PROMPTS[0], SAMPLINGS[n], stop_ids=(2,)) for n in (1, 3)]
    torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
    busy = torch.cuda.Event()
    busy.record()
    hand.swap_in(back)
    rows = [(s, 1) for s in hand.sequences[:4]] + [(s, 3) for s in newcomers]
    launched = hand.launch(*rows, swap_out=(away,))
    still_busy = not busy.query()
    hand.finish(launched)
    assert still_busy
    assert all(0 <= s.output[-1] < VOCAB_SIZE for s in hand.sequences)


def test_a_plan_may_have_more_page_entries_than_an_upload_holds(load: Load, folder: Path) -> None:
    """More than there are buffers for, too: the first four parts are of entries that are no good,
    and the right ones come last."""
    hand = load(folder, swap_space=0.0)
    expected = greedy_ids(make_model("llama", **ONE_LAYER), PROMPT, 4)
    first = hand.add(PROMPT)
    hand.run(first, 2)
    wrong_page = hand.free_pages.pop(0)
    count = 4 * MAX_PAGE_ENTRIES
    forward = hand.runner.forward

    def forward_with_more(plan: StepPlan) -> object:
        index = np.arange(count, dtype=np.int32) % 64
        more = replace(
            plan,
            page_slot=np.concatenate((index * 0 + second.slot, plan.page_slot)),
            page_index=np.concatenate((index, plan.page_index)),
            page_id=np.concatenate((index * 0 + wrong_page, plan.page_id)),
            page_group=np.concatenate((index * 0, plan.page_group)),
        )
        return forward(more)

    second = hand.add(PROMPT)
    hand.runner = Forwarding(hand.runner, forward_with_more)
    hand.step((first, 1), (second, len(PROMPT)))
    assert hand.runner.num_steps == 1
    hand.run(second, 4)
    hand.run(first, 4)
    assert first.output == second.output == expected


class Forwarding:
    """A runner whose first `forward` is another one."""

    def __init__(self, runner: PackingRunner, forward) -> None:
        self.num_steps = 0
        self._forward = forward
        self._runner = runner
        self.sample, self.result = runner.sample, runner.result

    def forward(self, plan: StepPlan) -> object:
        self.num_steps += 1
        return (self._forward if self.num_steps == 1 else self._runner.forward)(plan)


def test_an_error_of_the_device_ends_the_process(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = load(folder)

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(hand.runner.executor._machine, "forward", fail)
    with pytest.raises(FatalError, match="illegal memory access"):
        hand.step((hand.add(PROMPT), 3))


def test_a_step_that_was_not_sampled_has_no_result(load: Load, folder: Path) -> None:
    hand = load(folder)
    forward = hand.runner.forward
    tickets = []
    hand.runner = Forwarding(hand.runner, lambda plan: tickets.append(forward(plan)) or tickets[0])
    hand.step((hand.add(PROMPT), 3))
    launched = replace(tickets[0].launched, end=None, result_SW=None)
    ticket = Ticket(tickets[0].plan, launched)
    with pytest.raises(RuntimeError, match="has not been sampled"):
        hand.runner.result(ticket)


# The interpreter takes a third of a second a step.
class TestPromises(RunnerPromises if ON_GPU else FewSteps):
    num_reuses = 12 if ON_GPU else 5  # the broken sequence had four pages
    sizes = ONE_LAYER
