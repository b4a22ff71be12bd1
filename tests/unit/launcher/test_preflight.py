"""What is known not to work is refused before anything is started, in one sentence."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from common.architectures import ARCHITECTURES, ROTATIONS
from common.config import Tables
from common.decoder_shape import read_shape
from common.errors import ConfigError, ModelError, SlipstreamError
from common.gguf.folder import INDEX_NAME
from services.compute.config import ComputeSettings
from services.compute.layers.rope import SCALINGS
from services.compute.models.families import FAMILIES
from services.launcher.plan import Counts, Plan, make_plan
from services.launcher.preflight import ITEM_BYTES, Gpu, Machine, check, check_ranks, device_of

GIB = 1 << 30
NO_GPU = "this machine shows no NVIDIA GPU"
LAPTOP = Machine(host_bytes=16 * GIB, fast_bf16=False, why_no_gpu=NO_GPU)
SERVER = Machine(host_bytes=64 * GIB, fast_bf16=True, gpus=(Gpu(24 * GIB, GIB),))
PC = Machine(host_bytes=16 * GIB, fast_bf16=True, why_no_gpu=NO_GPU)
CONFIG: dict[str, Any] = {  # of Llama 3.1 8B
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def plan_of(options: Tables | None = None, **counts: int) -> Plan:
    return make_plan(None, {}, options or {}, Counts(**counts))


def folder_of(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_header(path: Path, tensors: dict[str, list[int]], cut: int = 0) -> None:
    """Write a safetensors file as large as its header says, but for what is cut, without data."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    data = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end - cut)  # sparse: it takes no room


def refused(plan: Plan, folder: Path, machine: Machine) -> str:
    with pytest.raises(SlipstreamError) as caught:
        check(plan, machine, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_that_fits_passes(tmp_path: Path) -> None:
    check(plan_of(), SERVER, folder_of(tmp_path))
    check(plan_of({"compute": {"dtype": "float16"}}), LAPTOP, folder_of(tmp_path))


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_model_without_a_tokenizer_is_refused(device: str, tmp_path: Path) -> None:
    (folder_of(tmp_path) / "tokenizer.json").unlink()
    said = refused(plan_of({"compute": {"device": device}}), tmp_path, SERVER)
    assert said.startswith(f"{tmp_path}/tokenizer.json is missing")


def test_weights_that_do_not_fit_into_memory_are_named_with_the_sizes(tmp_path: Path) -> None:
    said = refused(plan_of(), folder_of(tmp_path), LAPTOP)
    assert "its weights take 29.9 GiB as float32 and a cache of 16 tokens" in said
    assert "16.0 GiB are free; choose a smaller model, or --dtype bfloat16" in said


def test_weights_that_do_not_fit_on_the_gpu_are_named_with_the_sizes(tmp_path: Path) -> None:
    machine = Machine(64 * GIB, True, (Gpu(16 * GIB, GIB),))
    said = refused(plan_of(), folder_of(tmp_path), machine)
    assert "does not fit on GPU 0: its weights take 15.0 GiB as bfloat16" in said
    assert "of its 16.0 GiB there are 13.4 GiB to use (90% of all, less 1.0 GiB in use)" in said


@pytest.mark.parametrize(
    ("kind", "size"), [("auto", "16.2 GiB"), ("fp8", "8.2 GiB"), ("int8", "8.2 GiB")]
)
def test_a_cache_of_8_bits_is_half_as_large(kind: str, size: str, tmp_path: Path) -> None:
    compute = {"max_model_len": 131072, "dtype": "bfloat16", "kv_cache_dtype": kind}
    machine = Machine(64 * GIB, True, (Gpu(16 * GIB, GIB),))
    said = refused(plan_of({"compute": compute}), folder_of(tmp_path), machine)
    assert f"a cache of 131,072 tokens {size}" in said


def test_the_weights_are_those_of_the_files_where_they_are_here(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    write_header(tmp_path / "model-1.safetensors", {"a": [1 << 17, 1 << 16]})
    said = refused(plan_of({"compute": {"dtype": "bfloat16"}}), folder, LAPTOP)
    assert "its weights take 16.0 GiB as bfloat16" in said


def test_a_drafter_counts_with_its_part_of_the_cache(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    drafting = {"dtype": "bfloat16", "speculative_config": json.dumps({"model": str(small)})}
    folder, machine = folder_of(tmp_path), replace(LAPTOP, host_bytes=17 * GIB)
    check(plan_of({"compute": drafting}), machine, folder)  # it is not here yet
    folder_of(small, num_hidden_layers=8)
    said = refused(plan_of({"compute": drafting}), folder, machine)
    assert "its weights take 15.0 GiB as bfloat16 and a cache of 16 tokens" in said
    assert ", its drafter 5.4 GiB, and 17.0 GiB are free" in said
    folder_of(tmp_path, num_hidden_layers=1)
    said = refused(plan_of({"compute": drafting}), folder, replace(LAPTOP, host_bytes=6 * GIB))
    assert said.endswith("; choose a smaller drafter, or leave --speculative-config out")


def test_every_rank_has_all_of_the_drafter(tmp_path: Path) -> None:
    folder, small = folder_of(tmp_path), tmp_path / "small"
    small.mkdir()
    folder_of(small, num_hidden_layers=8)  # 5.4 GiB, where half of the large model takes 7.5
    split = {"tensor_parallel_size": 2, "load_format": "dummy"}
    drafting = split | {"speculative_config": json.dumps({"model": str(small)})}
    gpus = replace(SERVER, gpus=(Gpu(13 * GIB, 0),) * 2)
    check(plan_of({"compute": split}), gpus, folder)
    said = refused(plan_of({"compute": drafting}), folder, gpus)
    assert "its drafter 5.4 GiB, over 2 GPUs, each with all of the drafter, and of its 13" in said
    check(plan_of({"compute": drafting}), replace(SERVER, gpus=(Gpu(15 * GIB, 0),) * 2), folder)


def test_of_a_head_its_files_count(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    folder_of(head, architectures=["LlamaForCausalLMEagle3"])
    write_header(head / "model.safetensors", {"a": [1 << 15, 1 << 16]})
    config = json.dumps({"method": "eagle3", "model": str(head)})
    drafting = {"dtype": "bfloat16", "speculative_config": config}
    said = refused(plan_of({"compute": drafting}), folder_of(tmp_path), LAPTOP)
    assert ", its drafter 4.0 GiB, and 16.0 GiB are free" in said


@pytest.mark.parametrize(("kind", "size"), [("Q4_K", 19.0), ("Q2_K", 17.0)])
def test_blocks_of_a_gguf_file_stay_small_but_in_float32(
    kind: str, size: float, tmp_path: Path
) -> None:
    sizes = {"model.embed_tokens": 131072, "lm_head": 1, "model.layers.0.mlp.up_proj": 8_388_607}
    tensors = {f"{name}.weight": {"type": kind, "shape": [n, 4096]} for name, n in sizes.items()}
    folder_of(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"tensors": tensors}))
    assert f"its weights take {size} GiB as bfloat16" in refused(plan_of(), tmp_path, PC)
    check(plan_of(), SERVER, tmp_path)
    assert "its weights take 130.0 GiB as float32" in refused(plan_of(), tmp_path, LAPTOP)


@pytest.mark.parametrize(("kind", "size"), [("fp8", 8.5), ("int8", 8.5), ("int4", 5.2)])
def test_quantized_weights_count_as_their_codes(kind: str, size: float, tmp_path: Path) -> None:
    """Llama 3.1 8B: seven billions of its weights are its layers'."""
    machine = Machine(64 * GIB, True, (Gpu(5 * GIB, 0),))
    said = refused(plan_of({"compute": {"quantization": kind}}), folder_of(tmp_path), machine)
    assert f"its weights take {size} GiB as {kind} and bfloat16" in said
    on_disk = {"quant_method": "gptq", "bits": 4} if kind == "int4" else {"quant_method": "fp8"}
    if kind != "int8":
        said = refused(plan_of(), folder_of(tmp_path, quantization_config=on_disk), machine)
        assert f"its weights take {size} GiB as {kind} and bfloat16" in said


def test_of_quantized_experts_alone_the_rest_counts_as_it_is(tmp_path: Path) -> None:
    """gpt-oss 20B, of whose weights nineteen billions are experts'."""
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 64, "head_dim": 64, "vocab_size": 201_088}
    experts = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 32}
    on_disk = {"quantization_config": {"quant_method": "mxfp4"}}
    folder = folder_of(tmp_path, **sizes, **heads, **experts, **on_disk)
    machine = Machine(64 * GIB, True, (Gpu(8 * GIB, 0),))
    assert "its weights take 12.2 GiB as fp4 and bfloat16" in refused(plan_of(), folder, machine)


def test_another_kind_than_the_folder_has_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, quantization_config={"quant_method": "fp8"})
    said = refused(plan_of({"compute": {"quantization": "int8"}}), folder, SERVER)
    assert "compute.quantization is int8, and the weights of this model are quantized" in said
    check(plan_of({"compute": {"quantization": "fp8"}}), SERVER, folder)


def test_without_bfloat16_quantized_weights_count_as_numbers(tmp_path: Path) -> None:
    said = refused(plan_of({"compute": {"quantization": "int4"}}), folder_of(tmp_path), LAPTOP)
    assert "its weights take 29.9 GiB as float32" in said


def test_a_model_that_would_fit_quantized_says_so(tmp_path: Path) -> None:
    machine = Machine(64 * GIB, True, (Gpu(16 * GIB, GIB),))
    said = refused(plan_of(), folder_of(tmp_path), machine)
    assert said.endswith("choose a smaller model, or --quantization fp8 or int4")
    check(plan_of({"compute": {"quantization": "fp8"}}), machine, folder_of(tmp_path))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization by bitsandbytes (nf4, fp4, LLM.int8())"),
        ({"quant_method": "aqlm"}, "quantization by aqlm is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits are not supported; 4 and 8 bits are. Take"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ's version 'gemv'"),
    ],
)
def test_what_is_quantized_in_another_way_is_refused_before_anything_is_started(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(plan_of(), folder_of(tmp_path, quantization_config=config), SERVER)


def test_a_cache_that_does_not_fit_is_distinguished_from_weights(tmp_path: Path) -> None:
    options: Tables = {"compute": {"max_model_len": 131072, "dtype": "bfloat16"}}
    said = refused(plan_of(options), folder_of(tmp_path, num_hidden_layers=16), LAPTOP)
    assert "a cache of 131,072 tokens 8.2 GiB" in said
    options = {"compute": {"max_batched_token_mem": 10**12}}
    said = refused(plan_of(options), folder_of(tmp_path), SERVER)
    assert "lower --max-model-len or --max-batched-token-mem" in said


def test_swap_space_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    said = refused(plan_of({"compute": {"swap_space": 500.0}}), folder_of(tmp_path), SERVER)
    assert said == "--swap-space 500: 64.0 GiB of memory are free on this machine"


def test_several_replicas_on_one_processor_need_as_much_each(tmp_path: Path) -> None:
    options: Tables = {"compute": {"dtype": "bfloat16"}}
    folder = folder_of(tmp_path, num_hidden_layers=16)
    check(plan_of(options), LAPTOP, folder)
    assert "in each of 3 processes" in refused(plan_of(options, compute=3), folder, LAPTOP)


def test_a_length_beyond_the_positions_is_refused(tmp_path: Path) -> None:
    said = refused(plan_of({"compute": {"max_model_len": 200_000}}), folder_of(tmp_path), SERVER)
    assert said.startswith("--max-model-len 200000: the model's positions end at 131072")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "architecture BloomForCausalLM is not supported"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000, and no model has more than 262144"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and no model has"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, and no model has more"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings is 1000000000000000"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings is 1000000000"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        ({"num_attention_heads": True}, "num_attention_heads must be a positive integer"),
        ({"num_key_value_heads": 5}, "is not a multiple of num_key_value_heads 5"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization by a method without a name is not supported",
        ),
    ],
)
def test_a_config_that_cannot_be_served_is_named_with_its_file(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    message = refused(plan_of(), folder_of(tmp_path, **changes), SERVER)
    assert message.startswith(f"{tmp_path}: config.json: ")
    assert said in message


def test_a_model_with_fewer_query_heads_than_ranks_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    said = refused(plan_of({"compute": {"tensor_parallel_size": 8}}), folder, SERVER)
    assert said.startswith("compute.tensor_parallel_size is 8, and the model has 4 query heads")


def test_a_config_that_is_no_json_is_named_once(tmp_path: Path) -> None:
    (folder_of(tmp_path) / "config.json").write_text("{")
    said = refused(plan_of(), tmp_path, SERVER)
    assert said.startswith(f"{tmp_path}/config.json is not valid JSON")


def test_a_shard_that_is_missing_or_cut_short_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    write_header(tmp_path / "b.safetensors", {"a": [64, 64]}, cut=1)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    assert "8,303 bytes long and should be 8,304" in refused(plan_of(), folder, SERVER)
    index.write_text(json.dumps({"weight_map": {"a": "c.safetensors"}}))
    assert "c.safetensors cannot be read (No such file" in refused(plan_of(), folder, SERVER)
    index.unlink()
    (tmp_path / "b.safetensors").write_bytes(b"nonsense nonsense")
    assert "is not a readable safetensors file" in refused(plan_of(), folder, SERVER)


def test_a_model_that_fits_on_no_gpu_may_fit_on_several(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, num_hidden_layers=80)  # 34 GiB
    four, dummy = replace(SERVER, gpus=(Gpu(24 * GIB, GIB),) * 4), {"load_format": "dummy"}
    split = plan_of({"compute": {**dummy, "tensor_parallel_size": 2}})
    said = refused(plan_of({"compute": dummy}), folder, four)
    assert said.endswith(", or raise --tensor-parallel-size")
    check(split, four, folder)
    small = replace(SERVER, gpus=(Gpu(12 * GIB, GIB),) * 2)
    assert ", over 2 GPUs, and of its 12.0 GiB" in refused(split, folder, small)
    copied = plan_of({"compute": {**dummy, "prefill_context_parallel_size": 2}})
    assert "does not fit on GPU 0" in refused(copied, folder, four)  # each has all of it


def test_each_process_of_a_split_model_needs_a_gpu() -> None:
    def said(device: str, num_gpus: int, **counts: int) -> str:
        with pytest.raises(ConfigError) as refused:
            check_ranks(plan_of(split, **counts), device, num_gpus)
        return str(refused.value)

    split: Tables = {"compute": {"tensor_parallel_size": 2}}
    assert said("cuda", 1) == (
        "--tensor-parallel-size 2: that takes 2 GPUs, and 1 can be used here; ask for fewer"
    )
    assert "--tensor-parallel-size 2 --computes 2: that takes 4 GPUs" in said("cuda", 3, compute=2)
    assert "the device sim has no model to split" in said("sim", 8)
    split = {"compute": {"prefill_context_parallel_size": 2}}
    assert said("cuda", 1).startswith("--prefill-context-parallel-size 2: that takes 2 GPUs")
    split = {"compute": {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2}}
    assert "cannot have parts of the model as well yet" in said("cuda", 8)
    split = {"compute": {"tensor_parallel_size": 2}}
    stages: Tables = {"compute": {"pipeline_parallel_size": 2}}
    check_ranks(plan_of(stages, compute=2), "cpu", 0)
    check_ranks(plan_of(split), "cuda", 0)  # nobody knows how many there are
    check_ranks(plan_of(split), "cpu", 1)
    check_ranks(plan_of(compute=4), "cuda", 2)  # they share


@pytest.mark.parametrize(
    ("more", "device", "said"),
    [
        ({}, "sim", "the device sim has no model to split"),
        ({}, "cuda", "-parallel-size 2 --computes 2: that takes 4 GPUs, and 3 can be used here"),
        ({"tensor_parallel_size": 3}, "cuda", "size 3 --pipeline.* 2 .* that takes 12 GPUs, and 3"),
        ({"prefill_context_parallel_size": 2}, "cpu", "leave --pipeline-parallel-size out"),
        ({"pipeline_stages": ["tcp://a:1", "tcp://b:1"]}, "cpu", "leave .* pipeline_stages out"),
    ],
)
def test_stages_that_cannot_be_had_are_refused(
    more: dict[str, Any], device: str, said: str
) -> None:
    plan = plan_of({"compute": {"pipeline_parallel_size": 2, **more}}, compute=2)
    with pytest.raises(ConfigError, match=said):
        check_ranks(plan, device, 3)


def test_a_model_with_fewer_layers_than_stages_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, num_hidden_layers=2)
    staged = {"device": "cpu", "load_format": "dummy", "pipeline_parallel_size": 3}
    said = refused(plan_of({"compute": staged}), folder, LAPTOP)
    assert said.startswith("compute.pipeline_parallel_size is 3, and the model has 2 layers")


@pytest.mark.parametrize(
    ("name", "machine", "device"),
    [
        ("auto", SERVER, "cuda"),
        ("auto", LAPTOP, "cpu"),
        ("cpu", SERVER, "cpu"),
        ("sim", LAPTOP, "sim"),
    ],
)
def test_the_device_is_known_before_it_is_used(name: str, machine: Machine, device: str) -> None:
    assert device_of(plan_of({"compute": {"device": name}}), machine) == device


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=NO_GPU):
        device_of(plan_of({"compute": {"device": "cuda"}}), LAPTOP)


def test_the_virtual_device_needs_no_model(tmp_path: Path) -> None:
    check(plan_of({"compute": {"device": "sim"}}), LAPTOP, folder_of(tmp_path, vocab_size=10**9))


def test_launcher_and_compute_know_the_same() -> None:
    fields = ComputeSettings.model_fields
    assert set(get_args(fields["dtype"].annotation)) == {"auto", *ITEM_BYTES}
    assert set(FAMILIES) == set(ARCHITECTURES)
    assert set(SCALINGS) == set(ROTATIONS)
    for name, family in FAMILIES.items():
        known = ARCHITECTURES[name]
        assert known.has_next_tokens == (family.next_token_layers is not None)
        assert {*known.takes} - {"kv_lora_rank"} <= family.config.model_fields.keys()


def test_the_width_of_a_head_follows_the_family() -> None:
    qwen = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024}
    assert read_shape(qwen).head_dim == 128
    assert read_shape(CONFIG | {"head_dim": None}).head_dim == 4096 // 32
    with pytest.raises(ModelError, match="head_dim is 100000"):
        read_shape(CONFIG | {"head_dim": 100_000})
