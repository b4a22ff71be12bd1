"""A model in each format says what transformers says with the numbers that are in its files."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import structlog
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.errors import ConfigError
from services.compute.config import ComputeSettings
from services.compute.layers.parts import Experts, SerialLayer
from services.compute.layers.weighted_layers import KernelLinears, QuantizedLinear, say_rounded
from services.compute.quantization.at_load import Quantization, quantized, rounded_to_int8
from services.compute.quantization.packed import Packed
from services.compute.runner.model_loader import ModelLoader
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_scenarios import FEW, PROMPTS
from tests.unit.compute.engine_server import Server
from tests.unit.compute.models.family_models import FAMILIES, random_model
from tests.unit.compute.models.family_recipes import make_random
from tests.unit.compute.quantization.checkpoints import (
    FORMS,
    modelopt_stacks_folder,
    mxfp4_folder,
    quantize_folder,
)
from tests.unit.compute.tiny_models import make_model, save_model

CPU = torch.device("cpu")
KINDS: tuple[Quantization, ...] = ("fp8", "int8", "int4")
SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=8, max_batched_token_mem=2048, num_threads=1
)
DUMMY_KINDS = {
    "fp8 of blocks": "fp8",
    "compressed int8 of rows": "int8",
    "awq": "int4",
    "gptq of 8 bits": "int8",
    "compressed nvfp4": "fp4",
    "compressed int8 and inputs": "int8",
    "modelopt FP8_PB_WO": "fp8",
}


@cache
def model_of(variant: str) -> PreTrainedModel:
    return make_model(variant, intermediate_size=160)


def served(folder: Path, settings: ComputeSettings = SETTINGS) -> list[list[int]]:
    server = Server(load_on_cpu(folder, settings), settings)
    for counter, prompt in enumerate(PROMPTS):
        server.ask(counter, prompt, FEW)
    server.run()
    return [server.tokens[counter] for counter in range(len(PROMPTS))]


def says(model: PreTrainedModel, answers: list[list[int]]) -> bool:
    """Whether each token of the answers is what transformers says behind those before it."""
    with torch.inference_mode():
        return all(
            model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
            == ids
            for prompt, ids in zip(PROMPTS, answers, strict=True)
        )


@pytest.mark.parametrize("name", FORMS)
def test_a_quantized_folder_says_what_its_numbers_say(name: str, tmp_path: Path) -> None:
    folder = save_model(model_of("llama_biased"), tmp_path / "dense")
    dense = quantize_folder(folder, tmp_path / "quantized", FORMS[name])
    model = make_model("llama_biased", intermediate_size=160)
    model.load_state_dict(dense)
    assert says(model, served(tmp_path / "quantized"))


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    FAMILIES["gpt-oss"].save(random_model("gpt-oss"), folder)
    return folder / "mxfp4", mxfp4_folder(folder, folder / "mxfp4")


def test_experts_in_mxfp4_say_what_their_numbers_say(
    mxfp4: tuple[Path, dict[str, Tensor]],
) -> None:
    folder, dense = mxfp4
    model = FAMILIES["gpt-oss"].model()
    model.load_state_dict(dense)
    assert says(model, served(folder))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_experts_in_mxfp4_stay_so_and_nothing_else_is(
    mxfp4: tuple[Path, dict[str, Tensor]], load_format: Literal["auto", "dummy"]
) -> None:
    folder, dense = mxfp4
    settings = SETTINGS.model_copy(update={"load_format": load_format})
    decoder = ModelLoader.read(folder, settings, CPU).decoder(KernelLinears(torch.float32, False))
    assert not any(isinstance(linear, QuantizedLinear) for linear in decoder.linears)
    for number, layer in enumerate(decoder.layers):
        assert isinstance(layer, SerialLayer) and isinstance(layer.feed_forward.part, Experts)
        for name, (linear,) in (
            ("gate_up_proj", layer.feed_forward.part.gate_up),
            ("down_proj", layer.feed_forward.part.down),
        ):
            assert isinstance(linear, QuantizedLinear) and linear.weight.kind == "fp4"
            assert linear.weight.group_size == 32
            if load_format == "auto":
                exact_XOI = dense[f"model.layers.{number}.mlp.experts.{name}"].transpose(1, 2)
                if name == "gate_up_proj":
                    exact_XOI = torch.cat((exact_XOI[:, ::2], exact_XOI[:, 1::2]), dim=1)
                assert torch.equal(linear.weight.dense(torch.float32), exact_XOI.flatten(0, 1))


@pytest.mark.parametrize("name", ["gpt-oss", "llama 4"])
@pytest.mark.parametrize(("algorithm", "kind"), [("NVFP4", "fp4"), ("FP8", "fp8")])
def test_stacks_of_experts_that_modelopt_quantized_say_what_their_numbers_say(
    name: str, algorithm: str, kind: str, tmp_path: Path
) -> None:
    model = make_random(FAMILIES[name].model(intermediate_size=64))
    FAMILIES[name].save(model, tmp_path)
    dense = modelopt_stacks_folder(tmp_path, tmp_path / "quantized", algorithm)
    model.load_state_dict(dense)
    assert says(model, served(tmp_path / "quantized"))
    loader = ModelLoader.read(tmp_path / "quantized", SETTINGS, CPU)
    decoder = loader.decoder(KernelLinears(torch.float32, keeps_dense=False))
    for experts in decoder.mixtures.values():
        for (linear,) in (experts.gate_up, experts.down):
            assert isinstance(linear, QuantizedLinear) and linear.weight.kind == kind


@pytest.mark.parametrize("variant", ["llama", "qwen3_tied", "mistral_window"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_quantized_at_load_says_what_its_numbers_say(
    kind: Quantization, variant: str, tmp_path: Path
) -> None:
    folder = save_model(model_of(variant), tmp_path)
    model = make_model(variant, intermediate_size=160)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            found = quantized(parameter.detach(), kind)
            assert isinstance(found, Packed)
            parameter.data = found.dense(torch.float32)
    head = quantized(model.lm_head.weight.detach(), "int8")  # whatever the others get
    assert isinstance(head, Packed)
    model.lm_head.weight = nn.Parameter(head.dense(torch.float32))  # tied no more
    settings = SETTINGS.model_copy(update={"quantization": kind})
    answers = served(folder, settings)
    assert says(model, answers) and not says(model_of(variant), answers)


ROUTERS = re.compile(r"embed|norm|lm_head|mlp\.gate\.")
EXPERTS = {"moe_intermediate_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
IN_ORDERS = ("gptq in act order", "gptq v2 of 8 bits in act order", "gptq in several act orders")


@pytest.mark.parametrize("name", [name for name in FORMS if name not in IN_ORDERS])
def test_experts_of_a_quantized_folder_are_stacked_as_they_are(name: str, tmp_path: Path) -> None:
    folder = save_model(make_model("qwen3_moe", **EXPERTS), tmp_path / "dense")
    dense = quantize_folder(folder, tmp_path, FORMS[name], ROUTERS)
    decoder = ModelLoader.read(tmp_path, SETTINGS, CPU).decoder(KernelLinears(torch.float32, False))
    part, at = decoder.layers[0].feed_forward.part, "model.layers.0.mlp.experts"
    for (stack,), modules in ((part.gate_up, ("gate", "up")), (part.down, ("down",))):
        parts = [dense[f"{at}.{x}.{name}_proj.weight"] for x in range(6) for name in modules]
        assert isinstance(stack, QuantizedLinear)
        found = stack.weight.dense(torch.float32)
        torch.testing.assert_close(found, torch.cat(parts), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", IN_ORDERS)
def test_experts_with_inputs_in_another_order_have_8_bits_in_kernels(
    name: str, tmp_path: Path
) -> None:
    folder = save_model(make_model("qwen3_moe", **EXPERTS), tmp_path / "dense")
    dense = quantize_folder(folder, tmp_path, FORMS[name], ROUTERS)
    say_rounded.cache_clear()
    with structlog.testing.capture_logs() as lines:
        loader = ModelLoader.read(tmp_path, SETTINGS, CPU)
        decoder = loader.decoder(KernelLinears(torch.float32, False))
    assert [line["event"] for line in lines] == ["experts are rounded to 8 bits"]
    (down,) = decoder.layers[0].feed_forward.part.down
    assert isinstance(down, QuantizedLinear) and down.weight.kind == "int8"
    parts = [dense[f"model.layers.0.mlp.experts.{x}.down_proj.weight"] for x in range(6)]
    exact = torch.cat([rounded_to_int8(part).dense(torch.float32) for part in parts])
    torch.testing.assert_close(down.weight.dense(torch.float32), exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", IN_ORDERS)
def test_experts_with_inputs_in_another_order_are_as_they_are_on_the_cpu(
    name: str, tmp_path: Path
) -> None:
    folder = save_model(make_model("qwen3_moe", **EXPERTS), tmp_path / "dense")
    dense = quantize_folder(folder, tmp_path, FORMS[name], ROUTERS)
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    assert served(tmp_path) == served(folder)


def test_the_numbers_of_a_quantized_router_choose(tmp_path: Path) -> None:
    folder = save_model(make_model("qwen3_moe", **EXPERTS), tmp_path / "dense")
    plain = re.compile("embed|norm|lm_head")
    dense = quantize_folder(folder, tmp_path, FORMS["compressed int8 of rows"], plain)
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    assert served(tmp_path) == served(folder)


LATENTS = {
    "hidden_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32,
    "intermediate_size": 128, "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("name", ["fp8 of blocks", "compressed int8 with zeros", "awq"])
def test_latents_of_a_quantized_folder_say_what_its_numbers_say(name: str, tmp_path: Path) -> None:
    """The map that keys and values are made by is not multiplied by as it stands there."""
    model = make_random(FAMILIES["deepseek v3"].model(**LATENTS))
    folder = save_model(model, tmp_path / "dense")
    dense = quantize_folder(folder, tmp_path, FORMS[name], ROUTERS)
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    assert served(tmp_path) == served(folder)


@pytest.mark.parametrize("name", DUMMY_KINDS)
def test_random_weights_of_a_quantized_model_are_quantized_too(name: str, tmp_path: Path) -> None:
    folder = save_model(model_of("llama"), tmp_path / "dense")
    quantize_folder(folder, tmp_path, FORMS[name])
    (tmp_path / "model.safetensors").unlink()
    settings = SETTINGS.model_copy(update={"load_format": "dummy"})
    decoder = ModelLoader.read(tmp_path, settings, CPU).decoder(KernelLinears(torch.float32, False))
    packed = [each.weight for each in decoder.linears if isinstance(each, QuantizedLinear)]
    assert {weight.kind for weight in packed} == {DUMMY_KINDS[name]}
    has_blocks = name in ("fp8 of blocks", "modelopt FP8_PB_WO")
    assert not has_blocks or any(weight.group_size < weight.num_inputs for weight in packed)
    rounds_inputs = name in ("fp8 of blocks", "compressed int8 and inputs")
    assert {weight.inputs_8bit for weight in packed} == {rounds_inputs}
    assert not isinstance(decoder.head, QuantizedLinear)


def test_the_kind_that_a_folder_has_already_changes_nothing(tmp_path: Path) -> None:
    folder = save_model(model_of("llama"), tmp_path / "dense")
    left_out = re.compile(r"embed|norm|lm_head|down_proj")
    dense = quantize_folder(folder, tmp_path, FORMS["fp8 of blocks"], left_out)
    settings = SETTINGS.model_copy(update={"quantization": "fp8"})
    model = make_model("llama", intermediate_size=160)
    model.load_state_dict(dense)
    assert says(model, served(tmp_path, settings))
    decoder = ModelLoader.read(tmp_path, settings, CPU).decoder(KernelLinears(torch.float32, False))
    is_packed = [isinstance(linear, QuantizedLinear) for linear in decoder.linears]
    assert sum(is_packed) == 3 * 3  # of each layer: qkv, out, gate and up


def test_what_is_quantized_already_is_not_quantized_again(tmp_path: Path) -> None:
    folder = save_model(model_of("llama"), tmp_path / "dense")
    quantize_folder(folder, tmp_path, FORMS["awq"])
    settings = SETTINGS.model_copy(update={"quantization": "int8"})
    with pytest.raises(ConfigError, match=r"quantized already \(int4\)"):
        ModelLoader.read(tmp_path, settings, CPU)
