"""Once a runner is loaded, no request makes Triton compile or a graph be captured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from services.compute.runner.cuda.stream import GraphStream
from tests.kernels.runner.cuda_runners import SETTINGS, load_runner
from tests.unit.compute.draft_heads import save_head
from tests.unit.compute.engine_histories import EOS_IDS, play, random_history
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.hand_scheduler import GREEDY, HandScheduler
from tests.unit.compute.prompt_run import (
    pooled,
    random_prompts,
    run_prompts,
    save_embedding_model,
    scored,
)
from tests.unit.compute.tiny_models import VOCAB_SIZE, make_model, save_model
from tests.unit.compute.token_masks import GRAMMAR_SPEC, MaskingRunner

pytestmark = pytest.mark.gpu

MOST_NEW_BYTES = 64 << 20  # for uploads of settings, two a newcomer


@triton.jit
def _add_kernel(x_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(x_ptr + i, tl.load(x_ptr + i) + 1.0)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is compiled or captured from now on."""
    seen: list[str] = []

    def compiled(*, repr: str, **_: object) -> None:
        seen.append(repr)

    def captured(*arguments: object, **_: object) -> None:
        seen.append(f"graph {arguments[1:]}")

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiled)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", captured)
    monkeypatch.setattr(GraphStream, "record", captured)
    return seen


def test_the_hook_sees_a_compilation(late: list[str], device: torch.device) -> None:
    _add_kernel[(1,)](torch.zeros(16, device=device), SIZE=16)
    assert len(late) == 1
    assert "_add_kernel" in late[0]
    _add_kernel[(1,)](torch.zeros(16, device=device), SIZE=16)
    assert len(late) == 1


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "fp8")]
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_random_requests_compile_and_capture_nothing(
    tmp_path: Path,
    device: torch.device,
    request: pytest.FixtureRequest,
    batch_invariant: bool,
    dtype: str,
    kv_cache_dtype: str,
) -> None:
    """Every way to sample, all batch sizes, chunks, swaps, recomputes, prefix hits and forks."""
    update = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "page_tokens": 16}
    update |= {"batch_invariant": batch_invariant}
    settings = SETTINGS.model_copy(update=update)
    runner = load_runner(save_model(make_model("qwen3"), tmp_path), settings, device)
    reserved = torch.cuda.memory_reserved()
    late: list[str] = request.getfixturevalue("late")  # from now on
    few = {"num_pages": 12, "max_model_len": 128, "num_host_pages": 5}
    for seed, spec, chunk in ((2, few, 50), (3, {}, 120), (4, {}, 9), (5, few, 120)):
        server = Server(
            Restricted(runner, eos_token_ids=EOS_IDS, **spec),
            settings.model_copy(update={"max_prefill_tokens": chunk}),
        )
        play(server, random_history(seed, 32, 40))
        if spec:
            assert server.scheduler.stats().preemptions_total > 0
    assert late == []
    assert torch.cuda.memory_reserved() - reserved <= MOST_NEW_BYTES


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "eagle", "medusa"])
def test_a_model_or_head_that_drafts_compiles_and_captures_nothing(
    method: str, tmp_path: Path, device: torch.device, request: pytest.FixtureRequest
) -> None:
    """With every way to sample, and after steps without drafts."""
    model = make_model("llama", num_hidden_layers=4)  # whose heads are as wide as heads say
    folder = save_model(model, tmp_path / "model")
    config = json.dumps({"model": str(folder), "num_speculative_tokens": 3})
    if method != "draft_model":
        _, config = save_head(method, model, folder, tmp_path / "head")
    update = {"speculative_config": config, "page_tokens": 16}
    settings = SETTINGS.model_copy(update=update)
    runner = load_runner(folder, settings, device)
    late: list[str] = request.getfixturevalue("late")  # from now on
    few = {"num_pages": 12, "max_model_len": 128, "num_host_pages": 5}
    server = Server(Restricted(runner, eos_token_ids=EOS_IDS, **few), settings)
    play(server, random_history(2, 32, 40))
    assert server.scheduler.stats().drafts_total > 0
    assert late == []


def test_newcomers_with_penalties_bias_and_early_stops_take_no_new_memory(
    tmp_path: Path, device: torch.device, request: pytest.FixtureRequest
) -> None:
    """Not the first ones either: to get pinned memory stalls the device's thread."""
    runner = load_runner(save_model(make_model("qwen3"), tmp_path), SETTINGS, device)
    late: list[str] = request.getfixturevalue("late")  # from now on
    pinned, reserved = torch.cuda.host_memory_stats(), torch.cuda.memory_reserved()
    hand = HandScheduler(runner, SETTINGS.page_tokens)
    for number, prompt in enumerate(random_prompts(VOCAB_SIZE, (60, 2, 25, 41, 90, 1))):
        settings = replace(
            GREEDY,
            repetition_penalty=1.2,
            presence_penalty=0.5 * (number % 2),
            logit_bias=((number, 1.5),),
            min_tokens=3,
        )
        hand.add(prompt, settings, stop_ids=(5, 6))
    hand.run_all(6, 20)
    assert late == []
    now = torch.cuda.host_memory_stats()
    key = "active_requests.allocated"  # blocks handed out, new ones or not
    assert now[key] == pinned[key]
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_scores_embeddings_and_masks_compile_and_capture_nothing(
    tmp_path: Path,
    device: torch.device,
    request: pytest.FixtureRequest,
    batch_invariant: bool,
    dtype: str,
) -> None:
    """In chunks of all sizes, beside one another and beside decodes."""
    settings = SETTINGS.model_copy(update={"batch_invariant": batch_invariant, "dtype": dtype})
    folder = save_embedding_model(make_model("qwen3"), tmp_path, "mean")
    runner = load_runner(save_model(make_model("qwen3"), folder), settings, device)
    reserved = torch.cuda.memory_reserved()
    late: list[str] = request.getfixturevalue("late")  # from now on
    prompts = random_prompts(VOCAB_SIZE, (60, 2, 25, 41, 90, 1))
    for chunk, num_top in ((1, 0), (13, 20), (120, 3)):
        requests = [scored(n, prompt, num_top, 9) for n, prompt in enumerate(prompts)]
        requests += [pooled(10 + n, prompt) for n, prompt in enumerate(prompts)]
        run_prompts(runner, requests, chunk, 1)
    hand = HandScheduler(runner, settings.page_tokens)
    hand.runner = MaskingRunner(runner, lambda slot, index: [slot, 50] if index % 3 else None)
    for number in range(7):
        sampling = replace(GREEDY, grammar_spec=GRAMMAR_SPEC if number % 2 else None)
        hand.add(prompts[number % 5], sampling)
    hand.run_all(6, 20)
    assert late == []
    assert torch.cuda.memory_reserved() - reserved <= MOST_NEW_BYTES
