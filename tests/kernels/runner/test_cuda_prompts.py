"""Scores and embeddings of prompts on the CUDA runner are transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.compute.runner.packing_runner import PackingRunner
from services.compute.step import Int32Array, PoolRow, ScoreRow, StepPlan
from tests.kernels.runner.cuda_runners import ON_GPU, SETTINGS, SIZES, load_runner
from tests.unit.compute.hand_scheduler import GREEDY, HandScheduler
from tests.unit.compute.prompt_run import (
    check_scores,
    expected_embedding,
    logits_of,
    pooled,
    random_prompts,
    run_prompts,
    save_embedding_model,
    scored,
)
from tests.unit.compute.tiny_models import VARIANTS, VOCAB_SIZE, greedy_ids, make_model, save_model
from tests.unit.compute.token_masks import GRAMMAR_SPEC, MaskingRunner

PROMPTS = random_prompts(VOCAB_SIZE, (60, 2, 25, 41, 60) if ON_GPU else (30, 2, 11))
FEW_PAGES = {"num_pages": 14, "max_model_len": 100}


@pytest.fixture(scope="module", params=list(VARIANTS) if ON_GPU else ["qwen3"])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> tuple[PackingRunner, PreTrainedModel]:
    model = make_model(request.param, **SIZES)
    folder = save_model(model, tmp_path_factory.mktemp(request.param))
    return load_runner(folder, SETTINGS, device), model


def test_scores_are_those_of_transformers_however_the_prompts_are_cut(
    family: tuple[PackingRunner, PreTrainedModel],
) -> None:
    runner, model = family
    for chunk, num_top, in_flight in (
        ((7, 0, 1), (33, 20, 1), (120, 5, 0)) if ON_GPU else ((21, 20, 1),)
    ):
        requests = [scored(n, prompt, num_top, 2) for n, prompt in enumerate(PROMPTS)]
        heard, _ = run_prompts(runner, requests, chunk, in_flight)
        for number, prompt in enumerate(PROMPTS):
            check_scores(heard[number], logits_of(model, prompt), prompt, num_top)
            assert heard[number].tokens == greedy_ids(model, prompt, 2)


def test_scores_of_a_model_that_sees_chunks_are_those_of_transformers(
    tmp_path: Path, device: torch.device
) -> None:
    model, prompt = make_model("llama4"), PROMPTS[0]
    runner = load_runner(save_model(model, tmp_path), SETTINGS, device)
    heard, _ = run_prompts(runner, [scored(0, prompt, 3, 3)], 21)
    check_scores(heard[0], logits_of(model, prompt), prompt, 3)
    assert heard[0].tokens == greedy_ids(model, prompt, 3)


@pytest.mark.gpu
def test_scores_are_told_once_however_often_pages_are_short(
    family: tuple[PackingRunner, PreTrainedModel],
) -> None:
    runner, model = family
    full = [group.span.is_full for group in runner.spec().kv_groups]
    num_pages = 14 if all(full) else 11 if any(full) else 9  # windows take fewer
    for num_host_pages in (0, 5):
        requests = [scored(n, prompt, 3, 20) for n, prompt in enumerate(PROMPTS)]
        spec = {**FEW_PAGES, "num_pages": num_pages, "num_host_pages": num_host_pages}
        heard, scheduler = run_prompts(runner, requests, 30, 1, **spec)
        assert scheduler.stats().preemptions_total > 0
        for number, prompt in enumerate(PROMPTS):
            check_scores(heard[number], logits_of(model, prompt), prompt, 3)


@pytest.mark.parametrize("kind", ["last", "mean", "cls"] if ON_GPU else ["mean"])
@pytest.mark.parametrize("variant", ["llama", "mistral_window", "qwen3"] if ON_GPU else ["qwen3"])
def test_embeddings_are_those_of_transformers(
    variant: str, kind: str, tmp_path: Path, device: torch.device
) -> None:
    model = make_model(variant, **SIZES)
    runner = load_runner(save_embedding_model(model, tmp_path, kind), SETTINGS, device)
    assert (runner.spec().pooling, runner.spec().generates) == (kind, False)
    for chunk, spec in ((7, {}), (120, {}), (30, FEW_PAGES)) if ON_GPU else ((19, {}),):
        requests = [pooled(number, prompt) for number, prompt in enumerate(PROMPTS)]
        heard, _ = run_prompts(runner, requests, chunk, 1, **spec)
        for number, prompt in enumerate(PROMPTS):
            expected = expected_embedding(model, prompt, kind)
            assert np.allclose(heard[number].embedding, expected, rtol=1e-4, atol=1e-4)


def test_more_positions_than_a_slice_and_a_bad_target(
    family: tuple[PackingRunner, PreTrainedModel],
) -> None:
    """A step's scores come in slices of as many rows as the step may sample."""
    runner, model = family
    prompt = PROMPTS[0]
    heard, _ = run_prompts(runner, [scored(0, prompt, 2)], len(prompt))
    assert len(prompt) > 2 * SETTINGS.max_num_seqs
    check_scores(heard[0], logits_of(model, prompt), prompt, 2)
    with pytest.raises(ValueError, match="a target is not in the vocabulary"):
        run_prompts(runner, [scored(0, [*prompt[:4], VOCAB_SIZE + 5], 2)], 4, vocab_size=10**6)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device_before_the_result(
    tmp_path: Path, device: torch.device
) -> None:
    """Scored, pooled and structured rows in steps that are launched while the device is busy."""
    model = make_model("llama")
    folder = save_model(model, save_embedding_model(model, tmp_path, "mean"))
    runner = load_runner(folder, SETTINGS, device)
    free = HandScheduler(runner, SETTINGS.page_tokens)
    structured = free.add(PROMPTS[0], replace(GREEDY, grammar_spec=GRAMMAR_SPEC))
    free.runner = MaskingRunner(runner, lambda slot, index: [50 + index])
    first = free.launch((structured, len(PROMPTS[0])))
    torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ahead = free.launch((structured, 1))
        plan = prompt_plan(free.sequences[0].pages[0], len(PROMPTS[3]))
        ticket = runner.sample(runner.forward(plan))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query()
    free.finish(first)
    free.finish(ahead)
    assert structured.output == [50, 51]
    result = runner.result(ticket)
    assert result.scores.keys() == result.embeddings.keys() == {0}


def prompt_plan(page: int, num_tokens: int) -> StepPlan:
    """One row of slot 7, scored and pooled, in pages from this one on: what it reads is its own."""

    def ints(*values: int) -> Int32Array:
        return np.array(values, dtype=np.int32)

    num_pages = -(-num_tokens // SETTINGS.page_tokens)
    tokens = np.arange(3, 3 + num_tokens, dtype=np.int32)
    return StepPlan(
        step_id=99,
        num_decode_rows=0,
        row_slot=ints(7),
        row_epoch=ints(0),
        q_start=ints(0),
        q_len=ints(num_tokens),
        pos_upper=ints(num_tokens),
        tokens=tokens,
        sample_row=ints(),
        sample_index=ints(),
        page_slot=ints(*[7] * num_pages),
        page_index=np.arange(num_pages, dtype=np.int32),
        page_id=(page + 100 + np.arange(num_pages, dtype=np.int32)) % 200,
        scores=(ScoreRow(0, 5, tokens[1:]),),
        pools=(PoolRow(0, True),),
    )
