"""Scores and embeddings of prompts on the CPU are transformers'."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from common.errors import ModelError
from common.model_folder import describe
from services.compute.config import ComputeSettings
from services.compute.device import model_card
from services.compute.runner.packing_runner import PackingRunner
from services.compute.sampling import logprobs
from services.compute.sampling.logprobs import score_prompt
from tests.cases import num_cases
from tests.unit.compute.cpu_runners import load_on_cpu
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
from tests.unit.compute.tiny_models import VARIANTS, VOCAB_SIZE, make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu",
    dtype="float32",
    page_tokens=8,
    max_num_seqs=8,
    max_batched_token_mem=2048,
    swap_space=0.01,
    num_threads=1,
    warmup=False,
    speculative_config="off",  # sequences are to be short of pages at the same time
)
PROMPTS = random_prompts(VOCAB_SIZE, (60, 2, 25, 41, 60))
FEW_PAGES = {"num_pages": 14, "max_model_len": 100, "num_host_pages": 0}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_scores_are_those_of_transformers_in_every_family(variant: str, tmp_path: Path) -> None:
    model = make_model(variant)
    runner = load_on_cpu(save_model(model, tmp_path), SETTINGS)
    requests = [scored(number, prompt, 5) for number, prompt in enumerate(PROMPTS)]
    heard, _ = run_prompts(runner, requests, chunk=33)
    for number, prompt in enumerate(PROMPTS):
        check_scores(heard[number], logits_of(model, prompt), prompt, 5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackingRunner, PreTrainedModel]:
    model = make_model("llama")
    folder = save_model(model, tmp_path_factory.mktemp("llama"))
    return load_on_cpu(folder, SETTINGS), model


@cache
def _logits_of_prompts(model: PreTrainedModel) -> list[torch.Tensor]:
    return [logits_of(model, prompt) for prompt in PROMPTS]


@settings(max_examples=num_cases(8, exploring=24), deadline=None)
@given(
    chunk=st.integers(1, 60),
    num_top=st.integers(0, 20),
    in_flight=st.integers(0, 1),
    scarce=st.booleans(),
)
def test_chunks_and_preemptions_do_not_change_them(
    llama: tuple[PackingRunner, PreTrainedModel],
    chunk: int,
    num_top: int,
    in_flight: int,
    scarce: bool,
) -> None:
    runner, model = llama
    expected = _logits_of_prompts(model)
    requests = [scored(n, prompt, num_top, 20) for n, prompt in enumerate(PROMPTS)]
    spec = FEW_PAGES if scarce else {}
    heard, scheduler = run_prompts(runner, requests, chunk, in_flight, **spec)
    for number, prompt in enumerate(PROMPTS):
        check_scores(heard[number], expected[number], prompt, num_top)
    if chunk > 20 and scarce:
        assert scheduler.stats().preemptions_total > 0


def test_slices_are_small_and_ties_go_to_the_lower_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 300)
    x_PE = torch.randint(0, 3, (50, 100), generator=torch.Generator().manual_seed(1)).float()
    x_PE[7] = -0.0
    sizes = []

    def logits(some_PE: torch.Tensor) -> torch.Tensor:
        sizes.append(len(some_PE))
        return some_PE - 1.0 if len(sizes) != 4 else some_PE

    targets = np.arange(50, dtype=np.int32)
    scores = score_prompt(x_PE, targets, 7, logits)
    assert max(sizes) == 3 and sum(sizes) == 50
    order = x_PE.sort(dim=-1, descending=True, stable=True).indices
    assert scores.top_ids.tolist() == order[:, :7].tolist()
    above = (x_PE > x_PE.gather(1, torch.arange(50)[:, None])).sum(-1)
    assert scores.ranks.tolist() == (above + 1).tolist()


@pytest.mark.parametrize("variant", ["llama", "mistral_window", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_embeddings_are_those_of_transformers(variant: str, kind: str, tmp_path: Path) -> None:
    model = make_model(variant)
    normalize = kind != "cls"
    folder = save_embedding_model(model, tmp_path, kind, normalize)
    runner = load_on_cpu(folder, SETTINGS)
    for chunk, spec in ((7, {}), (200, {}), (30, FEW_PAGES)):
        requests = [pooled(number, prompt) for number, prompt in enumerate(PROMPTS)]
        heard, _ = run_prompts(runner, requests, chunk, **spec)
        for number, prompt in enumerate(PROMPTS):
            expected = expected_embedding(model, prompt, kind, normalize)
            assert np.allclose(heard[number].embedding, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_embeddings_are_the_same_beside_generation_and_after_preemption(
    kind: str, tmp_path: Path
) -> None:
    """A folder that has a head still generates; what it generates takes the pages away."""
    model = make_model("qwen3")
    folder = save_embedding_model(model, tmp_path, kind)
    save_model(model, folder)
    runner = load_on_cpu(folder, SETTINGS)
    assert runner.spec().generates
    for num_host_pages in (0, 20):
        long = scored(50, PROMPTS[2], 0, 60)
        spec = {**FEW_PAGES, "num_host_pages": num_host_pages}
        others = [pooled(number, prompt) for number, prompt in enumerate(PROMPTS)]
        heard, scheduler = run_prompts(runner, [long, *others], 1, 1, **spec)
        assert scheduler.stats().preemptions_total > 0
        assert len(heard[50].tokens) == 60
        for number, prompt in enumerate(PROMPTS):
            expected = expected_embedding(model, prompt, kind)
            assert np.allclose(heard[number].embedding, expected, rtol=1e-4, atol=1e-4)


def test_a_card_and_a_spec_say_how_a_model_pools(tmp_path: Path) -> None:
    folder = save_embedding_model(make_model("llama"), tmp_path, "mean")
    spec = load_on_cpu(folder, SETTINGS).spec()
    assert (spec.pooling, spec.generates) == ("mean", False)

    card = model_card(describe(folder), SETTINGS, spec)
    assert card.pooling == "mean"


def test_the_inside_of_a_model_alone_is_refused(tmp_path: Path) -> None:
    make_model("qwen3").base_model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"Qwen3Model has no head .* no modules\.json"):
        load_on_cpu(tmp_path, SETTINGS)
