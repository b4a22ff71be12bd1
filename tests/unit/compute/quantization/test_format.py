"""Each format's tensors are read as the numbers that its writer means, to the last bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ModelError
from common.model_folder import read_json
from common.quantization import read_quantization
from services.compute.layers.weighted_layers import KernelLinears, QuantizedLinear
from services.compute.models.decoder import Decoder
from services.compute.models.families import read_config
from services.compute.models.safetensors_files import SafetensorsFiles
from services.compute.models.weights import CheckpointWeights
from services.compute.quantization.config import format_of
from services.compute.quantization.fp4 import shortened
from services.compute.quantization.packed import Packed
from tests.unit.compute.models.family_models import FAMILIES
from tests.unit.compute.quantization.checkpoints import (
    FORMS,
    PLAIN,
    Form,
    gptq,
    quantize_folder,
)
from tests.unit.compute.tiny_models import make_model, save_model

CPU = torch.device("cpu")
SHAPES = ((160, 192), (128, 256), (288, 64))  # blocks of 128 cut in both, in none, and all in one
SIZES = {"intermediate_size": 160}
UNLIKE = "gptq in several act orders"  # of which no maps can be stacked as they are


def weights_of(folder: Path, form: Form) -> CheckpointWeights:
    config = read_quantization({"quantization_config": form.config})
    return CheckpointWeights(SafetensorsFiles(folder, CPU, format_of(config)), torch.float32, CPU)


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def written(
    form: Form, shape: tuple[int, int], name: str = "m"
) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    tensors, dense_OI = form.write(torch.randn(shape, generator=generator), f"{name}.weight")
    return {f"{name}.{ending}": part for ending, part in tensors.items()}, dense_OI


def load(folder: Path) -> Decoder[Any]:
    raw = read_json(folder, "config.json")
    form = format_of(read_quantization(raw))
    weights = CheckpointWeights(SafetensorsFiles(folder, CPU, form), torch.float32, CPU)
    return read_config(raw).build(weights, KernelLinears(torch.float32, False), True)


def numbers(linear: Any) -> Tensor:
    if isinstance(linear, QuantizedLinear):
        return linear.weight.dense(torch.float32)
    return linear.weight_OI


def both(folder: Path, to: Path, form: Form, plain: re.Pattern[str] = PLAIN) -> list[Decoder[Any]]:
    """The quantized model, and one of the numbers that are in its files."""
    dense = quantize_folder(folder, to, form, plain)
    exact = to / "exact"
    exact.mkdir()
    write(exact, dense)
    (exact / "config.json").write_text((folder / "config.json").read_text())
    return [load(to), load(exact)]


def assert_same_numbers(ours: Decoder[Any], exact: Decoder[Any], name: str = "") -> None:
    for one, other in zip(ours.linears, exact.linears, strict=True):
        assert_means(name, numbers(one), other.weight_OI)
        assert (one.bias_O is None) == (other.bias_O is None)
        assert one.bias_O is None or torch.equal(one.bias_O, other.bias_O)


def assert_means(name: str, found: Tensor, expected: Tensor) -> None:
    """NVFP4's scales are rounded to float16, all others stay as they are."""
    rtol = 2**-11 if "nvfp4" in name.lower() else 0.0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMS)
def test_a_weight_is_the_numbers_that_its_writer_means(
    name: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    tensors, dense_OI = written(FORMS[name], shape)
    write(tmp_path, tensors)
    weights = weights_of(tmp_path, FORMS[name])
    found = weights.linear(["m"], shape[:1], shape[1])
    assert isinstance(found, Packed) and found.shape == shape
    assert found.codes_OB.is_contiguous()  # as kernels read them, however a checkpoint has them
    assert_means(name, found.dense(torch.float32), dense_OI)
    weights.finish()  # nothing is left over


@pytest.mark.parametrize("name", FORMS)
def test_merged_maps_keep_their_scales(name: str, tmp_path: Path) -> None:
    shapes = {"q": (160, 192), "k": (96, 192), "v": (32, 192)}
    parts = [written(FORMS[name], shape, part) for part, shape in shapes.items()]
    write(tmp_path, {key: value for tensors, _ in parts for key, value in tensors.items()})
    found = weights_of(tmp_path, FORMS[name]).linear([*shapes], (160, 96, 32), 192)
    assert isinstance(found, Tensor if name == UNLIKE else Packed)
    dense = found if isinstance(found, Tensor) else found.dense(torch.float32)
    assert_means(name, dense, torch.cat([each for _, each in parts]))


@pytest.mark.parametrize("name", FORMS)
def test_a_map_that_was_left_out_is_plain_beside_others(name: str, tmp_path: Path) -> None:
    tensors, dense_OI = written(FORMS[name], (64, 128), "q")
    plain = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    write(tmp_path, {**tensors, "k.weight": plain})
    weights = weights_of(tmp_path, FORMS[name])
    assert weights.linear(["k"], [32], 128).equal(plain)  # type: ignore[union-attr]
    merged = weights.linear(["q", "k"], [64, 32], 128)
    assert isinstance(merged, Tensor)
    assert_means(name, merged, torch.cat((dense_OI, plain)))


SCALES = torch.linspace(0.01, 0.02, 12).view(3, 4)  # of no few bits


@pytest.mark.parametrize(
    ("scales", "dtype"),
    [
        (SCALES, torch.float16),
        (SCALES * 1e-4, torch.float32),  # too small for float16
        (SCALES * 1e7, torch.float32),  # too large
        (SCALES.masked_fill(SCALES > 0.015, 0.0), torch.float16),
        (SCALES.masked_fill(SCALES > 0.015, float("nan")), torch.float32),
        (torch.exp2(torch.arange(-126.0, 126.0, 21.0)).view(3, 4), torch.bfloat16),
    ],
)
def test_scales_of_fp4_take_16_bits_where_a_weight_stays_within_bfloat16s_last_place(
    scales: Tensor, dtype: torch.dtype
) -> None:
    found = shortened(scales)
    assert found.dtype == dtype
    if dtype == torch.float16:
        assert ((found.float() - scales).abs() <= scales * 2**-11).all()
    else:
        assert torch.equal(found.float().nan_to_num(), scales.nan_to_num())


@pytest.mark.parametrize("name", ["modelopt NVFP4", "compressed nvfp4"])
def test_nvfp4_takes_5_bits_a_weight_and_is_within_bfloat16s_last_place(
    name: str, tmp_path: Path
) -> None:
    tensors, dense_OI = written(FORMS[name], (256, 512))
    write(tmp_path, tensors)
    found = weights_of(tmp_path, FORMS[name]).linear(["m"], [256], 512)
    assert isinstance(found, Packed) and 8 * found.num_bytes == 5 * dense_OI.numel()
    places = [
        values.bfloat16().view(torch.int16).int()
        for values in (found.dense(torch.float32), dense_OI)
    ]
    assert (places[0] - places[1]).abs().max() <= 1


INPUTS_8BIT = {
    *("fp8 of blocks", "fp8 of a tensor", "fp8 with powers of 2", "fbgemm_fp8", "modelopt FP8"),
    *("compressed fp8 and inputs", "compressed int8 and inputs"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_weight_knows_whether_its_inputs_may_be_rounded(name: str, tmp_path: Path) -> None:
    write(tmp_path, written(FORMS[name], (64, 128))[0])
    found = weights_of(tmp_path, FORMS[name]).linear(["m"], [64], 128)
    assert isinstance(found, Packed) and found.inputs_8bit is (name in INPUTS_8BIT)


@pytest.mark.parametrize("variant", ["llama", "llama_biased", "llama_tied", "qwen3"])
@pytest.mark.parametrize("name", ["fp8 of blocks", "gptq in act order", UNLIKE, "compressed nvfp4"])
def test_a_model_has_the_numbers_of_its_files(name: str, variant: str, tmp_path: Path) -> None:
    folder = save_model(make_model(variant, **SIZES), tmp_path)
    ours, exact = both(folder, tmp_path / "ours", FORMS[name])
    assert_same_numbers(ours, exact, name)
    num_packed = sum(isinstance(linear, QuantizedLinear) for linear in ours.linears)
    assert (
        num_packed == (2 if name == UNLIKE else 4) * 3
    )  # of each layer: qkv, out, gate and up, down


@pytest.mark.parametrize("family", ["phi 3", "internlm 2.5", "glm 4", "command-r", "ernie 4.5"])
@pytest.mark.parametrize("name", ["fp8 of a tensor", "gptq in act order", "compressed int4"])
def test_merged_and_reordered_rows_have_their_own_scales(
    name: str, family: str, tmp_path: Path
) -> None:
    """Phi-3 has merged maps, InternLM 2 rows by kv head, the others turn neighbouring pairs."""
    found = FAMILIES[family]
    found.save(found.model(intermediate_size=160, hidden_size=96), tmp_path)
    ours, exact = both(tmp_path, tmp_path / "ours", FORMS[name])
    assert any(isinstance(linear, QuantizedLinear) for linear in ours.linears)
    assert_same_numbers(ours, exact)


@pytest.mark.parametrize("name", ["fp8 of blocks", "compressed int4", "gptq of 8 bits"])
def test_a_head_may_be_quantized(name: str, tmp_path: Path) -> None:
    folder = save_model(make_model("llama", vocab_size=224, **SIZES), tmp_path)
    ours, exact = both(folder, tmp_path / "ours", FORMS[name], re.compile("embed|norm"))
    assert isinstance(ours.head, QuantizedLinear)
    assert_same_numbers(ours, exact)


def test_a_tied_head_is_the_embedding_even_if_a_quantized_one_was_saved(tmp_path: Path) -> None:
    folder = save_model(make_model("llama_tied", **SIZES), tmp_path)
    ours, exact = both(folder, tmp_path / "ours", FORMS["gptq"])
    assert torch.equal(ours.head.weight_OI, ours.embedding.weight_VE)
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    tensors |= written(FORMS["gptq"], (224, 64), "lm_head")[0]
    write(tmp_path / "ours", tensors)
    assert torch.equal(load(tmp_path / "ours").head.weight_OI, exact.head.weight_OI)


def test_biases_of_zeros_that_gptq_adds_are_left_aside_and_others_are_not(tmp_path: Path) -> None:
    folder = save_model(make_model("llama", **SIZES), tmp_path)
    ours, exact = both(folder, tmp_path / "ours", FORMS["gptq"])
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    bias = "model.layers.0.mlp.up_proj.bias"
    write(tmp_path / "ours", {**tensors, bias: torch.zeros(160)})
    assert_same_numbers(load(tmp_path / "ours"), exact)
    write(tmp_path / "ours", {**tensors, bias: torch.ones(160)})
    with pytest.raises(ModelError, match=re.escape(bias)):
        load(tmp_path / "ours")


def test_a_zero_that_was_borrowed_for_is_read_as_gptqs_own_loader_does() -> None:
    """The first of each eight zeros is 0: version 1 has it as -1, and its neighbour is one less."""
    tensors, _ = written(gptq(version=1), (64, 32))
    as_they_are, _ = written(gptq(version=2), (64, 32))
    assert int(as_they_are["m.qzeros"][0, 0]) & 15 == 0
    assert int(tensors["m.qzeros"][0, 0]) & 15 == 15
    assert (int(as_they_are["m.qzeros"][0, 0]) >> 4) - (
        int(tensors["m.qzeros"][0, 0]) >> 4
    ) != 1 << 4


def without(ending: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"m.{ending}")


def changed(ending: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"m.{ending}": change(tensors[f"m.{ending}"])})


DAMAGES = [
    ("fp8 of blocks", without("weight_scale_inv"), "float8_e4m3fn, and config.json does not say"),
    ("fp8 of blocks", changed("weight_scale_inv", lambda t: t[:1]), "weight_scale_inv is [1, 2]"),
    ("fp8 of blocks", changed("weight", lambda t: t[:32]), "m.weight is [32, 192]"),
    (
        "fp8 of a tensor",
        changed("weight", lambda t: t.float().to(torch.float8_e5m2)),
        "m.weight is torch.float8_e5m2",
    ),
    ("modelopt NVFP4", without("weight_scale_2"), "m.weight_scale_2 is missing"),
    ("modelopt NVFP4", changed("weight", lambda t: t.view(torch.int8)), "m.weight is torch.int8"),
    ("compressed int4", without("weight_scale"), "m.weight_scale is missing"),
    ("compressed int4", changed("weight_scale", lambda t: t[:, :5]), "weight_scale is [160, 5]"),
    ("compressed int4", changed("weight_packed", lambda t: t[:, :12]), "is of 2 bits for each"),
    ("compressed nvfp4", changed("weight_packed", lambda t: t[:, 1:]), "packed is [160, 95]"),
    ("compressed int8 of rows", changed("weight", lambda t: t[1:]), "m.weight is [159, 192]"),
    ("gptq", without("scales"), "m.scales is missing"),
    ("gptq", without("qzeros"), "m.qzeros is missing"),
    ("gptq", changed("qweight", lambda t: t[:18]), "m.qweight is of 3 bits"),
    ("gptq", changed("qweight", lambda t: t[:, 8:]), "m.qweight is [24, 152]"),
    ("gptq", changed("scales", lambda t: t[:5]), "m.qzeros is [6, 160]"),
    ("gptq", changed("g_idx", lambda t: t.clamp(min=1)), "m.g_idx makes groups that differ"),
    ("awq", changed("qweight", lambda t: t[:, 1:]), "m.qweight is [192, 19]"),
    ("awq", without("qzeros"), "m.qzeros is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGES)
def test_tensors_that_are_missing_or_do_not_fit_are_named(
    name: str, damage: Callable[[dict[str, Tensor]], None], said: str, tmp_path: Path
) -> None:
    tensors, _ = written(FORMS[name], (160, 192))
    damage(tensors)
    write(tmp_path, tensors)
    with pytest.raises(ModelError, match=re.escape(said)):
        weights_of(tmp_path, FORMS[name]).linear(["m"], [160], 192)


@pytest.mark.parametrize("name", ["compressed int4 of rows", "compressed mxfp4"])
def test_inputs_that_make_no_blocks_of_4_bits_are_refused(name: str, tmp_path: Path) -> None:
    form, tensors = FORMS[name], {}
    tensors, _ = written(form, (32, 64))
    narrow = {"m.weight_packed": tensors["m.weight_packed"][:, : 5 if "int4" in name else 20]}
    scale = tensors["m.weight_scale"][:, :1].contiguous()
    write(tmp_path, {**narrow, "m.weight_scale": scale})
    with pytest.raises(ModelError, match="40 inputs"):
        weights_of(tmp_path, form).linear(["m"], [32], 40)


def test_groups_of_fewer_inputs_than_16_are_refused(tmp_path: Path) -> None:
    form = FORMS["fp8 of blocks"]
    narrow = replace(form, config=form.config | {"weight_block_size": (128, 8)})
    codes = torch.ones(128, 64).to(torch.float8_e4m3fn)
    write(tmp_path, {"m.weight": codes, "m.weight_scale_inv": torch.ones(1, 8)})
    with pytest.raises(ModelError, match="weight_scale_inv is "):
        weights_of(tmp_path, narrow).linear(["m"], [128], 64)
