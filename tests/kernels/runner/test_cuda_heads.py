"""On the CUDA runner a head guesses what plain modules guess of a whole text, and changes none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from common.messages.sampling import SamplingParams
from services.compute.models import kernel_decoder
from services.compute.runner.cuda import pass_drafter
from services.compute.runner.packing_runner import PackingRunner
from tests.cases import num_cases
from tests.kernels.runner.cuda_runners import ON_GPU, SETTINGS
from tests.kernels.runner.draft_histories import play_with_and_without
from tests.kernels.runner.split_executor import load_split, thread_ranks
from tests.unit.compute import engine_server
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.draft_heads import save_head
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.seldom_drafts import Seldom
from tests.unit.compute.tiny_models import VOCAB_SIZE, make_model, save_model

ON_CPU = {"device": "cpu", "num_threads": 1}
WORDS = (5, 9, 11)
BIAS_V = torch.zeros(VOCAB_SIZE)
BIAS_V[list(WORDS)] = 40.0
SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def ask(server: Server, number: int, length: int, *tail: int) -> None:
    """For a greedy answer; those with an even number have few words to say, so that some drafts are
    right."""
    bias = () if number % 2 else tuple((word, 40.0) for word in WORDS)
    about = {"temperature": 0.0, "ignore_eos": True, "logit_bias": bias}
    server.ask(number, [*SHARED, number % 2, *tail], SamplingParams(length, number, **about))


def say_little(server: Server) -> Server:
    ask(server, 2, 6, 10, 11, 12, 13)
    server.run()
    return server


def converse(server: Server) -> Server:
    """Chunks, an abort, pages that leave and return, and a shared prefix."""
    for number in range(4):
        ask(server, number, 8, *range(10, 10 + 3 * number))
    while not server.tokens[3]:
        server.turn()
    server.abort(3)
    server.run()
    ask(server, 5, 3, 10, 11, 8)
    server.run()
    assert server.most_swapped > 0 and server.cached[5] > 0
    return server


def guesses_of(
    runner: PackingRunner, patch: pytest.MonkeyPatch
) -> list[tuple[list[int], list[int]]]:
    """The drafts that steps verify from now on, each behind the text that it follows."""
    machine = runner.executor._machine  # type: ignore[attr-defined]
    forward, resident, found = machine.forward, machine.resident, []

    def noted(num_tokens: int, only_decodes: bool) -> None:
        passes, texts = machine.drafter._drafts
        columns = passes.slot_D.tolist(), passes.num_drafts_D.tolist()
        for slot, num_drafts in zip(*columns, strict=True):
            text = texts.ids_NL[slot, : int(resident.length[slot]) + 1].tolist()
            if num_drafts:
                found.append((text, resident.drafts_NK[slot, :num_drafts].tolist()))
        passes.num_drafts_D.zero_()
        forward(num_tokens, only_decodes)

    patch.setattr(machine, "forward", noted)
    return found


class Case(NamedTuple):
    method: str
    variant: str
    talk: Callable[[Server], Server]
    every: int = 1  # of so many steps one has drafts
    num_ranks: int = 1


SIZES = {"llama": {"num_hidden_layers": 3}, "qwen3_moe": {"num_hidden_layers": 2}}
"""Of models where kernels are interpreted."""

OF_HEADS = {"qwen3_moe": {"head_dim": 16}}
"""That of heads of which nothing else is said."""

SPLIT = [
    Case("eagle", "llama", say_little, num_ranks=2),
    Case("eagle3", "llama", say_little, num_ranks=2),
    Case("mtp", "deepseek_v3", say_little, num_ranks=2),
    Case("medusa", "llama", say_little, num_ranks=2),
]
"""The first with the model's own head, of which ranks have a part each."""


@pytest.mark.parametrize(
    "case",
    [
        Case("eagle3", "llama", converse, every=2),
        Case("eagle3 last", "qwen3_moe", say_little),
        Case("mtp 2", "deepseek_v3", say_little),
        Case("speculators", "llama", converse),
        Case("medusa", "llama", say_little),
        *(() if ON_GPU else SPLIT[: num_cases(1, 4)]),
        *(
            pytest.param(Case(*heads, converse), marks=pytest.mark.gpu)
            for heads in (
                ("eagle3", "llama"),
                ("eagle3 last", "llama"),
                ("eagle", "llama"),
                ("mtp", "glm4_moe"),
                ("mtp 3", "deepseek_v3"),
            )
        ),
    ],
    ids=lambda case: f"{case.method} {case.variant} {case.every} {case.num_ranks}",
)
def test_its_drafts_are_those_of_the_whole_text(
    case: Case, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, variant, talk, every, num_ranks = case
    monkeypatch.setattr(kernel_decoder, "kernel_ranks", thread_ranks)
    monkeypatch.setattr(pass_drafter, "READ_SIZES", (4, 8))  # not for all that is behind
    monkeypatch.setattr(Seldom, "every", every)
    monkeypatch.setattr(
        engine_server, "draft_policy", lambda config, *_: Seldom(8, 3) if config else None
    )
    sizes = {} if ON_GPU else SIZES.get(variant, {})
    model = make_model(variant, **OF_HEADS.get(variant, {}), **sizes)
    folder = save_model(model, tmp_path / "model")
    head, config = save_head(method, model, folder, tmp_path / "head")
    plain = SETTINGS.model_copy(update={"max_num_seqs": 8, "max_prefill_tokens": 12})
    drafting = plain.model_copy(update={"speculative_config": config})
    runner = load_split(folder, drafting, device, num_ranks)
    guesses = guesses_of(runner, monkeypatch)
    few = {"num_pages": 6, "num_host_pages": 12}
    on_cpu = plain.model_copy(update=ON_CPU)
    without = talk(Server(Restricted(load_on_cpu(folder, on_cpu), **few), on_cpu))
    found = talk(Server(Restricted(runner, **few), drafting))
    assert found.tokens == without.tokens
    assert len(guesses) >= 2
    for text, drafts in guesses:
        bias_V = 0 * BIAS_V if text[len(SHARED)] % 2 else BIAS_V
        # Kernels over latents have no span.
        more = {"sees_first": True} if variant == "deepseek_v3" else {}
        assert drafts == head.drafts(text, len(drafts), bias_V, **more)
    assert method != "eagle3" or found.scheduler.stats().accepted_drafts_total


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "variant"),
    [("eagle3", "llama"), ("eagle", "llama"), ("medusa", "llama"), ("mtp", "deepseek_v3")],
)
def test_random_histories_say_the_same(
    method: str, variant: str, tmp_path: Path, device: torch.device
) -> None:
    model = make_model(variant, **({"num_hidden_layers": 4} if variant == "llama" else {}))
    folder = save_model(model, tmp_path / "model")
    _, config = save_head(method, model, folder, tmp_path / "head")
    drafting = SETTINGS.model_copy(update={"speculative_config": config})
    stats = play_with_and_without(folder, drafting, device)
    assert sum(each.drafts_total for each in stats) > 20
