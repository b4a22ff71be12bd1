"""The virtual device: busy until, not asleep; tokens that follow from seed and index."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.messages.sampling import SamplingParams
from services.compute.runner.sim import LatencyModel, SimRunner
from services.compute.step import SlotDelta
from tests.unit.compute.prompt_run import pooled, run_prompts, scored
from tests.unit.compute.runner.sim_runners import SPEC, Clock, plan, runner


def delta(slot: int, seed: int, **settings: int) -> SlotDelta:
    sampling = SamplingParams(max_tokens=10, seed=seed, **settings)  # type: ignore[arg-type]
    return SlotDelta(slot, 0, sampling, choice=0, stop_ids=(3,))


def test_steps_follow_one_another_however_late_the_sleeper_wakes() -> None:
    clock = Clock()
    device = runner(clock)
    first = device.forward(plan(0, slots=(delta(0, 1),)))
    second = device.forward(plan(1))
    assert device.result(first).device_end_s == pytest.approx(100.006)
    result = device.result(second)
    assert (result.device_start_s, result.device_end_s) == pytest.approx((100.006, 100.012))


def test_a_step_launched_late_starts_late() -> None:
    clock = Clock()
    device = runner(clock)
    device.result(device.forward(plan(0, slots=(delta(0, 1),))))
    clock.now_s = 200.0
    assert device.forward(plan(1)).start_s == 200.0


def test_the_latency_counts_rows_and_prompt_tokens() -> None:
    model = LatencyModel(0.005, 0.001, 0.0001)
    assert model.step_s(plan(0, 0, num_prefill=10)) == pytest.approx(0.008)


def test_a_result_is_ready_when_the_devices_clock_says_so() -> None:
    clock = Clock()
    device = runner(clock)
    ticket = device.forward(plan(0, slots=(delta(0, 1),)))
    assert not device.ready(ticket)
    clock.now_s += 0.006
    assert device.ready(ticket)


def test_tokens_depend_on_seed_and_index_alone_and_never_stop() -> None:
    clock = Clock()
    device = runner(clock)
    slots = (delta(0, seed=5), delta(1, seed=6))
    together = [
        device.result(device.forward(plan(i, i, slots=slots if i == 0 else ()))).tokens[:, 0]
        for i in range(200)
    ]
    alone = runner(clock)
    single = [
        alone.result(alone.forward(plan(i, slots=(delta(0, seed=6),)))).tokens[0, 0]
        for i in range(200)
    ]
    assert [tokens[1] for tokens in together] == single
    assert not {2, 3} & {int(token) for token in single}


def test_a_slot_that_changes_hands_keeps_the_script_of_what_was_launched() -> None:
    clock = Clock()
    device = runner(clock)
    first = device.forward(plan(4, slots=(delta(0, seed=5),)))
    device.forward(plan(0, slots=(delta(0, seed=77),)))
    again = runner(clock)
    expected = again.result(again.forward(plan(4, slots=(delta(0, seed=5),)))).tokens
    assert device.result(first).tokens == expected


def test_logprobs_come_for_those_who_ask() -> None:
    clock = Clock()
    device = runner(clock)
    slots = (delta(0, seed=5), delta(1, seed=5, num_logprobs=2))
    result = device.result(device.forward(plan(0, 0, slots=slots)))
    assert list(result.logprobs) == [1]
    (scores,) = result.logprobs[1]
    assert scores.top_ids[0] == result.tokens[1, 0]
    assert scores.chosen == scores.top_logprobs[0] > scores.top_logprobs[1]


def test_prompts_have_scores_and_embeddings_that_are_always_the_same() -> None:
    prompts = {0: [5, 9, 14, 3, 70], 1: [8, 8, 3, 7], 2: [1, 2, 3, 3, 70]}
    told = []
    for chunk in (2, 64):
        clock = Clock()
        spec = replace(SPEC, pooling="last")
        runner = SimRunner(spec, LatencyModel(0.005, 0.0, 0.0), clock, clock.sleep)
        requests = [scored(n, prompt, 2) for n, prompt in prompts.items()]
        requests += [pooled(10 + n, prompt) for n, prompt in prompts.items()]
        heard, _ = run_prompts(runner, requests, chunk)
        assert heard[0].top_ids == [9, 10, 14, 15, 3, 4, 70, 71]
        assert heard[0].ranks == [1] * 4
        told.append([heard[10 + n].embedding.tolist() for n in prompts])
    assert told[0] == told[1]
    first, second, third = told[0]
    assert first != second and first == third  # of one length and end
    assert sum(value * value for value in first) == pytest.approx(1.0)
