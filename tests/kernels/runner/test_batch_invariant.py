"""With `batch_invariant` logits, tokens and logprobs are a request's own, in bfloat16: bitwise the
same alone, in any company, in chunks, from the prefix tree and after preemption.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from common.messages.sampling import SamplingParams
from services.compute.runner.packing_runner import PackingRunner
from tests.kernels.runner.cuda_runners import ON_GPU, ONE_LAYER, SETTINGS, LogitsTap, load_runner
from tests.kernels.runner.row_by_row import multiply_row_by_row
from tests.unit.compute.engine_histories import (
    EOS_IDS,
    Ask,
    alone,
    play,
    random_history,
    random_sampling,
)
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.tiny_models import make_model, save_model

INVARIANT = SETTINGS.model_copy(
    update={"dtype": "bfloat16", "batch_invariant": True, "page_tokens": 16}
)
ROOMY = {"num_pages": 100, "num_host_pages": 0}
TIGHT = {"num_pages": 12, "max_model_len": 128, "num_host_pages": 0}
NUM_REQUESTS, MOST_TOKENS = (32, 40) if ON_GPU else (2, 3)

FAMILIES = ["qwen3"]  # and the dtype of the KV cache
if ON_GPU:
    FAMILIES += [
        "llama",
        "mistral_window",
        "qwen3 fp8",
        "llama int8",
        "deepseek_v3",
        "deepseek_v3 fp8",
    ]

Logits = dict[tuple[int, int, int], Tensor]
Serve = Callable[..., tuple[Server, LogitsTap]]


@pytest.fixture(scope="module", autouse=True)
def rows_of_a_product_do_not_meet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            multiply_row_by_row(patch)
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def runner(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    device: torch.device,
) -> PackingRunner:
    family, _, kv_cache_dtype = request.param.partition(" ")
    model = make_model(family, **ONE_LAYER).to(torch.bfloat16)
    settings = INVARIANT.model_copy(update={"kv_cache_dtype": kv_cache_dtype or "auto"})
    return load_runner(save_model(model, tmp_path_factory.mktemp("model")), settings, device)


@pytest.fixture(scope="module")
def serve(runner: PackingRunner) -> Serve:
    def make(spec: dict[str, Any], **settings: Any) -> tuple[Server, LogitsTap]:
        tap = LogitsTap(Restricted(runner, eos_token_ids=EOS_IDS, **spec), runner)
        return Server(tap, INVARIANT.model_copy(update=settings)), tap

    return make


class Alone:
    """Each request of a history by itself, on a server that has never seen another."""

    def __init__(self, serve: Serve, history: list[Ask]) -> None:
        self.logits: Logits = {}
        self._servers = {}
        for ask in history:
            server, tap = serve(ROOMY, prefix_cache=False)
            play(server, alone(ask))
            tap.check_against(self.logits)
            for counter in ask.counters:
                self._servers[counter] = server

    def check(self, server: Server, tap: LogitsTap, history: list[Ask]) -> None:
        """Another run of the history gave the same, as far as its clients stayed."""
        logits = dict(self.logits)
        assert tap.check_against(logits) >= sum(map(len, server.tokens.values()))
        for ask in history:
            for counter in ask.counters:
                theirs = self._servers[counter]
                tokens, scores = server.tokens[counter], server.logprobs[counter]
                if server.reasons[counter] != "aborted":
                    assert tokens == theirs.tokens[counter], ask
                assert tokens == theirs.tokens[counter][: len(tokens)], ask
                assert scores == theirs.logprobs[counter][: len(scores)], ask


HISTORIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "together": (ROOMY, {}),
    "in chunks of 7": (ROOMY, {"max_prefill_tokens": 7}),
    "in chunks of 33": (ROOMY, {"max_prefill_tokens": 33, "prefix_cache": False}),
    "one step at a time": (ROOMY, {"in_flight_steps": 0, "schedule": "prefill_first"}),
    "preempted": (TIGHT, {"max_prefill_tokens": 50}),
    "swapped": ({**TIGHT, "num_host_pages": 100}, {"max_prefill_tokens": 50}),
    "swapped or not": ({**TIGHT, "num_host_pages": 5}, {"max_prefill_tokens": 19}),
}


@pytest.mark.parametrize("seed", [2, 4, 5, 8] if ON_GPU else [2])
def test_random_histories_of_requests_give_what_each_gives_alone(serve: Serve, seed: int) -> None:
    history = random_history(seed, NUM_REQUESTS, MOST_TOKENS)
    by_themselves = Alone(serve, history)
    for name in HISTORIES if ON_GPU else ["in chunks of 7"]:
        spec, settings = HISTORIES[name]
        server, tap = serve(spec, **settings)
        play(server, history)
        by_themselves.check(server, tap, history)
        if not ON_GPU:
            continue
        stats = server.scheduler.stats()
        assert bool(stats.preemptions_total) == (spec is not ROOMY), name
        assert bool(server.most_swapped) == (spec["num_host_pages"] > 0), name
        assert max(server.cached.values()) >= 32, name  # forks share without the tree, too


def test_a_prompt_has_the_same_logits_in_chunks_of_any_size_and_from_the_prefix_tree(
    serve: Serve,
) -> None:
    """Long, so that its keys fill many tiles of attention."""
    rng = random.Random(9)
    prompt = [rng.randrange(3, 199) for _ in range(400 if ON_GPU else 40)]
    sampling = SamplingParams(max_tokens=4 if ON_GPU else 1, seed=1, ignore_eos=True)
    logits: Logits = {}
    tokens = []
    for chunk in (120, 100, 64, 17, 16, 5) if ON_GPU else (40, 13):
        server, tap = serve(ROOMY, max_prefill_tokens=chunk)
        for counter in (0, 10):
            server.ask(counter, prompt, sampling)
            server.run()
            tokens.append(server.tokens[counter])
        assert server.cached[10] >= len(prompt) - 16
        tap.check_against(logits)
    assert len(logits) == sampling.max_tokens
    assert tokens == tokens[:1] * len(tokens)


def test_a_sampled_sequence_is_the_same_alone_and_among_others_with_other_settings(
    serve: Serve,
) -> None:
    """All settings there are, in one batch of as many rows as there can be."""
    num_rows = INVARIANT.max_num_seqs
    rng = random.Random(1)
    common = {"max_tokens": 12 if ON_GPU else 3, "temperature": 0.9, "ignore_eos": True}
    every = [
        SamplingParams(seed=1, **common, num_logprobs=5),
        SamplingParams(seed=2, **common, top_k=20, top_p=0.9, min_p=0.01),
        SamplingParams(seed=3, **common, logit_bias=((5, 2.0), (6, -9.0)), num_logprobs=0),
        SamplingParams(
            seed=4, **common, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2
        ),
        SamplingParams(
            seed=5, max_tokens=common["max_tokens"], min_tokens=6, stop_token_ids=tuple(range(90))
        ),
        SamplingParams(seed=6, max_tokens=common["max_tokens"], temperature=0.0, min_tokens=4),
        SamplingParams(seed=7, **common, top_p=0.7, repetition_penalty=0.9, num_logprobs=3),
        random_sampling(rng, 8, common["max_tokens"]),
    ][:num_rows]
    prompts = [[rng.randrange(3, 199) for _ in range(rng.randint(2, 30))] for _ in every]
    logits: Logits = {}
    together, tap = serve(ROOMY)
    for counter, (prompt, sampling) in enumerate(zip(prompts, every, strict=True)):
        together.ask(counter, prompt, sampling)
    together.run()
    tap.check_against(logits)
    for counter, (prompt, sampling) in enumerate(zip(prompts, every, strict=True)):
        server, tap = serve(ROOMY)
        server.ask(counter, prompt, sampling)
        server.run()
        assert server.tokens[counter] == together.tokens[counter], sampling
        assert server.logprobs[counter] == together.logprobs[counter], sampling
        assert server.reasons[counter] == together.reasons[counter], sampling
        assert tap.check_against(logits) >= len(server.tokens[counter])
