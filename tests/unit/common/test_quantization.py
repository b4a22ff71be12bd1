"""What config.json says of quantization is read, and what is not supported refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.model_folder import read_model_config, revision_of
from common.quantization import (
    QuantizationConfig,
    has_fp8_cache,
    quant_method,
    read_quantization,
)

FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 128]}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "group_size": 128, "actorder": "weight"}


FP8_INPUTS = frozenset({"fp8"})


def compressed(*weights: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    groups = {f"group_{n}": {"targets": [], "weights": each} for n, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **more}


def read(config: dict[str, Any]) -> QuantizationConfig | None:
    return read_quantization({"quantization_config": config})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"quant_method": "fp8"}, QuantizationConfig("fp8", "fp8", inputs_8bit=FP8_INPUTS)),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "float8_e4m3fn"},
            QuantizationConfig("fp8", "fp8", (128, 128), inputs_8bit=FP8_INPUTS),
        ),
        ({"quant_method": "fbgemm_fp8"}, QuantizationConfig("fp8", "fp8", inputs_8bit=FP8_INPUTS)),
        (
            {"quant_method": "mxfp8"},
            QuantizationConfig("fp8", "fp8", (1, 32), inputs_8bit=FP8_INPUTS),
        ),
        (
            {"quant_method": "GPTQ", "bits": 4},
            QuantizationConfig("gptq", "int4", zeros_less_one=True),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "format": "gptq_v2"},
            QuantizationConfig("gptq", "int8"),
        ),
        ({"quant_method": "awq", "bits": 4}, QuantizationConfig("awq", "int4")),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
            QuantizationConfig("mxfp4", "fp4", of_experts=True),
        ),
        (
            {"quant_method": "awq", "w_bit": 4, "version": "GEMM"},
            QuantizationConfig("awq", "int4"),
        ),
        (
            {"quant_method": "intel/auto-round", "bits": 4},
            QuantizationConfig("gptq", "int4", zeros_less_one=True),
        ),
        (
            {"quant_method": "auto-round", "bits": 8, "packing_format": "auto_round:gptqmodel"},
            QuantizationConfig("gptq", "int8"),
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
            QuantizationConfig("awq", "int4"),
        ),
        (
            compressed(FP8_WEIGHTS, INT4_WEIGHTS, format="mixed-precision"),
            QuantizationConfig("compressed-tensors", "fp8", (64, 128)),
        ),
        (
            compressed(None, INT4_WEIGHTS | {"block_structure": None}),
            QuantizationConfig("compressed-tensors", "int4"),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
            QuantizationConfig("fp8", "fp8", (128, 128)),
        ),
        (
            {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4"}},
            QuantizationConfig("modelopt_fp4", "fp4"),
        ),
    ],
)
def test_what_is_supported_is_read(
    config: dict[str, Any], expected: QuantizationConfig | None
) -> None:
    assert read(config) == expected


INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FLOAT_INPUTS = INPUTS | {"type": "float"}
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel"}


def groups_of(*groups: tuple[dict[str, Any], dict[str, Any] | None]) -> dict[str, Any]:
    named = {
        f"group_{n}": {"weights": weights, "input_activations": inputs}
        for n, (weights, inputs) in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "config_groups": named}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, {"fp8"}),
        ({"quant_method": "fp8", "activation_scheme": "static"}, {"fp8"}),
        ({"quant_method": "fp8", "activation_scheme": None}, set()),
        ({"quant_method": "fbgemm_fp8"}, {"fp8"}),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"fp8"}),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, {"fp8"}),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, set()),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, set()),
        ({"quant_method": "gptq", "bits": 8}, set()),
        ({"quant_method": "awq", "bits": 4}, set()),
        (groups_of((INT8_WEIGHTS, None)), set()),
        (groups_of((INT8_WEIGHTS, INPUTS)), {"int8"}),
        (groups_of((INT8_WEIGHTS, INPUTS | {"num_bits": 4})), set()),
        (groups_of((FP8_WEIGHTS, FLOAT_INPUTS), (INT4_WEIGHTS, None)), {"fp8"}),
        (groups_of((INT4_WEIGHTS, FLOAT_INPUTS)), set()),  # W4AFP8
        (groups_of((INT8_WEIGHTS, INPUTS), (INT8_WEIGHTS, None)), set()),
    ],
)
def test_whether_inputs_may_be_rounded_is_read(config: dict[str, Any], expected: set[str]) -> None:
    found = read(config)
    assert found is not None and found.inputs_8bit == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (compressed(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}), True),
        (compressed(kv_cache_scheme={"num_bits": 8, "type": "int"}), False),
        (compressed(kv_cache_scheme=None), False),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, True),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": None}}, False),
        ({"quant_method": "fp8"}, False),
        ({}, False),
    ],
)
def test_whether_it_is_for_a_cache_in_fp8_is_read(config: dict[str, Any], expected: bool) -> None:
    assert has_fp8_cache({"quantization_config": config}) == expected


def test_old_files_of_compressed_tensors_have_another_name_for_it() -> None:
    assert read_quantization({"compression_config": compressed(INT4_WEIGHTS)}) is not None


@pytest.mark.parametrize(
    "method",
    ["aqlm", "bitnet", "eetq", "exl2", "fp_quant", "gguf", "higgs", "hqq", "quanto"]
    + ["quark", "quip", "spqr", "torchao", "vptq"],
)
def test_other_methods_are_refused_by_name_with_what_to_take_instead(method: str) -> None:
    with pytest.raises(ModelError, match=f"quantization by {method} is not supported") as caught:
        read({"quant_method": method, "bits": 4})
    assert "GPTQ, AWQ or FP8 weights" in str(caught.value)
    assert "--quantization fp8, int8 or int4" in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "bitsandbytes (nf4, fp4, LLM.int8())",
        ),
        (
            {"quantization": {"bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}},
            "MLX, the format of Apple's machines,",
        ),
        ({"quip_params": {"codebook": "E8P12"}}, "QuIP#"),
        ({"quantization_config": {"bits": 4}}, "a method without a name"),
    ],
)
def test_methods_that_are_known_by_other_fields_are_named(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"quantization by {named} is not supported")):
        read_quantization(raw)
    assert quant_method(raw) == named


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 of 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "makes no sense"),
        ({"quant_method": "gptq", "bits": 3}, "integers of 3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "integers of 2 bits"),
        ({"quant_method": "gptq"}, "makes no sense"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "of int16 words"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ's version 'gemv' of 4 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "'gemv_fast'"),
        ({"quant_method": "awq", "bits": 8}, "of 8 bits"),
        (
            {
                "quant_method": "auto-round",
                "bits": 4,
                "packing_format": "auto_round:llm_compressor",
            },
            "'auto_round:llm_compressor'",
        ),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "of 'mx_fp'"),
        ({"quant_method": "auto-round", "bits": 2}, "integers of 2 bits"),
        (compressed(INT4_WEIGHTS | {"num_bits": 3}), "weights of 3 bits (int)"),
        (compressed(INT4_WEIGHTS, sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
        (compressed(INT4_WEIGHTS, format="marlin-24"), "format marlin-24"),
        (compressed(INT4_WEIGHTS, transform_config={"config_groups": {"R1": {}}}), "transforms"),
        (compressed(None), "makes no sense"),
        ({"quant_method": "compressed-tensors"}, "makes no sense"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt's W4A8_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "ModelOpt's NVFP4_AWQ"),
        ({"quant_method": "modelopt"}, "ModelOpt's NONE"),
    ],
)
def test_forms_that_are_not_supported_are_refused_by_name(
    config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(said)) as caught:
        read(config)
    assert str(caught.value).startswith("config.json: ")


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ModelError, match="not a table"):
        read_quantization({"quantization_config": ["fp8"]})


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    before = revision_of(tmp_path)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found = read_quantization(read_model_config(tmp_path))
    assert found == QuantizationConfig("fp8", "fp8", inputs_8bit=FP8_INPUTS)
    assert revision_of(tmp_path) != before
    own = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    found = read_quantization(read_model_config(tmp_path))
    assert found == QuantizationConfig("modelopt_fp4", "fp4")
