"""Which format the `quantization_config` of a config.json names; others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common.decoder_shape import quant_method, quantization_of
from common.errors import ModelError
from services.compute.quantization.compressed_tensors import CompressedTensors
from services.compute.quantization.format import WeightFormat
from services.compute.quantization.fp4 import Fp4
from services.compute.quantization.fp8 import Fp8
from services.compute.quantization.integers import Awq, Gptq
from services.compute.quantization.packed import Kind


def read_format(raw: Mapping[str, Any]) -> WeightFormat | None:
    """The format of the linear maps of a config.json's model; None if they are not quantized.

    Raises ModelError for a format, or a form of one, that is not supported.
    """
    method = quant_method(raw)
    if not method:
        return None
    try:
        return FORMATS[method](quantization_of(raw))
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ModelError(f"config.json: quantization_config makes no sense: {error}.") from error


def _fp8(config: Mapping[str, Any]) -> WeightFormat:
    block = config.get("weight_block_size")
    if config.get("fmt", "e4m3") != "e4m3":
        raise ModelError(f"config.json: FP8 of {config['fmt']!r} is not supported; e4m3 is.")
    return Fp8(_block(block))


def _block(block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    block_out, block_in = map(int, block.split("x") if isinstance(block, str) else block)
    return block_out, block_in


def _gptq(config: Mapping[str, Any]) -> WeightFormat:
    version = str(config.get("checkpoint_format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"config.json: GPTQ's checkpoint_format {version!r} is not supported; gptq and gptq_v2 "
            "are. Save the model in one of these."
        )
    return Gptq(_bits(config), version == "gptq")


def _bits(config: Mapping[str, Any]) -> int:
    bits = int(config["bits"])
    if bits not in (4, 8):
        raise ModelError(f"config.json: weights of {bits} bits are not supported; 4 and 8 are.")
    if config.get("dynamic") or config.get("extra_config"):
        for change in _changes(config):
            if int(change.get("bits", bits)) not in (bits, 16):
                raise ModelError(
                    f"config.json: layers of {change['bits']} bits beside others of {bits} are not "
                    f"supported in this format; they are in that of compressed-tensors."
                )
    return bits


def _changes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is said of single layers."""
    changes = {**(config.get("dynamic") or {}), **(config.get("extra_config") or {})}
    return [change for change in changes.values() if isinstance(change, Mapping)]


def _awq(config: Mapping[str, Any]) -> WeightFormat:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm" or _bits(config) != 4:
        raise ModelError(
            f"config.json: AWQ's version {version!r} of {config.get('bits')} bits is not "
            "supported; gemm of 4 bits is."
        )
    return Awq()


def _auto_round(config: Mapping[str, Any]) -> WeightFormat:
    packing = str(config.get("packing_format", "auto_round:auto_gptq"))
    if "awq" in packing:
        return _awq(config)
    if "gptq" in packing:
        return Gptq(_bits(config), zeros_less_one="v2" not in packing)
    raise ModelError(
        f"config.json: AutoRound's packing_format {packing!r} is not supported; auto_gptq and "
        "auto_awq are. Export the model in one of these."
    )


def _compressed_tensors(config: Mapping[str, Any]) -> WeightFormat:
    groups = [group["weights"] for group in config["config_groups"].values() if group["weights"]]
    kinds: list[Kind] = []
    block = None
    for weights in groups:
        form, bits = str(weights["type"]), int(weights["num_bits"])
        kind = KINDS.get((form, bits))
        if kind is None:
            raise ModelError(
                f"config.json: weights of {bits} bits ({form}) are not supported; "
                "integers and floats of 4 and 8 bits are."
            )
        kinds.append(kind)
        block = _block(weights.get("block_structure")) or block
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ModelError(
            f"config.json: sparse weights ({sparsity}) are not supported; save them as dense ones."
        )
    return CompressedTensors(kinds[0], block)


KINDS: Mapping[tuple[str, int], Kind] = {
    ("int", 4): "int4",
    ("int", 8): "int8",
    ("float", 4): "fp4",
    ("float", 8): "fp8",
}


def _modelopt(config: Mapping[str, Any]) -> WeightFormat:
    algorithm = str(config.get("quant_algo", "")).upper()
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return Fp8()
    if algorithm in ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"):
        return Fp4()
    raise ModelError(
        f"config.json: ModelOpt's {algorithm or 'format without quant_algo'} is not supported; FP8 "
        "and NVFP4 are. Take a checkpoint in one of these."
    )


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "auto-round": _auto_round,
    "auto_round": _auto_round,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "intel/auto-round": _auto_round,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}
