"""A model of any family says the same, whether one process has it or several ranks share it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from common.gguf.folder import folder_of
from common.messages.experts import TOKENS_METRIC
from services.compute.config import ComputeSettings
from services.compute.models import weights
from services.compute.models.safetensors_files import SafetensorsFiles
from services.compute.runner.eager import load_eager
from services.compute.runner.executor import Executor
from services.compute.runner.model_loader import Limits, ModelLoader
from services.compute.runner.packing_runner import PackingRunner
from tests.cases import num_cases
from tests.gguf_files import GgufOptions, write_gguf
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.distributed.rank_threads import Meeting, RankThreads, ThreadRanks
from tests.unit.compute.distributed.served import (
    DUMMY,
    GREEDY,
    HEARD_SCALE,
    PROMPTS,
    SETTINGS,
    SPREAD,
    answers,
)
from tests.unit.compute.engine_server import Server
from tests.unit.compute.models.family_models import FAMILIES, random_model, save_config
from tests.unit.compute.quantization.checkpoints import FORMS, mxfp4_folder, quantize_folder
from tests.unit.compute.tiny_models import make_model, save_model

CPU = torch.device("cpu")

Load = Callable[[Path, ComputeSettings, int], RankThreads]


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SCALE", HEARD_SCALE)


@pytest.fixture
def load() -> Iterator[Load]:
    loaded = []

    def begin(folder: Path, settings: ComputeSettings, size: int) -> RankThreads:
        loaded.append(RankThreads(folder, settings, size))
        return loaded[-1]

    yield begin
    for each in loaded:
        each.close()


def check(load: Load, folder: Path, settings: ComputeSettings, size: int) -> None:
    """Tokens and logprobs are those of one process, and all ranks have the same logits."""
    whole = {"enable_expert_parallel": False, "expert_counts": "", "num_redundant_experts": 0}
    alone = settings.model_copy(update=whole)
    one = answers(load_on_cpu(folder, alone), alone)
    ranks = load(folder, settings, size)
    all_of_them = answers(PackingRunner(ranks), settings)
    assert all_of_them.tokens == one.tokens
    for counter, rows in one.logprobs.items():
        found, expected = (
            np.array([row.top_logprobs for row in each])
            for each in (all_of_them.logprobs[counter], rows)
        )
        assert np.allclose(found, expected, rtol=2e-4, atol=2e-4)
    ranks.close()
    for rank in range(1, size):
        assert all(map(np.array_equal, ranks.tokens[0], ranks.tokens[rank]))
        assert all(map(torch.equal, ranks.logits[0], ranks.logits[rank]))
        assert len(ranks.logits[0]) == len(ranks.logits[rank])


@pytest.mark.parametrize("name", [*FAMILIES][:: num_cases(2, 1)])
def test_three_ranks_say_what_one_process_says(name: str, load: Load, tmp_path: Path) -> None:
    """Of two kv heads two ranks share one; of six queries a rank has one, two or three."""
    check(load, save_config(name, tmp_path), DUMMY, 3)


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama with biases", 4), ("olmo 2", 2), ("gpt-oss", 4), ("deepseek v2 lite", 2)],
)
def test_other_numbers_of_ranks_do_too(name: str, size: int, load: Load, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12 if "deepseek" in name else 3}
    check(load, save_config(name, tmp_path, **heads), DUMMY, size)


MIXTURES = [
    "gpt-oss", "deepseek v3", "llama 4", "mixtral", "qwen2 moe", "qwen3 moe", "deepseek v2 lite",
    "deepseek v2", "olmoe", "granite moe", "granite moe with a shared expert", "phi 3.5 moe",
    "ernie 4.5 moe", "hunyuan a13b", "glm 4.5", "llama 4 with images", "minimax m2",
]  # fmt: skip
"""The first with biases, groups of experts and a shared one, and weights of inputs."""


@pytest.mark.parametrize("name", MIXTURES[: num_cases(3, len(MIXTURES))])
def test_ranks_that_have_whole_experts_do_too(name: str, load: Load, tmp_path: Path) -> None:
    """Six or eight experts on four ranks; each reads its own."""
    check(load, save_config(name, tmp_path), SPREAD, 4)


def test_ranks_take_turns_with_experts_that_several_have(load: Load, tmp_path: Path) -> None:
    """Of six experts on three ranks the first is on all, and the last on two."""
    lines = [
        f'{TOKENS_METRIC}{{replica="a",layer="{layer}",expert="{expert}"}} {tokens}\n'
        for layer in range(2)
        for expert, tokens in enumerate((90, 1, 2, 3, 4, 50))
    ]
    (tmp_path / "counts").write_text("".join(lines))
    changes = {"expert_counts": str(tmp_path / "counts"), "num_redundant_experts": 3}
    check(load, save_config("mixtral", tmp_path), SPREAD.model_copy(update=changes), 3)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_a_quantized_cache_is_split_by_heads(
    kv_cache_dtype: str, load: Load, tmp_path: Path
) -> None:
    settings = DUMMY.model_copy(update={"kv_cache_dtype": kv_cache_dtype})
    check(load, save_config("gemma 3", tmp_path), settings, 2)


def test_all_ranks_lay_out_pages_alike(load: Load, tmp_path: Path) -> None:
    """Of one token and one head an entry in 8 bits is padded more than of two."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    layers = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
    folder = save_config("gemma 3", tmp_path, **heads, **layers)
    for kv_cache_dtype in ("fp8", "int8"):
        settings = DUMMY.model_copy(update={"kv_cache_dtype": kv_cache_dtype, "page_tokens": 1})
        ranks = load(folder, settings, 2)
        groups = [each.spec().kv_groups for each in ranks.executors]
        assert groups[0] == groups[1]
    # Ranks differ in last bits, by which a code may round the other way in any of eight layers, on
    # some processors: what comes first is near, and what is read from a wrong place is not.
    one = answers(load_on_cpu(folder, settings), settings)
    all_of_them = answers(PackingRunner(ranks), settings)
    for counter, rows in one.logprobs.items():
        found, expected = all_of_them.logprobs[counter][0], rows[0]
        assert np.allclose(found.top_logprobs, expected.top_logprobs, atol=0.2)


FORMATS = [
    "fp8 of blocks", "compressed int8 of rows", "compressed int8 with zeros", "awq",
    "compressed int4 with zeros", "compressed nvfp4", "gptq in several act orders",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_folder_is_split_by_its_codes(name: str, load: Load, tmp_path: Path) -> None:
    folder = save_model(make_model("llama_biased", intermediate_size=160), tmp_path / "dense")
    quantize_folder(folder, tmp_path, FORMS[name])
    check(load, tmp_path, SETTINGS, 2)


@pytest.mark.parametrize("name", ["mixtral", "qwen2 moe", "phi 3", "internlm 2.5", "deepseek v3"])
def test_a_folder_with_weights_is_split_as_random_ones_are(
    name: str, load: Load, tmp_path: Path
) -> None:
    FAMILIES[name].save(random_model(name), tmp_path)
    check(load, tmp_path, SETTINGS, 2)


@pytest.mark.parametrize("spreads", [False, True])
def test_experts_in_mxfp4_are_split_or_spread(spreads: bool, load: Load, tmp_path: Path) -> None:
    FAMILIES["gpt-oss"].save(random_model("gpt-oss"), tmp_path)
    mxfp4_folder(tmp_path, tmp_path / "mxfp4")
    settings = SETTINGS.model_copy(update={"enable_expert_parallel": spreads})
    check(load, tmp_path / "mxfp4", settings, 2)


def test_experts_of_other_ranks_are_left_in_the_files(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    get = SafetensorsFiles._get

    def noted(files: SafetensorsFiles, name: str) -> Tensor:
        read.append(name)
        return get(files, name)

    FAMILIES["mixtral"].save(random_model("mixtral"), tmp_path)
    settings = SETTINGS.model_copy(update={"enable_expert_parallel": True})
    check(load, tmp_path, settings, 2)
    monkeypatch.setattr(SafetensorsFiles, "_get", noted)
    load(tmp_path, settings, 2)
    of_experts = [name for name in read if ".experts." in name]
    assert of_experts and len(of_experts) == len(set(of_experts))


def test_codes_of_gguf_files_are_split(load: Load, tmp_path: Path) -> None:
    FAMILIES["llama"].model(intermediate_size=160).save_pretrained(tmp_path)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", GgufOptions("Q4_0"))
    check(load, folder_of(file, {"XDG_CACHE_HOME": str(tmp_path / "cache")}), SETTINGS, 2)


def test_random_weights_in_place_of_blocks_have_the_scales_of_the_whole(
    load: Load, tmp_path: Path
) -> None:
    """Parts begin within blocks."""
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    folder = save_config("llama", tmp_path, intermediate_size=160)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))
    check(load, folder, DUMMY, 2)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_weights_are_quantized_before_they_are_split(kind: str, load: Load, tmp_path: Path) -> None:
    settings = DUMMY.model_copy(update={"quantization": kind})
    check(load, save_config("llama 3.2", tmp_path), settings, 2)


def test_ranks_have_as_many_pages_as_the_one_with_the_least_room(tmp_path: Path) -> None:
    """With half of the kv heads, half of the room is for as many pages."""
    folder, rooms = save_config("llama", tmp_path), [2_000_000, 1_000_000]
    settings = SETTINGS.model_copy(update={"max_batched_token_mem": 0, "swap_space": 0.01})
    meeting = Meeting(2)

    def limits(rank: int) -> Limits:
        loader = ModelLoader.read(folder, settings, CPU, ThreadRanks(rank, meeting))
        return loader.limits(lambda: rooms[rank])

    with ThreadPoolExecutor(2) as threads:
        both = [*threads.map(limits, range(2))]
    alone = ModelLoader.read(folder, settings, CPU).limits(lambda: 2_000_000)
    assert both == [replace(alone, num_host_pages=2 * alone.num_host_pages)] * 2


def test_a_prompt_is_scored_and_pages_are_swapped_by_all_ranks(load: Load, tmp_path: Path) -> None:
    folder = save_config("llama", tmp_path, num_key_value_heads=3)
    settings = DUMMY.model_copy(update={"swap_space": 0.01, "max_batched_token_mem": 96})
    sampling = replace(GREEDY, max_tokens=24, num_prompt_logprobs=1)

    def tokens(executor: Executor) -> dict[int, list[int]]:
        server = Server(PackingRunner(executor), settings)
        for counter, prompt in enumerate([PROMPTS[1], PROMPTS[1][::-1], PROMPTS[0]]):
            server.ask(counter, prompt, replace(sampling, seed=counter))
        server.run()
        assert server.most_swapped
        return dict(server.tokens)

    ranks = load(folder, settings, 2)
    assert tokens(ranks) == tokens(load_eager(folder, settings))


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("llama", 2, "the model is no mixture of experts"),
        ("mixtral", 1, "tensor_parallel_size is 1"),
        ("mixtral", 7, "6 experts, of which each of 7 processes"),
    ],
)
def test_experts_are_spread_only_where_each_rank_can_have_one(
    name: str, size: int, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^enable_expert_parallel.*{reason}.*leave"):
        ModelLoader.read(save_config(name, tmp_path), SPREAD, CPU, ThreadRanks(0, Meeting(size)))


def test_a_model_with_too_few_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="6 query heads"):
        RankThreads(save_config("llama", tmp_path), DUMMY, 7)


def test_a_norm_over_all_heads_is_refused_on_gpus_before_weights_are_read(tmp_path: Path) -> None:
    two, gpu = ThreadRanks(0, Meeting(2)), torch.device("cuda")
    for name in ("olmo 2", "olmoe"):
        folder = save_config(name, tmp_path)
        ModelLoader.read(folder, DUMMY, CPU, two)
        with pytest.raises(ConfigError, match="tensor_parallel_size is 2: this model has a norm"):
            ModelLoader.read(folder, DUMMY, gpu, two)
