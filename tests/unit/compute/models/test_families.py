"""Every dense family, greedy in float32: transformers' tokens and logprobs, or a refusal."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from common.architectures import ARCHITECTURES
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner.packing_runner import PackingRunner
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.models.family_models import (
    ALL_FAMILIES,
    ALL_PROMPTS,
    COUNT,
    FAMILIES,
    answers,
    older_config,
    random_model,
)
from tests.unit.compute.prompt_run import (
    expected_embedding,
    logits_of,
    pooled,
    run_prompts,
    save_embedding_model,
    scored,
)
from tests.unit.compute.runner_scenarios import prompt_of

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=8, max_batched_token_mem=2048, swap_space=0.01,
    num_threads=1,
)  # fmt: skip
GREEDY = SamplingParams(COUNT, seed=1, temperature=0.0, ignore_eos=True, num_logprobs=2)
SHORT = range(len(ALL_PROMPTS) - 1)  # the last one is several windows long
LONG = len(ALL_PROMPTS) - 1


OF_EVERY_CACHE = ["llama with biases", "gemma 2", "llama 4", "gpt-oss", "deepseek v3"]
"""What becomes of pages depends on the windows and the latents of a model, and on nothing else."""

WITH_WINDOWS = [name for name, family in FAMILIES.items() if family.window]


@cache
def runner_of(name: str, folder: Path) -> PackingRunner:
    FAMILIES[name].save(random_model(name), folder)
    return load_on_cpu(folder, SETTINGS, warmup=True)  # which leaves no trace in any family


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def folder(name: str, folders: Path) -> Path:
    folder = folders / name.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    return folder


def serve(runner: PackingRunner, spec: dict[str, Any] | None = None, **settings: Any) -> Server:
    """A runner that is driven a step ahead, as an asynchronous device would be."""
    return Server(
        Restricted(runner, overlaps=True, **(spec or {})), SETTINGS.model_copy(update=settings)
    )


def ask(server: Server, name: str, numbers: range) -> None:
    """Ask all of these prompts at once; the answers have to be transformers'."""
    for number in numbers:
        server.ask(number, ALL_PROMPTS[number], GREEDY)
    server.run()
    expected = answers(name)
    assert [server.tokens[number] for number in numbers] == [expected[n].tokens for n in numbers]
    for number in numbers:
        top = expected[number].logits_CV.double().log_softmax(-1).topk(2)
        rows = server.logprobs[number]
        assert [row.top_ids for row in rows] == [tuple(ids) for ids in top.indices.tolist()]
        ours = np.array([row.top_logprobs for row in rows])
        assert np.allclose(ours, top.values.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
class TestFamily:
    def test_together(self, name: str, folder: Path) -> None:
        ask(serve(runner_of(name, folder)), name, SHORT)

    def test_in_chunks(self, name: str, folder: Path) -> None:
        ask(serve(runner_of(name, folder), max_prefill_tokens=13), name, SHORT)

    def test_as_older_files_say_it(self, name: str, folder: Path, tmp_path: Path) -> None:
        runner_of(name, folder)
        for path in folder.iterdir():
            (tmp_path / path.name).symlink_to(path)
        raw = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").unlink()
        older = older_config(raw, FAMILIES[name])
        (tmp_path / "config.json").write_text(json.dumps(older))
        ask(serve(load_on_cpu(tmp_path, SETTINGS)), name, range(3, 4))

    @pytest.mark.filterwarnings("ignore:Casting complex values")  # those of Llama 4's images
    def test_no_further_off_in_bfloat16_than_transformers(self, name: str, tmp_path: Path) -> None:
        """From its own rounded weights in float32, by the logprobs of a prompt."""
        rounded = copy.deepcopy(random_model(name)).to(torch.bfloat16)
        FAMILIES[name].save(rounded, tmp_path)
        prompt, settings = ALL_PROMPTS[3], SETTINGS.model_copy(update={"dtype": "bfloat16"})
        runner = load_on_cpu(tmp_path, settings)
        heard, _ = run_prompts(runner, [scored(0, prompt)], chunk=512)
        theirs_P = own_logprobs(rounded, prompt)
        exact_P = own_logprobs(rounded.float(), prompt)
        ours, theirs = np.square(heard[0].logprobs - exact_P), np.square(theirs_P - exact_P)
        assert ours.mean() < 4 * theirs.mean() + 1e-4


def own_logprobs(model: PreTrainedModel, prompt: list[int]) -> npt.NDArray[np.float32]:
    """Of each of the prompt's tokens but the first one."""
    logprobs_TV = logits_of(model, prompt).float().log_softmax(-1)
    return logprobs_TV[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", OF_EVERY_CACHE)
class TestCache:
    def test_again_from_the_prefix_tree(self, name: str, folder: Path) -> None:
        server = serve(runner_of(name, folder))
        ask(server, name, range(3, 4))
        server.tokens.clear()
        server.logprobs.clear()
        ask(server, name, range(3, 4))
        assert server.cached[3] == 48

    @pytest.mark.parametrize("num_host_pages", [0, 50])
    def test_preempted(self, name: str, folder: Path, num_host_pages: int) -> None:
        runner = runner_of(name, folder)
        few = {"num_pages": 5, "max_model_len": 80}
        server = serve(runner, {**few, "num_host_pages": num_host_pages})
        ask(server, name, SHORT)
        assert server.scheduler.stats().preemptions_total > 0
        assert bool(server.most_swapped) == (num_host_pages > 0)


@pytest.mark.parametrize("name", WITH_WINDOWS)
@pytest.mark.parametrize("chunk", [16, 512])
def test_far_past_the_window(name: str, folder: Path, chunk: int) -> None:
    server = serve(runner_of(name, folder), max_prefill_tokens=chunk)
    ask(server, name, range(LONG, LONG + 1))


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_the_longest_text_fits_a_small_cache_alone(name: str, folder: Path) -> None:
    runner_of(name, folder)
    small = SETTINGS.model_copy(update={"max_batched_token_mem": 100})
    runner = load_on_cpu(folder, small)
    prompt = prompt_of(runner.spec().max_model_len - 4, 1)
    server = serve(runner)
    server.ask(0, prompt, replace(GREEDY, max_tokens=4))
    server.run()
    assert (len(server.tokens[0]), server.reasons[0]) == (4, "length")


@dataclass(frozen=True, slots=True)
class Embedder:
    """An embedding model that is the inside of a decoder, and what its config.json calls it."""

    family: str
    architecture: str


EMBEDDERS = {
    "qwen3-embedding": Embedder("qwen3", "Qwen3ForCausalLM"),
    "e5-mistral": Embedder("mistral", "MistralModel"),
    "gte-qwen2": Embedder("qwen2", "Qwen2Model"),
}


@pytest.mark.parametrize("chunk", [13, 512])
@pytest.mark.parametrize("name", EMBEDDERS)
def test_an_embedding_model_gives_the_embeddings_of_transformers(
    name: str, chunk: int, tmp_path: Path
) -> None:
    model = random_model(EMBEDDERS[name].family)
    save_embedding_model(model, tmp_path, "last")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["architectures"] = [EMBEDDERS[name].architecture]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    requests = [pooled(number, prompt) for number, prompt in enumerate(ALL_PROMPTS)]
    heard, _ = run_prompts(load_on_cpu(tmp_path, SETTINGS), requests, chunk)
    for number, prompt in enumerate(ALL_PROMPTS):
        expected = expected_embedding(model, prompt, "last")
        assert np.allclose(heard[number].embedding, expected, rtol=1e-4, atol=1e-4)


def test_every_architecture_is_tested() -> None:
    assert {family.name for family in ALL_FAMILIES.values()} == set(ARCHITECTURES)
