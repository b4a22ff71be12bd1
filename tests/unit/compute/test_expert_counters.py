"""What experts were given is counted where it is routed, and heartbeats say it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from common.messages.experts import ExpertLoad
from services.compute.config import ComputeSettings
from services.compute.expert_counters import INTERVAL_S, ExpertReport
from services.compute.kernels.experts.routing import Routing, route
from services.compute.runner.packing_runner import PackingRunner
from services.compute.warm_up import warm_up
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_scenarios import COUNT, GREEDY, PROMPTS
from tests.unit.compute.engine_server import Server
from tests.unit.compute.models.family_models import random_model
from tests.unit.compute.tiny_models import make_model, save_model

MODEL = "qwen3 moe"  # an MLP in its first layer
SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=8, max_batched_token_mem=2048, num_threads=1,
    max_prefill_tokens=13, prefix_cache=False,
    speculative_config="off",  # drafts that are wrong choose experts, too
)  # fmt: skip


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> PackingRunner:
    return load_on_cpu(save_model(random_model(MODEL), tmp_path_factory.mktemp("moe")), SETTINGS)


def counted_by_hand(texts: list[list[int]]) -> dict[int, list[int]]:
    """By the logits that transformers' routers make of the texts: the tokens of each expert."""
    model = random_model(MODEL)
    routing = Routing(model.config.num_experts, model.config.num_experts_per_tok)
    dense, num_layers = model.config.mlp_only_layers, model.config.num_hidden_layers
    counts = {layer: Counter[int]() for layer in range(num_layers) if layer not in dense}
    for text in texts:
        with torch.inference_mode():
            said = model(torch.tensor([text]), output_router_logits=True, use_cache=False)
        for count, logits_TX in zip(counts.values(), said.router_logits, strict=True):
            count.update(route(logits_TX.float(), routing)[1].flatten().tolist())
    experts = range(model.config.num_experts)
    return {layer: [count[expert] for expert in experts] for layer, count in counts.items()}


def rows(load: ExpertLoad | None) -> dict[int, list[int]]:
    assert load is not None
    load.check()
    return {layer: tokens.tolist() for layer, tokens in load.by_layer()}


def test_counts_of_batches_and_chunks_are_those_of_every_token_by_itself(
    runner: PackingRunner,
) -> None:
    server = Server(runner, SETTINGS)
    warm_up(server.engine, server.scheduler)  # which is not counted
    for counter, prompt in enumerate(PROMPTS):
        server.ask(counter, prompt, GREEDY)
    server.run()
    assert server.engine.stats.num_steps < len(PROMPTS) * COUNT
    # the last token of an answer is never an input
    texts = [prompt + server.tokens[number][:-1] for number, prompt in enumerate(PROMPTS)]
    assert rows(server.engine.experts.load(0.0)) == counted_by_hand(texts)


def test_the_counters_are_looked_at_twice_a_second(runner: PackingRunner) -> None:
    server = Server(runner, SETTINGS)
    first = server.engine.experts.load(10.0)
    assert not any(map(sum, rows(first).values()))
    server.ask(0, PROMPTS[0], GREEDY)
    server.run()
    assert server.engine.experts.load(10.0 + INTERVAL_S / 2) is first
    later = rows(server.engine.experts.load(10.0 + INTERVAL_S))
    num_tokens = len(PROMPTS[0]) + COUNT - 1
    assert {sum(tokens) for tokens in later.values()} == {num_tokens * 3}


def test_a_model_without_experts_says_nothing_of_them(tmp_path: Path) -> None:
    dense = load_on_cpu(save_model(make_model("llama"), tmp_path), SETTINGS)
    assert ExpertReport(dense.expert_counters()).load(0.0) is None
