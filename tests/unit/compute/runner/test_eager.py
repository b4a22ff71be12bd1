"""What the eager runner promises beside the right tokens."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from common.decoder_shape import read_shape
from common.errors import ConfigError, FatalError, ModelError
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner import eager
from services.compute.runner.model_loader import choose_threads
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_server import Server
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.runner_promises import (
    PROMPT,
    Load,
    RunnerPromises,
)
from tests.unit.compute.tiny_models import VOCAB_SIZE, greedy_ids, make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", page_tokens=8, max_num_seqs=8, max_batched_token_mem=1024,
    num_threads=1, warmup=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def load() -> Load:
    def make(folder: Path, **changes: object) -> HandScheduler:
        settings = SETTINGS.model_copy(update=changes)
        return HandScheduler(load_on_cpu(folder, settings, settings.warmup), settings.page_tokens)

    return make


def test_the_spec_says_what_the_folder_and_the_settings_say(load: Load, folder: Path) -> None:
    spec = load(folder, swap_space=2**-10, max_prefill_tokens=100).runner.spec()
    assert spec.vocab_size == VOCAB_SIZE
    assert spec.max_model_len == 512
    assert spec.eos_token_ids == (2,)
    assert spec.num_pages == 128
    (group,) = spec.kv_groups
    assert (group.kind, group.num_layers, group.page_tokens) == ("full", 3, 8)
    assert group.page_bytes == 3 * 8 * 2 * 2 * 16 * 4
    assert spec.num_host_pages == 2**20 // group.page_bytes
    assert spec.max_step_tokens == 108
    assert not spec.overlaps


def test_a_step_is_computed_a_layer_at_a_time_and_says_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop may turn between any two layers, and between the prompts that are scored."""
    scored = SamplingParams(
        max_tokens=6, seed=1, temperature=0.0, ignore_eos=True, num_prompt_logprobs=1
    )
    servers = [Server(load_on_cpu(folder, SETTINGS), SETTINGS) for _ in range(2)]
    for server, slice_s in zip(servers, (0.0, 60.0), strict=True):
        monkeypatch.setattr(eager, "SLICE_S", slice_s)
        for counter in range(3):
            server.ask(counter, PROMPT[counter:], scored)
        server.run()
    expected = {number: greedy_ids(make_model("llama"), PROMPT[number:], 6) for number in range(3)}
    assert [dict(server.tokens) for server in servers] == [expected, expected]
    in_slices, at_once = (server.engine for server in servers)
    num_steps = in_slices.stats.num_steps
    assert in_slices.num_slices >= 3 * num_steps + 2  # layers, and prompts that are scored
    assert (at_once.num_slices, at_once.stats.num_steps) == (0, num_steps)


def test_a_step_took_what_its_thread_computed_however_long_it_was_kept_from_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "SLICE_S", 0.0)
    runner = load_on_cpu(folder, SETTINGS)
    server, results = Server(runner, SETTINGS), []
    right = runner.result

    def result(ticket: object) -> object:
        results.append(right(ticket))
        return results[-1]

    monkeypatch.setattr(runner, "result", result)
    server.ask(0, PROMPT, SamplingParams(max_tokens=1, seed=1, ignore_eos=True))
    began_s = time.thread_time()
    assert server.engine.launch()
    kept_s = 0.0
    while server.engine.is_computing:
        time.sleep(0.05)
        kept_s += 0.05
        server.engine.go_on()
    server.run()
    (step,) = results
    assert step.device_end_s - step.device_start_s >= kept_s >= 0.1
    assert 0.0 < step.computed_s <= time.thread_time() - began_s


def test_a_cache_from_free_memory_holds_at_most_every_slot_at_full_length(
    load: Load, folder: Path
) -> None:
    spec = load(folder, max_batched_token_mem=0).runner.spec()
    assert spec.num_pages == 8 * 512 // 8


def test_a_small_cache_shortens_the_longest_sequence(load: Load, folder: Path) -> None:
    assert load(folder, max_batched_token_mem=100).runner.spec().max_model_len == 104


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused(load: Load, folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_batched_token_mem"):
        load(folder, max_batched_token_mem=100, max_model_len=200)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        load(folder, max_model_len=513)


def test_warm_up_leaves_no_trace(load: Load, folder: Path) -> None:
    cold, warm = load(folder), load(folder, warmup=True)
    assert cold.run(cold.add(PROMPT), 20) == warm.run(warm.add(PROMPT), 20)


def test_dummy_weights_need_no_weight_files(load: Load, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match="dummy"):
        load(tmp_path)
    outputs = []
    for _ in range(2):
        hand = load(tmp_path, load_format="dummy")
        outputs.append(hand.run(hand.add(PROMPT), 20))
    assert outputs[0] == outputs[1]
    assert all(0 <= token < VOCAB_SIZE for token in outputs[0])


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(
    load: Load, variant: str, tmp_path: Path
) -> None:
    model = make_model(variant)
    save_model(model, tmp_path)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    hand = load(tmp_path, dtype="bfloat16")
    our_error = their_error = 0.0
    for seed in range(5, 9):  # one alone is a matter of luck
        prompt = np.random.default_rng(seed).integers(3, VOCAB_SIZE, 200).tolist()
        sequence = hand.add(prompt)
        hand.step((sequence, 150))
        ticket, _ = hand.launch((sequence, 50))
        with torch.inference_mode():
            exact = model(torch.tensor([prompt])).logits[0, -1]
            theirs = rounded(torch.tensor([prompt])).logits[0, -1].float()
        our_error += float((ticket.launched.logits_SV[0] - exact).std() / exact.std())
        their_error += float((theirs - exact).std() / exact.std())
    assert our_error < 1.3 * their_error


def test_an_error_of_the_device_ends_the_process(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = load(folder)

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(hand.runner.executor._model, "logits", fail)
    with pytest.raises(FatalError, match="illegal memory access"):
        hand.step((hand.add(PROMPT), 3))


def test_a_small_model_gets_one_thread_and_a_large_one_all_cores_but_one() -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 4000, "num_hidden_layers": 6,
        "hidden_size": 256, "intermediate_size": 700, "num_attention_heads": 4,
    }  # fmt: skip
    small, large = read_shape(raw), read_shape({**raw, "hidden_size": 8192})
    cores = len(os.sched_getaffinity(0))
    automatic = SETTINGS.model_copy(update={"num_threads": 0})
    assert choose_threads(automatic, small, torch.float32) == 1
    assert choose_threads(automatic, large, torch.float32) == max(1, cores - 1)
    assert choose_threads(SETTINGS.model_copy(update={"num_threads": 9}), small, torch.float32) == 9


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_weights_that_every_token_sees_are_counted_by_shape(variant: str) -> None:
    """Without the experts' own, which are stacks."""
    model = make_model(variant)
    shape = read_shape(model.config.to_dict())
    embedding = model.get_input_embeddings().weight
    matrices = [p.numel() for p in model.parameters() if p.dim() == 2 and p is not embedding]
    assert shape.num_common_weights == sum(matrices)
    stacks = [p.numel() for p in model.parameters() if p.dim() == 3]
    assert shape.num_step_weights == sum(matrices + stacks)


class TestPromises(RunnerPromises):
    pass


def test_yarn_goes_on_beyond_the_positions_that_the_config_names(tmp_path: Path) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = make_model("qwen2", rope_parameters=yarn, max_position_embeddings=64)
    settings = ComputeSettings(device="cpu", dtype="float32", page_tokens=8, max_num_seqs=2)
    runner = load_on_cpu(save_model(model, tmp_path), settings)
    assert runner.spec().max_model_len == 256
    hand = HandScheduler(runner, 8)
    prompt = list(range(3, 53)) * 3
    assert hand.run(hand.add(prompt), 12, chunk=60) == greedy_ids(model, prompt, 12)
