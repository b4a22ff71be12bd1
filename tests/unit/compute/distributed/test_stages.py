"""A model of any family says the same, whether one process has its layers or several stages do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

import tests.cases  # noqa: F401
from common.errors import ConfigError
from common.messages.sampling import GrammarSpec
from services.compute.config import ComputeSettings
from services.compute.distributed.stages import Stages
from services.compute.grammar.protocol import MaskStatus
from services.compute.models import weights
from services.compute.runner.eager import load_eager
from services.compute.runner.executor import Executor
from services.compute.runner.model_loader import ModelLoader
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.recording import Recording, RecordingExecutor
from services.compute.runner.replay import Replay
from services.compute.scheduler.outputs import Output
from services.compute.step import (
    BoolArray,
    ForcedTokens,
    Int32Array,
    SlotDelta,
    StepPlan,
    StepResult,
    mask_words,
)
from services.compute.step_loop import StepLoop
from tests.patience import PATIENCE_S
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.distributed.served import (
    DUMMY,
    GREEDY,
    HEARD_SCALE,
    PROMPTS,
    SETTINGS,
    answers,
    take_by_name,
)
from tests.unit.compute.distributed.stage_memory import MemoryStages, StagesHere
from tests.unit.compute.engine_histories import play, random_history
from tests.unit.compute.engine_server import Server
from tests.unit.compute.models.family_models import FAMILIES, save_config
from tests.unit.compute.tiny_models import make_model, save_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights.DummyWeights, "take", take_by_name)
    monkeypatch.setattr(weights, "SCALE", HEARD_SCALE)


def check(folder: Path, settings: ComputeSettings, count: int) -> None:
    """Tokens and logprobs are those of one process; rows are beside others in a step."""
    one = answers(load_on_cpu(folder, settings), settings)
    stages = StagesHere(folder, settings, count)
    staged = answers(PackingRunner(stages.executor), settings)
    assert staged.tokens == one.tokens
    for counter, rows in one.logprobs.items():
        found, expected = (
            np.array([row.top_logprobs for row in each])
            for each in (staged.logprobs[counter], rows)
        )
        assert np.allclose(found, expected, rtol=2e-4, atol=2e-4)
    assert stages.most_ahead == 2  # there are as many prompts


KINDS = [
    "llama", "gemma 2", "gemma 3", "smollm 3", "qwen3 moe", "gpt-oss", "llama 4", "deepseek v3",
    "ernie 4.5 moe", "olmoe",
]  # fmt: skip
"""Dense models and mixtures, tied heads, windows, latents, layers that differ."""


@pytest.mark.parametrize("name", KINDS if settings.default.derandomize else FAMILIES)
def test_two_stages_say_what_one_process_says(name: str, tmp_path: Path) -> None:
    check(save_config(name, tmp_path), DUMMY, 2)


def test_a_stage_may_have_neither_embedding_nor_head(tmp_path: Path) -> None:
    """Five layers on three stages: 2, 2 and 1."""
    check(save_config("llama", tmp_path, num_hidden_layers=5), DUMMY, 3)


def test_stages_see_different_spans_and_have_the_pages_of_all(tmp_path: Path) -> None:
    """One has windows only, the other both."""
    types = ["sliding_attention"] * 4 + ["full_attention", "sliding_attention"]
    folder = save_config("gemma 3", tmp_path, num_hidden_layers=6, layer_types=types)
    check(folder, DUMMY, 2)
    stages = MemoryStages(0, 2, []), MemoryStages(1, 2, [])
    loaders = [ModelLoader.read(folder, DUMMY, CPU, stages=each) for each in stages]
    assert loaders[0].groups == loaders[1].groups
    layouts = [loader.layout for loader in loaders]
    spans = [[layout.spans[place.group].is_full for place in layout.places] for layout in layouts]
    assert spans == [[False] * 3, [False, True, False]]
    assert len(loaders[0].groups) == 4  # 3 layers that see windows, and one that sees all
    assert len(ModelLoader.read(folder, DUMMY, CPU).groups) == 6


def test_prompts_are_scored_and_pages_swapped_while_steps_are_in_all_stages(tmp_path: Path) -> None:
    folder = save_config("qwen3", tmp_path, num_hidden_layers=3)
    few = DUMMY.model_copy(
        update={"swap_space": 0.01, "max_batched_token_mem": 128, "max_prefill_tokens": 16}
    )
    sampling = replace(GREEDY, max_tokens=24, num_prompt_logprobs=1)

    def served(executor: Executor) -> Server:
        server = Server(PackingRunner(executor), few)
        prompts = [PROMPTS[1], PROMPTS[1][::-1], PROMPTS[0], PROMPTS[1][:32] + [7], PROMPTS[0]]
        for counter, prompt in enumerate(prompts):
            wish = sampling if counter < 2 else replace(GREEDY, max_tokens=24)
            server.ask(counter, prompt, replace(wish, seed=counter))
        server.run()
        assert server.most_swapped
        return server

    stages = StagesHere(folder, few, 3)
    staged, one = served(stages.executor), served(load_eager(folder, few))
    assert staged.tokens == one.tokens
    assert sum(staged.cached.values()) > 0
    assert stages.most_ahead == 3


class OneToken:
    """Masks that are there at once and allow one token."""

    token = 5

    def place(self, deltas: Sequence[SlotDelta]) -> None:
        pass

    def advance(self, plan: StepPlan, result: StepResult, skipped: frozenset[int]) -> None:
        pass

    def awaited(self) -> list[tuple[int, int]]:
        return []

    def forced(self) -> list[ForcedTokens]:
        return []

    def look(self, plan: StepPlan) -> MaskStatus:
        return MaskStatus(np.ones(len(plan.structured), dtype=np.bool_), {})

    def bits_GW(self, plan: StepPlan, ready: BoolArray) -> Int32Array:
        bits = np.zeros((int(ready.sum()), mask_words(199)), dtype=np.int32)
        bits[:, 0] = 1 << self.token
        return bits


async def test_the_step_loop_turns_stages_also_for_structured_texts(tmp_path: Path) -> None:
    stages = StagesHere(save_config("llama", tmp_path), DUMMY, 2)
    server = Server(PackingRunner(stages.executor), DUMMY, OneToken())
    structured = replace(GREEDY, grammar_spec=GrammarSpec("start: /a/"), max_tokens=6)
    for counter, sampling in enumerate((GREEDY, structured, GREEDY)):
        server.ask(counter, PROMPTS[counter % 2], replace(sampling, num_logprobs=-1))

    def hear(outputs: list[Output]) -> None:
        server.hear(outputs)
        if len(server.reasons) == 3:
            loop.close()

    loop = StepLoop(server.engine, server.scheduler, hear)
    async with asyncio.timeout(PATIENCE_S):
        await loop.run()
    assert server.tokens[1] == [OneToken.token] * 6
    assert server.tokens[0] == server.tokens[2]
    assert stages.most_ahead == 2


def test_any_history_says_what_it_says_in_one_process(tmp_path: Path) -> None:
    folder = save_model(make_model("qwen3"), tmp_path)
    more = SETTINGS.model_copy(update={"max_batched_token_mem": 160, "max_prefill_tokens": 24})
    history = random_history(5, 24, greedy=True)
    staged, one = (
        Server(PackingRunner(executor), more)
        for executor in (StagesHere(folder, more, 2).executor, load_eager(folder, more))
    )
    for server in (staged, one):
        play(server, history)
        assert server.scheduler.stats().preemptions_total > 0
    for ask in history:
        for counter in ask.counters if ask.leaves_at is None else ():
            assert staged.tokens[counter] == one.tokens[counter]


def test_what_the_last_stage_records_is_replayed_by_all(tmp_path: Path) -> None:
    folder = save_config("llama", tmp_path)
    recorded = DUMMY.model_copy(update={"record_dir": str(tmp_path / "recordings")})

    def load(folder: Path, settings: ComputeSettings, stages: Stages) -> Executor:
        executor = load_eager(folder, settings, stages=stages)
        is_last = stages.number == stages.count - 1
        return RecordingExecutor.begin(executor, folder, settings) if is_last else executor

    stages = StagesHere(folder, recorded, 2, load)
    answers(PackingRunner(stages.executor), recorded)
    stages.executor.close()
    assert stages.most_ahead == 2
    (file,) = (tmp_path / "recordings").iterdir()
    again = StagesHere(folder, DUMMY, 2)
    found = Replay().run(again.executor, Recording(file).frames())
    assert found.num_results > 4 and not found.error and not found.difference


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 9.* each stage needs one"):
        StagesHere(save_config("llama", tmp_path), DUMMY, 9)
