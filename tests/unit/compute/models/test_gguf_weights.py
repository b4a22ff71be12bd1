"""A GGUF file gives the same decoder as the folder that it was made of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ModelError
from common.gguf.architectures import ARCHITECTURES, MIXTURES
from common.gguf.folder import INDEX_NAME, folder_of
from common.model_folder import eos_token_ids
from services.compute.distributed.shard import WHOLE
from services.compute.layers.rope import RopeSpec
from services.compute.layers.weighted_layers import KernelLinears, Linear, QuantizedLinear
from services.compute.models import gguf_weights
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import QWEN_EXPERTS, ExpertTensors
from services.compute.models.families import ModelConfig, read_config
from services.compute.models.gguf_weights import GgufFiles
from services.compute.models.safetensors_files import SafetensorsFiles
from services.compute.models.weights import CheckpointWeights, WeightSource
from services.compute.quantization.packed import Packed, Weight
from tests.gguf_files import PLAIN, Array, GgufOptions, permuted, write_gguf
from tests.unit.compute.models.family_models import (
    ALL_FAMILIES,
    FAMILIES,
)
from tests.unit.compute.models.family_recipes import longrope, make_random, yarn

Changes = dict[str, Any]
CPU = torch.device("cpu")
NO_WINDOW: Changes = {"sliding_window": None}
PHI_128K = longrope(8)
PHI_128K["rope_parameters"] |= {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}


@dataclass(frozen=True)
class Case:
    """A model of `family_models`, without what GGUF files cannot say of it."""

    family: str
    changes: Changes = field(default_factory=dict)
    options: GgufOptions = PLAIN


def add_layer_behind(writer: gguf.GGUFWriter) -> None:
    """One that predicts a second token."""
    writer.add_nextn_predict_layers(1)
    blocks = writer.kv_data[0]["glm4moe.block_count"]
    writer.add_tensor(f"blk.{blocks.value}.nextn.eh_proj.weight", np.zeros((4, 4), np.float32))
    blocks.value += 1


def take_experts_apart(writer: gguf.GGUFWriter) -> None:
    """A tensor for each, as files of 2023 have them."""
    (tensors,) = writer.tensors
    for name in [name for name in tensors if "_exps" in name]:
        for number, expert in enumerate(tensors.pop(name).tensor):
            writer.add_tensor(name.replace("_exps", f".{number}"), expert)


CASES = {
    **{
        name: Case(name)
        for name in (
            "llama", "llama 3.2", "llama with biases", "llama with yarn",
            "mistral without a window", "ministral 3", "qwen2", "qwen2.5 with yarn", "qwen3",
            "qwen3 with biases",
            "gemma", "phi 3", "phi 3.5", "phi 4 mini", "olmo 2", "olmo 3", "granite", "command-r",
            "command-r+", "command-r7b", "glm 4", "glm 4 0414", "exaone 4 32b", "exaone 4 1.2b",
            "nemotron", "hunyuan", "ernie 4.5", "seed-oss", "arcee", "qwen2 moe", "olmoe",
            "hunyuan a13b", "ernie 4.5 moe", "minimax m2", "gpt-oss", "deepseek v2", "deepseek v3",
            "granite moe", "granite moe with a shared expert",
        )
    },
    "gemma 2": Case("gemma 2", {"query_pre_attn_scalar": 32}),
    "gemma 2 27b": Case("gemma 2", {"query_pre_attn_scalar": 16, "num_hidden_layers": 46}),
    "gemma 3": Case("gemma 3", {"query_pre_attn_scalar": 32}),
    "smollm 3": Case("smollm 3", {"no_rope_layer_interval": 4}),
    "starcoder2": Case("starcoder2", NO_WINDOW),
    "internlm 2": Case("llama", options=GgufOptions(architecture="internlm2")),
    "glm 4.5": Case("glm 4.5", options=GgufOptions(more=add_layer_behind)),
    "deepseek v2 lite": Case(
        "deepseek v2 lite",
        {"rope_parameters": yarn(mscale=0.7, mscale_all_dim=0.7)},
        GgufOptions(whole_latents=True),
    ),
    "llama 4": Case(
        "llama 4", {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
    ),
    "phi 3.5 moe": Case("phi 3.5 moe", {"router_jitter_noise": 0.01}),
    "phi 3.5 moe 128k": Case(
        "phi 3.5 moe",
        {"router_jitter_noise": 0.01, **PHI_128K},
    ),
    "mixtral": Case("mixtral", NO_WINDOW),
    "mixtral of 2023": Case("mixtral", NO_WINDOW, GgufOptions(more=take_experts_apart)),
    "qwen3 moe": Case("qwen3 moe", {"mlp_only_layers": []}),
    "qwen2 moe, merged": Case("qwen2 moe", options=GgufOptions(merged_experts=True)),
    "glm 4, merged": Case("glm 4", options=GgufOptions(merged_qkv=True)),
}  # fmt: skip


def test_every_architecture_is_tested() -> None:
    seen = {case.options.architecture or ALL_FAMILIES[case.family].name for case in CASES.values()}
    known = (*ARCHITECTURES.values(), *MIXTURES.values())
    families = {architecture.family for architecture in known}
    assert families <= seen and "internlm2" in seen


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save(case: Case, folder: Path) -> Path:
    family = FAMILIES[case.family]
    folder.mkdir()
    family.save(make_random(family.model(**case.changes)), folder)
    return folder


@dataclass(frozen=True)
class DenseLinears:
    """Makes maps of the numbers that weights stand for."""

    dtype: torch.dtype

    def __call__(self, weight: Weight, bias: Tensor | None, *numbers: Tensor | None) -> Linear:
        return Linear(weight.dense(self.dtype) if isinstance(weight, Packed) else weight, bias)

    def summed(self, weight: Weight, bias: Tensor | None, num_inputs: int) -> Linear:
        return self(weight, bias)

    def router(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Linear(weight, bias)

    def experts(
        self, weights: Iterable[Weight], num_experts: int, bias_XO: Tensor | None
    ) -> tuple[Linear, ...]:
        return tuple(map(self, weights, [None] * num_experts if bias_XO is None else bias_XO))


def decoder(
    folder: Path, source: Callable[..., WeightSource], dtype: torch.dtype = torch.float32
) -> Decoder[Linear]:
    return config_of(folder).build(source(folder, dtype), DenseLinears(dtype))


def config_of(folder: Path) -> ModelConfig:
    return read_config(json.loads((folder / "config.json").read_text()))


def of_gguf(folder: Path, dtype: torch.dtype) -> CheckpointWeights:
    return CheckpointWeights(GgufFiles(folder, CPU), dtype, CPU)


def of_safetensors(folder: Path, dtype: torch.dtype) -> CheckpointWeights:
    files = SafetensorsFiles(folder, CPU, None, config_of(folder).family.stacks)
    return CheckpointWeights(files, dtype, CPU)


def differences(ours: Any, theirs: Any, atol: float = 1e-6, at: str = "") -> Iterator[str]:
    """Yield where two decoders differ, their weights by more than `atol`."""
    if is_dataclass(ours) and not isinstance(ours, RopeSpec):
        assert type(ours) is type(theirs), at
        for each in fields(ours):
            name = each.name
            pair = getattr(ours, name), getattr(theirs, name)
            yield from differences(*pair, atol, f"{at}.{name}")
    elif isinstance(ours, tuple):
        assert len(ours) == len(theirs), at
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, atol, f"{at}[{number}]")
    elif not is_same(ours, theirs, atol):
        yield f"{at}: {ours} and {theirs}"


def is_same(ours: Any, theirs: Any, atol: float) -> bool:
    """Whether two parts are; a rotation is what it does to positions."""
    if isinstance(ours, RopeSpec) and isinstance(theirs, RopeSpec):
        tables = zip(ours.tables(256), theirs.tables(256), strict=True)
        same_rows = torch.equal(ours.row_order(), theirs.row_order())
        return same_rows and all(torch.allclose(*pair, atol=1e-4) for pair in tables)
    if isinstance(ours, Tensor):
        # a zero instead of a low may round to the number beside, in bfloat16
        rtol = 0.0 if ours.dtype == torch.float32 else 2**-7
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=rtol, atol=atol)
    return bool(ours == (pytest.approx(theirs, rel=1e-6) if isinstance(ours, float) else theirs))


@pytest.mark.parametrize(
    "name", [pytest.param(name) for name, case in CASES.items() if case.family in FAMILIES]
)
def test_the_decoder_is_that_of_the_folder(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = save(case, tmp_path / "folder")
    made = folder_of(write_gguf(folder, tmp_path / "model.gguf", case.options))
    ours, theirs = decoder(made, of_gguf), decoder(folder, of_safetensors)
    assert list(differences(ours, theirs)) == []
    assert eos_token_ids(made) == (2,)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_weights_are_those_of_the_dequantised_folder(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = save(Case("llama with biases"), tmp_path / "folder")
    made = folder_of(write_gguf(folder, tmp_path / "model.gguf", GgufOptions(kind)))
    tensors = load_file(folder / "model.safetensors")
    rounded = {name: quantised(tensor, kind) for name, tensor in tensors.items()}
    save_file(rounded, folder / "model.safetensors")
    ours, theirs = (
        decoder(path, source, dtype) for path, source in ((made, of_gguf), (folder, of_safetensors))
    )
    # of types with a low end, a zero of 16 bits stands for a low one of 32
    atol = 4e-3 if kind in ("Q4_1", "Q5_1") else 1e-6
    assert list(differences(ours, theirs, atol)) == []
    assert not torch.equal(tensors["lm_head.weight"], rounded["lm_head.weight"])


@pytest.mark.parametrize(("kind", "packed_as"), [("Q4_0", "int4"), ("MXFP4", "fp4")])
def test_projections_of_4_and_8_bits_are_one_of_8(
    kind: str, packed_as: str, tmp_path: Path
) -> None:
    folder = save(Case("llama"), tmp_path / "folder")
    values = load_file(folder / "model.safetensors")["model.layers.0.self_attn.v_proj.weight"]
    blocks = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
    options = GgufOptions(kind, blocks={"blk.0.attn_v.weight": ("Q8_0", blocks)})
    made = folder_of(write_gguf(folder, tmp_path / "model.gguf", options))
    weights = of_gguf(made, torch.float32)
    names = [f"model.layers.{layer}.self_attn.{each}_proj" for layer in (0, 1) for each in "qkv"]
    mixed, alike = (weights.linear(three, (96, 96, 96), 96) for three in (names[:3], names[3:]))
    assert isinstance(mixed, Packed) and mixed.kind == "int8"
    assert isinstance(alike, Packed) and alike.kind == packed_as
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    assert torch.equal(mixed.dense(torch.float32)[192:], expected)


def test_each_expert_has_its_own_blocks_of_the_one_tensor(tmp_path: Path) -> None:
    folder = save(Case("gpt-oss"), tmp_path / "folder")
    made = folder_of(write_gguf(folder, tmp_path / "model.gguf", GgufOptions("MXFP4")))
    module = "model.layers.1.mlp.experts.{}.down_proj"
    stacked_XFE = load_file(folder / "model.safetensors")[module.replace("{}.", "")]
    weights = of_gguf(made, torch.float32)
    for number, expert_FE in enumerate(stacked_XFE):
        found = weights.linear([module.format(number)], [96], 64)
        assert isinstance(found, Packed) and found.kind == "fp4"
        expected = quantised(expert_FE.t().contiguous(), "MXFP4")
        assert torch.equal(found.dense(torch.float32), expected)


@pytest.mark.parametrize(
    ("kinds", "packed_as"),
    [(("Q4_K", "Q4_K", "Q6_K"), ("int4", "int8")), (("Q4_K", "Q6_K", "Q4_K"), ("int8", "int4"))],
)
def test_experts_stay_packed_whatever_types_a_layer_mixes(
    kinds: tuple[str, ...], packed_as: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = {"num_experts": 3, "hidden_size": 256, "moe_intermediate_size": 256}
    case = Case("qwen3 moe", {**sizes, "num_hidden_layers": 1, "mlp_only_layers": []})
    folder, blocks = save(case, tmp_path / "folder"), {}
    for part, kind in zip(("gate", "up", "down"), kinds, strict=True):
        blocks[f"blk.0.ffn_{part}_exps.weight"] = kind, random_blocks(kind, 3, 256)
    file = write_gguf(folder, tmp_path / "model.gguf", GgufOptions(blocks=blocks))
    weights = of_gguf(folder_of(file), torch.float32)
    tensors = ExpertTensors(weights, "model.layers.0", QWEN_EXPERTS, 256, 256, 3, WHOLE)
    make = KernelLinears(torch.float32, keeps_dense=False)
    gate, up, down = (
        gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
        for kind, rows in blocks.values()
    )
    of_both = tensors.gate_ups(), np.concatenate((gate, up), 1), packed_as[0]
    for each, expected_XOI, kind in (of_both, (tensors.downs(), down, packed_as[1])):
        (linear,) = make.experts(each, 3, None)
        assert isinstance(linear, QuantizedLinear) and linear.weight.kind == kind
        found = linear.weight.dense(torch.float32).numpy()
        atol = float(np.abs(expected_XOI).max()) * 2**-11
        assert np.allclose(found, expected_XOI.reshape(found.shape), rtol=2**-10, atol=atol)


def random_blocks(kind: str, *rows: int) -> Array:
    """Of rows of 256 numbers."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    shape = *rows, 256 // block_size * block_bytes
    return np.random.default_rng(7).integers(0, 64, shape, dtype=np.uint8)


def quantised(tensor: Tensor, kind: str) -> Tensor:
    """What is left of a tensor, if its rows are made of blocks."""
    chosen = gguf.GGMLQuantizationType[kind]
    if tensor.ndim == 1 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
        return tensor
    blocks = gguf.quants.quantize(tensor.numpy(), chosen)
    return torch.from_numpy(gguf.quants.dequantize(blocks, chosen))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL"])
def test_rows_of_blocks_are_brought_into_order_before_they_are_dequantised(
    kind: str, tmp_path: Path
) -> None:
    changes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    case = Case("llama", {**changes, "head_dim": 32})
    folder = save(case, tmp_path / "folder")
    chosen = gguf.GGMLQuantizationType[kind]
    rows = random_blocks(kind, 128)
    options = GgufOptions(blocks={"blk.1.attn_q.weight": (kind, permuted(rows, 32))})
    made = folder_of(write_gguf(folder, tmp_path / "model.gguf", options))
    weights = of_gguf(made, torch.float32)
    taken = weights.take("model.layers.1.self_attn.q_proj.weight", (128, 256))
    expected = gguf.quants.dequantize(rows, chosen)
    assert np.array_equal(taken.numpy(), expected)
    packed = weights.linear(["model.layers.1.self_attn.q_proj"], [128], 256)
    assert isinstance(packed, Packed)
    atol = float(np.abs(expected).max()) * 2**-11
    assert np.allclose(packed.dense(torch.float32).numpy(), expected, rtol=2**-10, atol=atol)


def test_tensors_are_dequantised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(Case("llama"), tmp_path / "folder")
    made = folder_of(write_gguf(folder, tmp_path / "model.gguf", GgufOptions("Q8_0")))
    whole = decoder(made, of_gguf)
    monkeypatch.setattr(gguf_weights, "CHUNK_NUMBERS", 7 * 96)
    assert list(differences(decoder(made, of_gguf), whole)) == []


def test_files_of_a_split_model_are_one(tmp_path: Path) -> None:
    folder = save(Case("qwen3"), tmp_path / "folder")
    options = GgufOptions(shard_tensors=9)
    first = write_gguf(folder, tmp_path / "model.gguf", options)
    made = folder_of(first)
    ours, theirs = decoder(made, of_gguf), decoder(folder, of_safetensors)
    assert list(differences(ours, theirs)) == []
    assert len(list(made.glob("*.gguf"))) == len(list(tmp_path.glob("*.gguf"))) > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128, "head_dim": 16}, "the GGUF file's fields make it"),
        ({"num_hidden_layers": 4}, "has no tensor for model.layers.3"),
        ({"num_hidden_layers": 2}, "9 tensors do not belong to the architecture"),
    ],
)
def test_fields_that_contradict_the_tensors_are_refused(
    change: Changes, message: str, tmp_path: Path
) -> None:
    folder = save(Case("llama"), tmp_path / "folder")
    made = folder_of(write_gguf(folder, tmp_path / "model.gguf"))
    raw = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ModelError, match=message):
        decoder(made, of_gguf)


def test_a_file_that_was_moved_is_missed(tmp_path: Path) -> None:
    folder = save(Case("llama"), tmp_path / "folder")
    file = write_gguf(folder, tmp_path / "model.gguf")
    made = folder_of(file)
    file.rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="has the GGUF file been moved"):
        decoder(made, of_gguf)


def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    size = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with (tmp_path / "large.gguf").open("wb") as file:  # sparse: it takes no room
        file.truncate(size - 16)
        file.seek(size - 16)
        file.write(np.arange(4, dtype=np.float32).tobytes())
    entry = {"file": "large.gguf", "type": "F32", "shape": [4], "offset": size - 16}
    index = {"files": ["large.gguf"], "tensors": {"a.weight": entry}}
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    taken = of_gguf(tmp_path, torch.float32).take("a.weight", (4,))
    assert taken.tolist() == [0.0, 1.0, 2.0, 3.0]
