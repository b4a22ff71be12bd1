"""Quantized checkpoints as the field's writers make them, and the numbers that they stand for.

compressed-tensors and transformers quantize here by themselves. GPTQ's and AWQ's packers, which
need a GPU's libraries to be imported, are written anew, one code at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Written: TypeAlias = tuple[dict[str, Tensor], Tensor]
"""The tensors of a module by their endings, and the weight [O, I] in float32 that they are."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of one format."""

    config: dict[str, Any]  # config.json's quantization_config
    write: Callable[[Tensor, str], Written]  # a module's weight and its name


def compressed(layout: str, *, rounds_inputs: bool = False, **args: Any) -> Form:
    """One of compressed-tensors' layouts; `args` are those of its weights."""
    weights, inputs = QuantizationArgs(**args), None
    if rounds_inputs:
        inputs = QuantizationArgs(type=weights.type, strategy="token", dynamic=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def write(weight_OI: Tensor, name: str) -> Written:
        state = {"weight": weight_OI, **_qparams(weight_OI, weights)}
        tensors = compressor.compress(state, scheme)
        if weights.type == "int" or weights.num_bits == 8:
            dense_OI = compressor.decompress(tensors, scheme)["weight"].float()
        else:  # it rounds these to bfloat16
            dense_OI = _fp4_numbers(tensors, weights)
        return {**tensors, "input_global_scale": torch.ones(1)}, dense_OI

    groups = {"group_0": scheme.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    return Form({**config, "ignore": ["lm_head"], "kv_cache_scheme": None}, write)


def _fp4_numbers(tensors: dict[str, Tensor], args: QuantizationArgs) -> Tensor:
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    values_OI = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
    wide = decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale
    overall = tensors.get("weight_global_scale")
    return dequantize(values_OI, wide.float(), args=args, global_scale=overall)


def _qparams(weight_OI: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    num_out, num_in = weight_OI.shape
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = F.pad(weight_OI, (0, -num_in % columns, 0, -num_out % rows))
        blocks = padded.view(len(padded) // rows, rows, -1, columns)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        size = {"tensor": weight_OI.numel(), "channel": num_in}.get(args.strategy, args.group_size)
        groups = weight_OI.reshape(1 if args.strategy == "tensor" else num_out, -1, size)
        low, high = groups.amin(2), groups.amax(2)
        if args.strategy == "tensor":
            low, high = low.flatten(), high.flatten()
    found = {}
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = generate_gparam(weight_OI.amin(), weight_OI.amax())
    scale, zero = calculate_qparams(low, high, args, found.get("weight_global_scale"))
    return {**found, "weight_scale": scale.to(weight_OI.dtype), "weight_zero_point": zero}


def gptq(
    bits: int = 4, group_size: int = 32, version: int = 1, order: str = "", **config: Any
) -> Form:
    """GPTQ; `order`: "shared" if all maps have their inputs in one act order, or "own"."""

    def write(weight_OI: Tensor, name: str) -> Written:
        num_out, num_in = weight_OI.shape
        size = num_in if group_size == -1 else group_size
        groups_I = torch.arange(num_in) // size
        if order:
            seed = 1 if order == "shared" else sum(name.encode())
            generator = torch.Generator().manual_seed(seed)
            groups_I = groups_I[torch.randperm(num_in, generator=generator)]
        scales_GO = torch.empty(num_in // size, num_out)
        zeros_GO = torch.empty_like(scales_GO, dtype=torch.int64)
        codes_IO = torch.empty(num_in, num_out, dtype=torch.int64)
        for group in range(len(scales_GO)):
            members = groups_I == group
            some_NO = weight_OI.t()[members]
            codes_IO[members], scales_GO[group], zeros_GO[group] = _rounded(some_NO, bits)
        words = _words_of_rows(codes_IO, bits)
        zero_words = _words_of_rows(zeros_GO.t(), bits).t()
        if version == 1:
            zero_words = _wrapped(zero_words.long() - sum(1 << b for b in range(0, 32, bits)))
        dense_IO = (codes_IO - zeros_GO[groups_I]).float() * scales_GO[groups_I]
        tensors = {"qweight": words, "qzeros": zero_words, "scales": scales_GO.half()}
        return {**tensors, "g_idx": groups_I.int()}, dense_IO.t().contiguous()

    layout = "gptq" if version == 1 else "gptq_v2"
    said = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": bool(order)}
    return Form({**said, "checkpoint_format": layout, **config}, write)


def awq(group_size: int = 32, **config: Any) -> Form:
    """AWQ's version "gemm"."""

    def write(weight_OI: Tensor, name: str) -> Written:
        num_out, num_in = weight_OI.shape
        codes_IO = torch.empty(num_in, num_out, dtype=torch.int64)
        scales_GO = torch.empty(num_in // group_size, num_out)
        zeros_GO = torch.empty_like(scales_GO, dtype=torch.int64)
        for group in range(len(scales_GO)):
            members = slice(group * group_size, (group + 1) * group_size)
            some_NO = weight_OI.t()[members]
            codes_IO[members], scales_GO[group], zeros_GO[group] = _rounded(some_NO, 4)
        spread = torch.arange(num_in) // group_size
        dense_IO = (codes_IO - zeros_GO[spread]).float() * scales_GO[spread]
        tensors = {"qweight": _awq_words(codes_IO), "qzeros": _awq_words(zeros_GO)}
        return {**tensors, "scales": scales_GO.half()}, dense_IO.t().contiguous()

    said = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True}
    return Form({**said, "version": "gemm", **config}, write)


def _rounded(some_NO: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, and a scale (a number of float16) and a zero for each output; one zero is 0."""
    largest = (1 << bits) - 1
    low, high = some_NO.amin(0).clamp(max=0), some_NO.amax(0).clamp(min=0)
    low[0] = 0
    scales_O = ((high - low) / largest).half().float()
    zeros_O = (-low / scales_O).round()
    codes_NO = (some_NO / scales_O).round().add(zeros_O).clamp(0, largest)
    return codes_NO.long(), scales_O, zeros_O.long()


def _words_of_rows(codes: Tensor, bits: int) -> Tensor:
    """Codes [N * 32 / bits, M] in words [N, M], from the lowest bits on."""
    count = 32 // bits
    words = torch.zeros(-(-len(codes) // count), codes.shape[1], dtype=torch.int64)
    for number, row in enumerate(codes):
        words[number // count] |= row << bits * (number % count)
    return _wrapped(words)


def _awq_words(codes: Tensor) -> Tensor:
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for word in range(words.shape[1]):
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, word] |= codes[:, 8 * word + column] << 4 * place
    return _wrapped(words)


def _wrapped(words: Tensor) -> Tensor:
    """The lowest 32 bits."""
    return ((words + (1 << 31)) % (1 << 32) - (1 << 31)).int()


def fp8(block: tuple[int, int] | None = (128, 128), scale_fmt: str = "float") -> Form:
    """Hugging Face's own, by transformers' quantizer; it has whole blocks only, so they are cut."""
    config = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "static"}

    def write(weight_OI: Tensor, name: str) -> Written:
        num_out, num_in = weight_OI.shape
        rows, columns = block or (1, 1)
        padded = F.pad(weight_OI, (0, -num_in % columns, 0, -num_out % rows))
        said = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
        writer = Fp8Quantize(SimpleNamespace(quantization_config=said))
        tensors = writer.convert({"x.weight": padded})
        codes = tensors["x.weight"][:num_out, :num_in].contiguous()
        scales = tensors["x.weight_scale_inv"]
        by_row = scales.float().view(-1, padded.shape[1] // columns if block else 1)
        wide = by_row.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        dense_OI = codes.float() * wide[:num_out, :num_in]
        scales = scales.flatten()[0] if block is None else scales
        more = {"weight_scale_inv": scales, "activation_scale": torch.ones(())}
        return {"weight": codes, **more}, dense_OI

    return Form(config, write)


def fbgemm() -> Form:
    """A scale for each row."""

    def write(weight_OI: Tensor, name: str) -> Written:
        scales_O1 = weight_OI.abs().amax(1, keepdim=True) / 448
        codes = (weight_OI / scales_O1).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales_O1}, codes.float() * scales_O1

    return Form({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, write)


def modelopt(algorithm: str) -> Form:
    """ModelOpt: FP8 of a tensor or of blocks, whose scales have four dimensions, or NVFP4."""
    nvfp4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16,
                       strategy="tensor_group", scale_dtype="torch.float8_e4m3fn")  # fmt: skip

    def write(weight_OI: Tensor, name: str) -> Written:
        if algorithm != "NVFP4":
            form = fp8((128, 128) if algorithm == "FP8_PB_WO" else None)
            tensors, dense_OI = form.write(weight_OI, name)
            scales = tensors["weight_scale_inv"]
            scales = scales[:, None, :, None] if scales.dim() else scales
            more = {"weight_scale": scales, "input_scale": torch.ones(())}
            return {"weight": tensors["weight"], **more}, dense_OI
        tensors, _ = nvfp4.write(weight_OI, name)
        overall = 1 / tensors["weight_global_scale"].reshape(())
        scales_OG = tensors["weight_scale"].float() * overall
        values = E2M1[_halves(tensors["weight_packed"])].view(len(weight_OI), -1, 16)
        dense_OI = (values * scales_OG[:, :, None]).flatten(1)
        named = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
        return {**named, "weight_scale_2": overall, "input_scale": torch.ones(())}, dense_OI

    return Form({"quant_method": "modelopt", "quant_algo": algorithm}, write)


E2M1 = torch.tensor(
    [*(POSITIVE := (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)), *(-x for x in POSITIVE)]
)


def _halves(pairs: Tensor) -> Tensor:
    codes = torch.empty(len(pairs), 2 * pairs.shape[1], dtype=torch.int64)
    codes[:, ::2], codes[:, 1::2] = pairs.long() % 16, pairs.long() // 16
    return codes


def auto_round(packing: str, **config: Any) -> Form:
    inner = {
        "auto_round:auto_gptq": gptq(),
        "auto_round:gptqmodel": gptq(version=2),
        "auto_round:auto_awq": awq(),
    }[packing]
    said = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "data_type": "int"}
    return Form({**said, **config}, inner.write)


INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
FORMS: Mapping[str, Form] = {
    "fp8 of blocks": fp8(),
    "fp8 of a tensor": fp8(None),
    "fp8 with powers of 2": fp8(scale_fmt="ue8m0"),
    "fbgemm_fp8": fbgemm(),
    "modelopt FP8": modelopt("FP8"),
    "modelopt FP8_PB_WO": modelopt("FP8_PB_WO"),
    "modelopt NVFP4": modelopt("NVFP4"),
    "compressed fp8 of a tensor": compressed("float-quantized", type="float", strategy="tensor"),
    "compressed fp8 of rows": compressed("float-quantized", type="float", strategy="channel"),
    "compressed fp8 of blocks": compressed(
        "float-quantized", type="float", strategy="block", block_structure=[128, 128]
    ),
    "compressed mxfp8": compressed(
        "mxfp8-quantized", type="float", group_size=32, scale_dtype="torch.uint8"
    ),
    "compressed fp8 and inputs": compressed(
        "float-quantized", rounds_inputs=True, type="float", strategy="channel"
    ),
    "compressed int8 and inputs": compressed(
        "int-quantized", rounds_inputs=True, strategy="channel"
    ),
    "compressed int8 of rows": compressed("int-quantized", strategy="channel"),
    "compressed int8 with zeros": compressed("int-quantized", strategy="channel", symmetric=False),
    "compressed int8, packed": compressed("pack-quantized", group_size=32),
    "compressed int4": compressed("pack-quantized", group_size=32, **INT4),
    "compressed int4 of rows": compressed("pack-quantized", strategy="channel", **INT4),
    "compressed int4 with zeros": compressed(
        "pack-quantized", group_size=16, **INT4 | {"symmetric": False}
    ),
    "compressed nvfp4": compressed(
        "nvfp4-pack-quantized", scale_dtype="torch.float8_e4m3fn", **NVFP4
    ),
    "compressed mxfp4": compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", group_size=32, scale_dtype="torch.uint8"
    ),
    "gptq": gptq(),
    "gptq v2": gptq(version=2),
    "gptq in act order": gptq(order="shared"),
    "gptq in several act orders": gptq(order="own"),
    "gptq of rows": gptq(group_size=-1),
    "gptq of 8 bits": gptq(bits=8),
    "gptq v2 of 8 bits in act order": gptq(bits=8, version=2, order="shared"),
    "awq": awq(),
    "awq of larger groups": awq(group_size=16),
    "auto-round, auto_gptq": auto_round("auto_round:auto_gptq"),
    "auto-round, gptqmodel": auto_round("auto_round:gptqmodel"),
    "auto-round, auto_awq": auto_round("auto_round:auto_awq"),
}
PLAIN = re.compile(r"embed|norm|lm_head|output\.weight")


def quantize_folder(
    folder: Path, to: Path, form: Form, plain: re.Pattern[str] = PLAIN
) -> dict[str, Tensor]:
    """Write a saved model anew, its matrices but those of these names quantized.

    Returns all tensors with the numbers that are in the files.
    """
    dense, quantized = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() != 2 or plain.search(name):
            dense[name] = quantized[name] = tensor
            continue
        module = name.removesuffix("weight")
        tensors, dense[name] = form.write(tensor.float(), name)
        quantized |= {module + ending: part.contiguous() for ending, part in tensors.items()}
        if module.endswith("k_proj."):
            quantized[module + "k_scale"] = torch.ones(())
    to.mkdir(exist_ok=True)
    save_file(quantized, to / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = form.config
    (to / "config.json").write_text(json.dumps(raw))
    return dense


def mxfp4_folder(folder: Path, to: Path) -> dict[str, Tensor]:
    """Write a saved gpt-oss anew with random MXFP4 experts.

    Returns all tensors, those of experts as the numbers that transformers reads in the files.
    """
    dense, quantized = {}, {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            dense[name] = quantized[name] = tensor
            continue
        num_experts, num_in, num_out = tensor.shape
        shape = (num_experts, num_out, num_in // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    to.mkdir(exist_ok=True)
    save_file(quantized, to / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (to / "config.json").write_text(json.dumps(raw))
    return dense


def modelopt_stacks_folder(folder: Path, to: Path, algorithm: str) -> dict[str, Tensor]:
    """Write a saved model anew whose stacked experts ModelOpt has quantized, each stack [X, I, O]
    with one scale for all of it; returns all tensors, those of experts as numbers."""
    form, dense, quantized = modelopt(algorithm), {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        dense[name] = quantized[name] = tensor
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, num_in, num_out = tensor.shape
        tensors, dense_OI = form.write(tensor.float().transpose(1, 2).reshape(-1, num_in), name)
        dense[name] = dense_OI.view(num_experts, num_out, num_in).transpose(1, 2).contiguous()
        for ending, part in tensors.items():
            of_experts = part
            if part.dim():
                of_experts = part.view(num_experts, num_out, -1).transpose(1, 2).contiguous()
            quantized[name if ending == "weight" else f"{name}_{ending}"] = of_experts
    to.mkdir(exist_ok=True)
    save_file(quantized, to / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**raw, "quantization_config": form.config}))
    return dense
