"""On the CUDA runner a small model drafts what it does on the CPU, and changes no text.

A drafter with the large model's own weights is right wherever it has read what it should have: so
what is stale, or was passed over, shows as a draft that is wrong.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.models import kernel_decoder
from services.compute.runner.cuda import pass_drafter
from services.compute.runner.cuda.pass_drafter import PassDrafter
from services.compute.runner.draft_model import DraftModel
from services.compute.speculative.controller import FixedDrafts
from services.compute.step import NO_IDS, Int32Array
from tests.kernels.runner.cuda_runners import ON_GPU, ONE_LAYER, SETTINGS, load_runner
from tests.kernels.runner.draft_guesses import Guesses
from tests.kernels.runner.draft_histories import play_with_and_without
from tests.kernels.runner.split_executor import load_split, thread_ranks
from tests.unit.compute import engine_server
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.tiny_models import make_model, save_model

ON_CPU = {"device": "cpu", "num_threads": 1}
WINDOWED = {} if ON_GPU else {"num_hidden_layers": 2}  # one of them sees 24 positions
GREEDY = SamplingParams(7, seed=1, ignore_eos=True)
DRAWN = SamplingParams(7, seed=1, temperature=0.8, ignore_eos=True)
ADJUSTED = SamplingParams(
    7, seed=2, temperature=0.9, top_p=0.9, frequency_penalty=0.5, ignore_eos=True
)


def drafting_with(folder: Path, **more: object) -> ComputeSettings:
    config = json.dumps({"model": str(folder), "num_speculative_tokens": 2, **more})
    return SETTINGS.model_copy(update={"speculative_config": config, "max_num_seqs": 8})


def answers(server: Server, *samplings: SamplingParams) -> Server:
    for counter, sampling in enumerate(samplings):
        server.ask(counter, [5, 9, 9, 8, *range(20, 22 + 8 * counter)], sampling)
    server.run()
    return server


def test_its_drafts_are_those_of_the_cpu_and_texts_those_without(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = save_model(make_model("llama", **ONE_LAYER), tmp_path / "large")
    small = save_model(make_model("qwen2_window", **WINDOWED), tmp_path / "small")
    drafting, plain = drafting_with(small), SETTINGS.model_copy(update=ON_CPU)
    on_cpu, on_device = Guesses(), Guesses()
    runner = load_runner(large, drafting, device)
    on_device.of_device(runner, monkeypatch)
    on_cpu.of_cpu(DraftModel, monkeypatch)
    samplings = GREEDY, DRAWN, ADJUSTED
    without = answers(Server(load_on_cpu(large, plain), plain), *samplings)
    found = answers(Server(runner, drafting), *samplings)
    drafting = drafting.model_copy(update=ON_CPU)
    answers(Server(load_on_cpu(large, drafting), drafting), *samplings)
    assert found.tokens == without.tokens
    both = on_cpu.keys() & on_device.keys()
    assert len(both) > 8
    assert {where: on_cpu[where] for where in both} == {where: on_device[where] for where in both}


def test_a_text_whose_drafts_are_all_wrong_is_what_it_is_without(
    tmp_path: Path, device: torch.device
) -> None:
    folder = save_model(make_model("llama", **ONE_LAYER), tmp_path)
    texts = []
    for settings in (SETTINGS, drafting_with(folder, synthetic_acceptance_rate=0.0)):
        server = answers(Server(load_runner(folder, settings, device), settings), GREEDY, DRAWN)
        texts.append(server.tokens)
    stats = server.scheduler.stats()
    assert stats.accepted_drafts_total == 0
    assert stats.drafts_total > 6
    assert texts[0] == texts[1]


def test_what_chunks_prefixes_aborts_and_swaps_leave_is_not_stale(
    tmp_path: Path, device: torch.device
) -> None:
    folder = save_model(make_model("llama", **ONE_LAYER), tmp_path)
    settings = drafting_with(folder).model_copy(update={"max_prefill_tokens": 12})
    runner = Restricted(load_runner(folder, settings, device), num_pages=6, num_host_pages=12)
    server = Server(runner, settings)
    shared = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    for counter in range(4):
        server.ask(counter, [*shared, counter, *range(10, 10 + 3 * counter)], GREEDY)
    while not server.tokens[0]:
        server.turn()
    server.abort(0)
    server.ask(4, [7, *shared], GREEDY)  # in the slot that becomes free
    server.run()
    server.ask(5, [*shared, 0, 8], DRAWN)
    server.run()
    stats = server.scheduler.stats()
    assert server.cached[5] > 0
    assert server.most_swapped > 0
    assert stats.accepted_drafts_total == stats.drafts_total > 6


class Seldom(FixedDrafts):
    """Drafts in the last steps of every eight."""

    period, num_plain, num_steps = 8, 6, 0

    def choose(
        self, slots_Q: Int32Array, limits_Q: Int32Array, positions_Q: Int32Array, num_rows: int
    ) -> Int32Array:
        self.num_steps += 1
        if self.num_steps % self.period < self.num_plain:
            return NO_IDS
        return super().choose(slots_Q, limits_Q, positions_Q, num_rows)


class BeforeTheSwap(Seldom):
    """Has drawn four tokens without drafts when a sequence is swapped out."""

    period, num_plain, num_steps = 6, 4, 4


@pytest.mark.parametrize(("policy", "more_than"), [(FixedDrafts, 30), (BeforeTheSwap, 20)])
def test_what_a_swap_left_unread_is_read_behind_it(
    policy: type[FixedDrafts],
    more_than: int,
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last drafts, and what steps without any have drawn."""
    monkeypatch.setattr(engine_server, "draft_policy", lambda *_: policy(8, 2))
    folder = save_model(make_model("llama", **ONE_LAYER), tmp_path)
    settings = drafting_with(folder)
    runner = Restricted(load_runner(folder, settings, device), num_pages=9, num_host_pages=20)
    server = Server(runner, settings)
    for counter in range(3):
        sampling = replace(DRAWN, max_tokens=30, seed=counter)
        server.ask(counter, [counter + 3, *range(10, 18 + 3 * counter)], sampling)
    server.run()
    stats = server.scheduler.stats()
    assert server.most_swapped > 0
    assert stats.accepted_drafts_total == stats.drafts_total > more_than


def test_what_it_has_not_read_it_reads_before_it_drafts(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(make_model("llama", **ONE_LAYER), tmp_path)
    settings = drafting_with(folder)
    monkeypatch.setattr(engine_server, "draft_policy", lambda *_: Seldom(8, 2))
    monkeypatch.setattr(pass_drafter, "READ_SIZES", (4, 8))  # not for all that is behind
    longer = replace(DRAWN, max_tokens=14)
    server = Server(load_runner(folder, settings, device), settings)
    stats = answers(server, longer, longer).scheduler.stats()
    assert stats.accepted_drafts_total == stats.drafts_total > 5


def test_a_model_that_sees_no_whole_text_is_refused(tmp_path: Path, device: torch.device) -> None:
    folder = save_model(make_model("mistral_window", **ONE_LAYER), tmp_path)
    with pytest.raises(ConfigError, match="no layer of this model sees its whole text"):
        load_runner(folder, drafting_with(folder), device)


@pytest.mark.skipif(ON_GPU, reason="ranks have a GPU each, and this is one process")
def test_ranks_compute_the_drafts_of_the_first(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is always right, whatever the drafter of another rank says."""
    monkeypatch.setattr(kernel_decoder, "kernel_ranks", thread_ranks)
    guess = PassDrafter._guess

    def differ(drafter: PassDrafter, *about: Any) -> None:
        guess(drafter, *about)
        if drafter is not machines[0].drafter:
            drafter._machine.resident.drafts_NK[:, :2] = 7

    monkeypatch.setattr(PassDrafter, "_guess", differ)
    folder = save_model(make_model("llama", **ONE_LAYER), tmp_path)
    settings = drafting_with(folder)
    runner = load_split(folder, settings, device, 2)
    machines = runner.executor._machines  # type: ignore[attr-defined]
    found = answers(Server(runner, settings), GREEDY, DRAWN)
    plain = SETTINGS.model_copy(update=ON_CPU)
    assert found.tokens == answers(Server(load_on_cpu(folder, plain), plain), GREEDY, DRAWN).tokens
    stats = found.scheduler.stats()
    assert stats.accepted_drafts_total == stats.drafts_total > 4


@pytest.mark.gpu
@pytest.mark.parametrize("small", ["llama", "qwen2_window"])
@pytest.mark.parametrize("large", ["llama", "gpt_oss", "deepseek_v3"])
def test_random_histories_say_the_same(
    large: str, small: str, tmp_path: Path, device: torch.device
) -> None:
    folder = save_model(make_model(large), tmp_path / "large")
    drafting = drafting_with(save_model(make_model(small), tmp_path / "small"))
    stats = play_with_and_without(folder, drafting, device)
    assert sum(each.drafts_total for each in stats) > 20
