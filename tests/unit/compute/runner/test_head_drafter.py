"""Heads guess what plain modules guess of the whole text, whatever came between the steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.distributed import context
from services.compute.kernels.sampling.slot_entries import SlotEntry
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.models.draft_head import ModelEnds
from services.compute.runner import drafter_pages, eager, read_rows
from services.compute.runner.eager_drafters import DrafterMaker, Host
from services.compute.runner.model_loader import ModelLoader
from services.compute.runner.packing_runner import PackingRunner
from services.compute.speculative.acceptance import NO_DRAFT
from services.compute.speculative.drafter import ChunkRows, DecodeRows, Drafter
from services.compute.step import Int32Array, Int64Array
from tests.cases import num_cases
from tests.unit.compute import engine_server
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.distributed.rank_threads import RankThreads
from tests.unit.compute.distributed.stage_memory import StagesHere
from tests.unit.compute.draft_heads import save_head
from tests.unit.compute.engine_histories import EOS_IDS
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.seldom_drafts import Seldom
from tests.unit.compute.tiny_models import VOCAB_SIZE, make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=16, max_batched_token_mem=1024, num_threads=1,
    max_prefill_tokens=24, swap_space=0.003,
    speculative_config="off",
)  # fmt: skip


class Watched:
    """A drafter whose drafts are noted, each with the text that it follows."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._texts: dict[int, list[int]] = {}
        self.noted: list[tuple[list[int], list[int]]] = []

    @property
    def computes(self) -> bool:
        return self._drafter.computes

    def enter(self, entry: SlotEntry) -> None:
        self._texts[entry.slot] = [*entry.prompt_ids.tolist(), *entry.output_ids.tolist()]
        self._drafter.enter(entry)

    def extend(self, slot: int, tokens: list[int]) -> tuple[Int32Array, int]:
        self._texts.setdefault(slot, []).extend(tokens)
        return self._drafter.extend(slot, tokens)

    def read(self, chunks: ChunkRows) -> Iterable[bool]:
        return self._drafter.read(chunks)

    def observe(
        self, rows: ChunkRows, num_decodes: int, states: Sequence[Tensor]
    ) -> Iterable[bool]:
        return self._drafter.observe(rows, num_decodes, states)

    def draft(self, decodes: DecodeRows, drafts_NK: Int64Array) -> Iterable[bool]:
        given_Q = drafts_NK[decodes.slots_Q, 0] != NO_DRAFT
        yield from self._drafter.draft(decodes, drafts_NK)
        for row, slot in enumerate(decodes.slots_Q.tolist()):
            count = int(decodes.num_drafts_Q[row])
            if count and not given_Q[row]:
                text = self._texts[slot][: int(decodes.positions_Q[row]) + 1]
                self.noted.append((text, drafts_NK[slot, :count].tolist()))

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        self._drafter.transfer(direction, pages)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """Those of the runners that are loaded from now on."""
    drafters: list[Watched] = []
    load = eager.load_drafter

    def load_watched(loader: ModelLoader, ends: ModelEnds) -> DrafterMaker | None:
        make = load(loader, ends)
        if make is None:
            return None

        def make_watched(host: Host) -> Drafter:
            drafters.append(Watched(make(host)))
            return drafters[-1]

        return make_watched

    monkeypatch.setattr(eager, "load_drafter", load_watched)
    return drafters


STEM = [(7 * n + 3) % 190 + 3 for n in range(44)]
WORDS = (5, 9, 11)
BIAS_V = torch.zeros(VOCAB_SIZE)
BIAS_V[list(WORDS)] = 40.0


def talk(server: Server) -> None:
    """Greedy answers that share beginnings, one of them a whole conversation; chunks in between.

    Those with an even number have few words to say, so that some drafts are right.
    """

    def ask(number: int, tail: list[int], length: int) -> None:
        bias = () if number % 2 else tuple((word, 40.0) for word in WORDS)
        sampling = SamplingParams(
            length, seed=number, temperature=0.0, ignore_eos=True, logit_bias=bias
        )
        server.ask(number, [*STEM, number, *tail], sampling)

    for number, num_more, length in ((12, 29, 11), (14, 4, 18), (15, 20, 14), (16, 9, 18)):
        ask(number, list(range(30, 30 + num_more)), length)
        for _ in range(2):
            server.turn()
    server.run()
    ask(16, [*range(30, 39), *server.tokens[16], 77, 78], 12)
    server.run()
    assert server.cached[16] >= 64  # some of the answer, too


class Case(NamedTuple):
    method: str
    variant: str
    every: int = 1  # of so many steps one has drafts
    num_ranks: int = 1
    num_stages: int = 1
    shares: bool = False  # ranks have all of the model, and a part of the prompts' tokens each


@pytest.mark.parametrize(
    "case",
    [
        Case("eagle3", "llama", every=5),
        Case("speculators", "llama"),
        Case("mtp 2", "glm4_moe", every=2),
        Case("mtp 3", "deepseek_v3"),
        Case("eagle", "llama", num_ranks=2),
        Case("mtp", "glm4_moe", num_ranks=2),
        Case("medusa", "llama", num_ranks=3, shares=True),
        Case("mtp 2", "deepseek_v3", num_stages=2),
        Case("eagle", "llama", every=3, num_stages=2),
        Case("medusa", "llama", num_stages=2),
        Case("eagle3 last", "llama", num_stages=3),
        Case("eagle3 last", "llama"),
        Case("eagle", "llama"),
        Case("mtp", "deepseek_v3"),
        Case("eagle3", "llama", every=5, num_ranks=2),
        Case("medusa", "llama", num_ranks=2),
        Case("mtp 2", "deepseek_v3", num_ranks=2, shares=True),
        Case("mtp", "deepseek_v3", num_ranks=2),
    ][: num_cases(10, 18)],
    ids=lambda case: " ".join(map(str, case)),
)
def test_drafts_are_those_of_the_whole_text(
    case: Case,
    tmp_path: Path,
    watched: list[Watched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, variant, every, num_ranks, num_stages, shares = case
    monkeypatch.setattr(context, "MIN_STRIPE", 2)
    monkeypatch.setattr(read_rows, "FEW", 2)
    monkeypatch.setattr(drafter_pages, "READ_AT_ONCE", 16)
    monkeypatch.setattr(Seldom, "every", every)
    monkeypatch.setattr(
        engine_server, "draft_policy", lambda config, *_: Seldom(16, 3) if config else None
    )
    more = {"num_hidden_layers": 4} if variant == "llama" else {}
    model = make_model(variant, **more)
    folder = save_model(model, tmp_path / "model")
    head, config = save_head(method, model, folder, tmp_path / "head")
    num_host_pages = 20 if every == 1 else 0  # without, what is preempted is computed again
    swap_space = SETTINGS.swap_space if num_host_pages else 0.0
    changes = {"speculative_config": config, "swap_space": swap_space}
    if shares:
        changes["prefill_context_parallel_size"] = num_ranks
    settings = SETTINGS.model_copy(update=changes)
    few = {"num_pages": 10, "num_host_pages": num_host_pages, "eos_token_ids": EOS_IDS}
    ranks = RankThreads(folder, settings, num_ranks) if num_stages == 1 else None
    executor = ranks or StagesHere(folder, settings, num_stages).executor
    runners = PackingRunner(executor), load_on_cpu(folder, SETTINGS)
    servers = [
        Server(Restricted(runner, **few), each)
        for runner, each in zip(runners, (settings, SETTINGS), strict=True)
    ]
    for server in servers:
        talk(server)
    executor.close()
    assert servers[0].tokens == servers[1].tokens
    assert len(watched) == num_ranks
    drafter, *others = watched
    assert all(drafter.noted == other.noted for other in others)
    assert len(drafter.noted) >= 40 // every
    for text, drafts in drafter.noted[::2]:
        bias_V = 0 * BIAS_V if text[len(STEM)] % 2 else BIAS_V
        assert drafts == head.drafts(text, len(drafts), bias_V)
    stats = servers[0].scheduler.stats()
    assert stats.preemptions_total and stats.accepted_drafts_total > 5 // every
