"""On the CUDA runner every text is with drafts what it is without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.messages.sampling import GrammarSpec, SamplingParams
from tests.flow.structured_ring import EOS, VOCAB_SIZE
from tests.kernels.runner.cuda_runners import ONE_LAYER, SETTINGS, load_runner
from tests.kernels.runner.draft_histories import play_with_and_without
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.masks_here import MasksHere
from tests.unit.compute.tiny_models import make_model, save_model

OFTEN = '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}'
DRAFTING = SETTINGS.model_copy(update={"speculative_config": OFTEN})


def test_a_text_of_few_words_is_what_the_cpu_says_without_drafts(
    tmp_path: Path, device: torch.device
) -> None:
    folder = save_model(make_model("llama", **ONE_LAYER), tmp_path)
    bias = tuple((token, 14.0) for token in (5, 9))
    sampling = SamplingParams(
        14, seed=1, temperature=0.8, ignore_eos=True, logit_bias=bias, frequency_penalty=0.6
    )
    on_cpu = SETTINGS.model_copy(update={"device": "cpu"})
    servers = [
        Server(load_on_cpu(folder, on_cpu), on_cpu),
        Server(load_runner(folder, DRAFTING, device), DRAFTING),
    ]
    for server in servers:
        server.ask(0, [5, 9, 9, 8], sampling)
        server.run()
    without, drafting = servers
    assert drafting.tokens == without.tokens
    assert drafting.scheduler.stats().accepted_drafts_total > 0
    assert drafting.engine.stats.num_steps < without.engine.stats.num_steps


def test_forced_tokens_of_a_grammar_are_computed_at_once(
    tmp_path: Path, device: torch.device
) -> None:
    folder = save_model(make_model("llama", **{**ONE_LAYER, "vocab_size": VOCAB_SIZE}), tmp_path)
    grammar = 'start: ("a" | "b") "c is it" ("." | "!") "ok"\n'
    sampling = SamplingParams(14, seed=1, temperature=0.8, grammar_spec=GrammarSpec(grammar))
    on_cpu = SETTINGS.model_copy(update={"device": "cpu"})
    servers = []
    for runner, settings in (
        (load_on_cpu(folder, on_cpu), on_cpu),
        (load_runner(folder, DRAFTING, device), DRAFTING),
    ):
        masks = MasksHere(tmp_path, settings.max_num_seqs)
        server = Server(Restricted(runner, eos_token_ids=(EOS,)), settings, masks)
        server.ask(0, [5, 9, 9, 8], sampling)
        server.run()
        masks.close()
        servers.append(server)
    without, drafting = servers
    assert drafting.tokens == without.tokens
    assert drafting.scheduler.stats().accepted_drafts_total > 5
    assert drafting.engine.stats.num_steps < without.engine.stats.num_steps - 4


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["llama", "mistral_window", "gpt_oss", "deepseek_v3"])
def test_random_histories_say_the_same(variant: str, tmp_path: Path, device: torch.device) -> None:
    folder = save_model(make_model(variant), tmp_path)
    stats = play_with_and_without(folder, DRAFTING, device)
    assert sum(each.accepted_drafts_total for each in stats) > 20
