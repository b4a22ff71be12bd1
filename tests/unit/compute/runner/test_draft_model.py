"""A draft model reads what it has to before it drafts, and is refused where it cannot help."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from common.config import PACKAGES
from common.errors import ConfigError
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner import drafter_pages, read_rows
from services.compute.runner.draft_model import DraftModel
from services.compute.runner.eager import CPU
from services.compute.runner.model_loader import ModelLoader
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.registry import load_runner
from services.compute.runner.row_costs import measure
from services.compute.sampling.sampler import Sampler
from services.compute.speculative.drafter import DecodeRows
from services.compute.step import Int64Array, StepPlan
from tests.unit.compute import engine_server
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.distributed.rank_threads import RankThreads
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.seldom_drafts import Seldom
from tests.unit.compute.tiny_models import VOCAB_SIZE, make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=16, max_batched_token_mem=512, num_threads=1
)
FEW_LAYERS = {"num_hidden_layers": 1}


def drafting_with(folder: Path, **more: object) -> ComputeSettings:
    config = json.dumps({"model": str(folder), "num_speculative_tokens": 3, **more})
    return SETTINGS.model_copy(update={"speculative_config": config})


def answers(runner: PackingRunner, settings: ComputeSettings, temperature: float = 1.0) -> Server:
    """Three sampled answers of different lengths, of which two begin alike."""
    server = Server(runner, settings)
    for counter, length in ((10, 10), (20, 32), (30, 20)):
        prompt = [*range(3, 21), counter]
        server.ask(counter, prompt, SamplingParams(length, counter, temperature, ignore_eos=True))
    server.run()
    return server


def test_what_it_has_not_read_it_reads_before_it_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    settings = drafting_with(folder)
    monkeypatch.setattr(engine_server, "draft_policy", lambda *_: Seldom(16, 3))
    monkeypatch.setattr(read_rows, "FEW", 3)
    monkeypatch.setattr(drafter_pages, "READ_AT_ONCE", 8)
    stats = answers(load_on_cpu(folder, settings), settings).scheduler.stats()
    assert stats.accepted_drafts_total == stats.drafts_total > 5


@pytest.mark.parametrize("num_host_pages", [0, 40])
def test_a_draft_that_a_preemption_left_unread_is_read_behind_it(
    num_host_pages: int, tmp_path: Path
) -> None:
    """Computed again or swapped; the last draft of a row that was right no pass has read."""
    folder = save_model(make_model("llama"), tmp_path)
    few = {"page_tokens": 4, "swap_space": 0.003 if num_host_pages else 0.0}
    settings = drafting_with(folder).model_copy(update=few)
    runner = load_on_cpu(folder, settings)
    server = Server(Restricted(runner, num_pages=36, num_host_pages=num_host_pages), settings)
    for counter in range(8):
        prompt = [*range(3, 10 + 3 * counter), counter]
        server.ask(counter, prompt, SamplingParams(40, counter, ignore_eos=True))
    server.run()
    stats = server.scheduler.stats()
    assert stats.preemptions_total > 3 and bool(server.most_swapped) == (num_host_pages > 0)
    assert stats.accepted_drafts_total == stats.drafts_total > 100


def test_an_answer_without_drafts_that_comes_back_in_a_prompt_is_read_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    settings, policy = drafting_with(folder), Seldom(16, 3)
    policy.every = 1000
    monkeypatch.setattr(engine_server, "draft_policy", lambda *_: policy)
    monkeypatch.setattr(drafter_pages, "READ_AT_ONCE", 16)
    server = Server(load_on_cpu(folder, settings), settings)
    sampling = SamplingParams(40, seed=5, ignore_eos=True)
    server.ask(0, [*range(3, 21)], sampling)
    server.run()
    assert server.scheduler.stats().drafts_total == 0
    policy.every = 1
    server.ask(1, [*range(3, 21), *server.tokens[0], 7], sampling)
    server.run()
    stats = server.scheduler.stats()
    assert server.cached[1] >= 48
    assert stats.accepted_drafts_total == stats.drafts_total > 20


def test_each_step_by_which_passes_are_timed_has_its_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    runner = load_on_cpu(folder, drafting_with(folder))
    forward, guess = runner.forward, Sampler.guess
    num_passes, guessed = [], []

    def count(plan: StepPlan) -> object:
        num_passes.append(int(plan.num_drafts.max(initial=0)))
        return forward(plan)

    def note(self: Sampler, logits_PV: Tensor, *about: Any) -> Tensor:
        guessed.append(len(logits_PV))
        return guess(self, logits_PV, *about)

    monkeypatch.setattr(runner, "forward", count)
    monkeypatch.setattr(Sampler, "guess", note)
    measure(runner)
    assert len(guessed) == sum(num_passes) > 0


def test_more_or_fewer_ids_without_a_text_do_not_matter(tmp_path: Path) -> None:
    folders = []
    for size in (VOCAB_SIZE, VOCAB_SIZE - 9, VOCAB_SIZE + 9):
        model = make_model("llama", vocab_size=size, **FEW_LAYERS)
        folders.append(save_model(model, tmp_path / str(size)))
        tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}}
        (folders[-1] / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts = []
    for drafter in folders:
        settings = drafting_with(drafter)
        server = answers(load_on_cpu(folders[0], settings), settings)
        assert server.scheduler.stats().drafts_total > 10
        texts.append(server.tokens)
    assert texts[0] == texts[1] == texts[2]


def test_a_page_has_room_for_what_the_drafter_keeps(tmp_path: Path) -> None:
    large = save_model(make_model("llama"), tmp_path / "large")
    small = save_model(make_model("qwen2_window"), tmp_path / "small")
    settings = drafting_with(small).model_copy(update={"max_batched_token_mem": 0})
    alone, drafter = (ModelLoader.read(folder, SETTINGS, CPU) for folder in (large, small))
    both = ModelLoader.read(large, settings, CPU)
    drafter_bytes = len(drafter.groups) * drafter.page_bytes
    assert both.page_bytes == both.groups[0].page_bytes == alone.page_bytes + drafter_bytes
    assert both.limits(lambda: 20 * both.page_bytes).num_pages == 20


def test_a_model_of_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    large = save_model(make_model("llama", **FEW_LAYERS), tmp_path / "large")
    small = save_model(make_model("llama", vocab_size=50, **FEW_LAYERS), tmp_path / "small")
    with pytest.raises(ConfigError, match=r"small has another vocabulary .* 50 ids where there"):
        ModelLoader.read(large, drafting_with(small), CPU)
    for folder, text in ((large, "a"), (small, "b")):
        tokenizer = {"model": {"vocab": [[text, 0.0]]}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="token 0 is 'b' where it is 'a'. Take a drafter"):
        ModelLoader.read(large, drafting_with(small), CPU)


def test_each_rank_of_a_mixture_has_all_of_what_drafts_for_it(tmp_path: Path) -> None:
    """Whole experts are spread over ranks, and the drafter has none."""
    large = save_model(make_model("qwen3_moe"), tmp_path / "large")
    small = save_model(make_model("llama", **FEW_LAYERS), tmp_path / "small")
    spread = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    settings = drafting_with(small).model_copy(update=spread)
    ranks = RankThreads(large, settings, 2)
    found = answers(PackingRunner(ranks), settings)
    ranks.close()
    stats = found.scheduler.stats()
    assert stats.drafts_total > stats.accepted_drafts_total
    assert found.tokens == answers(load_on_cpu(large, SETTINGS), SETTINGS).tokens


def test_ranks_compute_the_drafts_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that drafts for itself is always right, whatever the drafter of another rank says."""
    folder = save_model(make_model("llama"), tmp_path)
    settings = drafting_with(folder)
    draft, drafters = DraftModel.draft, dict[DraftModel, int]()

    def draft_otherwise(
        self: DraftModel, decodes: DecodeRows, drafts_NK: Int64Array
    ) -> Iterable[bool]:
        yield from draft(self, decodes, drafts_NK)
        if drafters.setdefault(self, 0):
            drafts_NK[decodes.slots_Q, :2] = 7

    monkeypatch.setattr(DraftModel, "draft", draft_otherwise)
    ranks = RankThreads(folder, settings, 2)
    for rank, executor in enumerate(ranks.executors):
        drafters[executor._drafting._drafter] = rank  # type: ignore[attr-defined]
    found = answers(PackingRunner(ranks), settings)
    ranks.close()
    stats = found.scheduler.stats()
    assert stats.accepted_drafts_total == stats.drafts_total > 5
    assert found.tokens == answers(load_on_cpu(folder, SETTINGS), SETTINGS).tokens


def test_by_rejection_it_does_not_draft_for_a_model_that_is_split() -> None:
    settings = drafting_with(Path("small"), acceptance="rejection")
    settings = settings.model_copy(update={"device": "cpu", "tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="leave it or compute.tensor_parallel_size out"):
        load_runner(Path("nowhere"), settings)


def test_the_demo_has_a_drafter_of_a_fifth_of_its_size() -> None:
    models = Path(PACKAGES) / "models"
    loader = ModelLoader.read(models / "demo", drafting_with(models / "demo_draft"), CPU)
    assert loader.drafter is not None
    sizes = [each.config.shape.num_weights for each in (loader.drafter, loader)]
    assert 0.18 < sizes[0] / sizes[1] < 0.21


def test_by_rejection_a_model_that_drafts_for_itself_is_always_right_too(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    settings = drafting_with(folder, acceptance="rejection")
    settings = settings.model_copy(update={"max_prefill_tokens": 8})  # some steps draw nothing
    first, again = (answers(load_on_cpu(folder, settings), settings) for _ in range(2))
    stats = first.scheduler.stats()
    assert stats.accepted_drafts_total == stats.drafts_total > 20
    assert first.tokens == again.tokens  # the seed and the drafts say it all


def test_by_rejection_drafts_of_a_stranger_count_now_and_then(tmp_path: Path) -> None:
    large = save_model(make_model("llama"), tmp_path / "large")
    small = save_model(make_model("llama", seed=8), tmp_path / "small")
    settings = drafting_with(small, acceptance="rejection")
    server = answers(load_on_cpu(large, settings), settings, temperature=9.0)
    stats = server.scheduler.stats()
    assert 0 < stats.accepted_drafts_total < stats.drafts_total
    assert [len(tokens) for tokens in server.tokens.values()] == [10, 32, 20]
