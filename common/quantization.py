"""What a config.json says of quantized weights, read; what is not supported is refused by name.

The launcher asks before anything is downloaded or started, compute reads weights by the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from common.errors import ConfigError, ModelError

Layout: TypeAlias = Literal["awq", "compressed-tensors", "fp8", "gptq", "modelopt_fp4", "mxfp4"]
"""By what names and in what order a checkpoint has its codes and scales."""

INSTEAD = (
    "Take a checkpoint of compressed-tensors (llm-compressor), GPTQ, AWQ or FP8 weights, or the "
    "model without quantization and --quantization fp8, int8 or int4."
)
MLX = "MLX, the format of Apple's machines,"
Kind: TypeAlias = Literal["fp8", "int8", "int4", "fp4"]
BITSANDBYTES = "bitsandbytes (nf4, fp4, LLM.int8())"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How the linear maps of a checkpoint are quantized, those of them that are."""

    layout: Layout
    kind: Kind  # what most of them are
    block: tuple[int, int] | None = None  # rows and inputs that share a scale
    zeros_less_one: bool = False  # in the files
    inputs_8bit: frozenset[Kind] = frozenset()
    """Kinds of weights whose inputs may be rounded to 8 bits, too."""
    of_experts: bool = False  # of a mixture, and of nothing else


def read_quantization(raw: Mapping[str, Any]) -> QuantizationConfig | None:
    """Return what config.json says of quantization; None if nothing is quantized.

    Raises ModelError for a format, or a form of one, that is not supported.
    """
    config, method = _table(raw), quant_method(raw)
    if not method:
        return None
    if method not in READERS:
        raise ModelError(f"config.json: quantization by {method} is not supported. {INSTEAD}")
    try:
        return READERS[method](config)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ModelError(f"config.json: quantization_config makes no sense: {error!r}.") from error


def check_at_load(
    config: QuantizationConfig | None, wanted: str, model: object = "this model"
) -> None:
    """Raise ConfigError if weights that are quantized already are wanted in another kind."""
    if config is not None and wanted not in ("auto", config.kind):
        raise ConfigError(
            f"compute.quantization is {wanted}, and the weights of {model} are quantized "
            f"already ({config.kind}); leave it out, or take the model without quantization."
        )


def has_fp8_cache(raw: Mapping[str, Any]) -> bool:
    """Whether config.json says that keys and values are cached in FP8."""
    config = _table(raw)
    of_modelopt = config.get("quantization") or config
    scheme = config.get("kv_cache_scheme") or {}
    is_float8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return is_float8 or str(of_modelopt.get("kv_cache_quant_algo")).upper() == "FP8"


def _table(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    found = raw.get("quantization_config") or raw.get("compression_config") or {}
    if not isinstance(found, Mapping):
        raise ModelError("config.json: quantization_config is not a table; download it again.")
    return found


def quant_method(raw: Mapping[str, Any]) -> str:
    """Return what a config.json calls its way to quantize, for people; empty if it has none."""
    config = _table(raw)
    method = str(config.get("quant_method") or "").lower()
    if method:
        return BITSANDBYTES if method == "bitsandbytes" else method[:40]
    if "quantization" in raw:
        return MLX
    if "quip_params" in raw:
        return "QuIP#"
    return "a method without a name" if config else ""


def _fp8(config: Mapping[str, Any]) -> QuantizationConfig:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"config.json: FP8 of {config['fmt']!r} is not supported; e4m3 is.")
    rounds_inputs = config.get("activation_scheme", "dynamic") in ("dynamic", "static")
    inputs_8bit: frozenset[Kind] = frozenset({"fp8"}) if rounds_inputs else frozenset()
    block = _block(config.get("weight_block_size"))
    return QuantizationConfig("fp8", "fp8", block, inputs_8bit=inputs_8bit)


def _block(block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    block_out, block_in = map(int, block.split("x") if isinstance(block, str) else block)
    return block_out, block_in


def _mxfp8(config: Mapping[str, Any]) -> QuantizationConfig:
    return _fp8({"weight_block_size": (1, 32), **config})


def _gptq(config: Mapping[str, Any]) -> QuantizationConfig:
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if config.get("is_marlin_format"):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2") or config.get("pack_dtype", "int32") != "int32":
        raise ModelError(
            f"config.json: GPTQ's checkpoint_format {layout!r} of {config.get('pack_dtype')} words "
            "is not supported; gptq and gptq_v2 of int32 are. Save the model in one of these."
        )
    return QuantizationConfig("gptq", _integer(config), zeros_less_one=layout == "gptq")


def _integer(config: Mapping[str, Any]) -> Literal["int8", "int4"]:
    bits = int(config["bits"])
    if bits not in (4, 8):
        raise ModelError(
            f"config.json: integers of {bits} bits are not supported; 4 and 8 bits are. Take "
            "another checkpoint, or the model without quantization and --quantization int4."
        )
    return "int8" if bits == 8 else "int4"


def _awq(config: Mapping[str, Any]) -> QuantizationConfig:
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    bits = int(config.get("bits") or config["w_bit"])
    if version != "gemm" or bits != 4:
        raise ModelError(
            f"config.json: AWQ's version {version!r} of {bits} bits is not supported; gemm of 4 "
            "bits is. Save the model in this."
        )
    return QuantizationConfig("awq", "int4")


def _auto_round(config: Mapping[str, Any]) -> QuantizationConfig:
    packing, data_type = str(config.get("packing_format") or AUTO_GPTQ), config.get("data_type")
    if packing == AUTO_AWQ and data_type in ("int", None):
        return _awq({"bits": config["bits"]})
    if packing not in (AUTO_GPTQ, *AUTO_ROUND) or data_type not in ("int", None):
        raise ModelError(
            f"config.json: AutoRound's packing_format {packing!r} of {data_type!r} is not "
            "supported; auto_gptq, gptqmodel and auto_awq of integers are. Export one of these."
        )
    return QuantizationConfig("gptq", _integer(config), zeros_less_one=packing == AUTO_GPTQ)


AUTO_AWQ, AUTO_GPTQ = "auto_round:auto_awq", "auto_round:auto_gptq"
AUTO_ROUND = ("auto_round", "auto_round:gptqmodel")  # zeros as they are


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizationConfig:
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ModelError(
            f"config.json: sparse weights ({sparsity}) are not supported; save them as dense ones."
        )
    if (config.get("transform_config") or {}).get("config_groups"):
        raise ModelError(
            "config.json: transforms of activations (transform_config) are not supported."
        )
    groups = [group for group in config["config_groups"].values() if group.get("weights")]
    for layout in (config.get("format"), *[group.get("format") for group in groups]):
        if layout not in (None, *COMPRESSED_FORMATS):
            raise ModelError(
                f"config.json: compressed-tensors' format {layout} is not supported; "
                f"{', '.join(COMPRESSED_FORMATS)} are."
            )
    found = [_scheme(group) for group in groups]
    blocks = [each.block for each in found if each.block is not None]
    return QuantizationConfig(
        "compressed-tensors",
        found[0].kind,
        blocks[0] if blocks else None,
        # which map is of which group is read off its tensors, so that groups of a kind are one
        inputs_8bit=frozenset(each.kind for each in found)
        - {each.kind for each in found if not each.inputs_8bit},
    )


COMPRESSED_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision"),
)


def _scheme(group: Mapping[str, Any]) -> QuantizationConfig:
    weights, inputs = group["weights"], group.get("input_activations") or {}
    type_and_bits = (str(weights["type"]), int(weights["num_bits"]))
    if type_and_bits not in KINDS:
        raise ModelError(
            f"config.json: weights of {type_and_bits[1]} bits ({type_and_bits[0]}) are not "
            "supported; integers and floats of 4 and 8 bits are."
        )
    kind, block = KINDS[type_and_bits], _block(weights.get("block_structure"))
    # with inputs of another type than the weights', products of ours keep 16 bits
    input_type = inputs.get("type", weights["type"])
    is_alike = inputs.get("num_bits") == 8 and input_type == weights["type"]
    inputs_8bit = frozenset({kind} if is_alike else ())
    return QuantizationConfig("compressed-tensors", kind, block, inputs_8bit=inputs_8bit)


KINDS: Mapping[tuple[str, int], Kind] = {
    ("int", 4): "int4",
    ("int", 8): "int8",
    ("float", 4): "fp4",
    ("float", 8): "fp8",
}


def _modelopt(config: Mapping[str, Any]) -> QuantizationConfig:
    config = config.get("quantization") or config
    algorithm = str(config.get("quant_algo")).upper()
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return QuantizationConfig("fp8", "fp8", inputs_8bit=frozenset({"fp8"}))
    if algorithm == "FP8_PB_WO":
        return QuantizationConfig("fp8", "fp8", (128, 128))
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return QuantizationConfig("modelopt_fp4", "fp4")
    raise ModelError(
        f"config.json: ModelOpt's {algorithm} is not supported; FP8, FP8_PER_CHANNEL_PER_TOKEN, "
        "FP8_PB_WO and NVFP4 are. Take a checkpoint in one of these."
    )


READERS: Mapping[str, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
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
    "mxfp4": lambda config: QuantizationConfig("mxfp4", "fp4", of_experts=True),  # gpt-oss
    "mxfp8": _mxfp8,
}
"""By quant_method."""
