"""Checkpoints are read whole, in shards and not at all where they do not fit."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from common.architectures import architecture_of
from common.config import TelemetrySettings
from common.errors import ModelError
from common.telemetry import log
from services.compute.layers.weighted_layers import KernelLinears
from services.compute.models.decoder import Decoder
from services.compute.models.eager_decoder import EagerDecoder
from services.compute.models.families import read_config
from services.compute.models.safetensors_files import SafetensorsFiles, Stack
from services.compute.models.weights import CheckpointWeights
from tests.unit.compute.tiny_models import make_model, save_model

CPU = torch.device("cpu")
HIDDEN = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama")


def load(folder: Path, needs_head: bool = True) -> Decoder[Any]:
    config = read_config(json.loads((folder / "config.json").read_text()))
    weights = CheckpointWeights(SafetensorsFiles(folder, CPU), torch.float32, CPU)
    return config.build(weights, KernelLinears(torch.float32, keeps_dense=False), needs_head)


def on_the_cpu(decoder: Decoder[Any]) -> EagerDecoder:
    return EagerDecoder(decoder, decoder.shape.max_position_embeddings)


def weights_of(part: Any) -> Iterator[torch.Tensor]:
    """All tensors of a decoder, or of a part of it, that were read from its folder."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from weights_of(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from weights_of(getattr(part, field.name))


def assert_equal(ours: Decoder[Any], theirs: Decoder[Any]) -> None:
    for one, other in zip(weights_of(ours), weights_of(theirs), strict=True):
        assert torch.equal(one, other)


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_shards_give_the_same_model(model: PreTrainedModel, tmp_path: Path) -> None:
    whole = load(save_model(model, tmp_path / "whole"))
    sharded = save_model(model, tmp_path / "sharded", shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert_equal(load(sharded), whole)


def test_several_files_without_an_index_are_read_too(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    whole = load(save_model(model, tmp_path / "whole"))
    folder = save_model(model, tmp_path / "sharded", shard_size="60KB")
    (folder / "model.safetensors.index.json").unlink()
    assert_equal(load(folder), whole)


def test_people_see_how_many_tensors_are_loaded(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "SHOWN_EVERY_S", 0.0)
    stream = io.StringIO()
    log.configure("compute-0", "compute", TelemetrySettings(log_format="console"), stream)
    load(save_model(model, tmp_path))
    log.configure("", "", TelemetrySettings(log_format="json"), io.StringIO())
    structlog.reset_defaults()
    shown = stream.getvalue().splitlines()
    count = len(model.state_dict())
    assert f"loading weights: {count} of {count} tensors" in shown[-1]
    assert len(shown) >= count


def test_weights_are_cast(model: PreTrainedModel, tmp_path: Path) -> None:
    cast = load(save_model(model.to(torch.bfloat16), tmp_path / "bfloat16"))
    rounded = load(save_model(model.to(torch.float32), tmp_path / "float32"))
    assert {weight.dtype for weight in weights_of(cast)} == {torch.float32}
    assert_equal(cast, rounded)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(model: PreTrainedModel, tmp_path: Path, name: str) -> None:
    save_model(model, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=re.escape(f"{name} is missing")):
        load(tmp_path)


def test_a_tensor_that_does_not_belong_is_named(model: PreTrainedModel, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update(surprise=torch.zeros(2)))
    with pytest.raises(ModelError, match="surprise"):
        load(tmp_path)


def test_known_buffers_and_a_tied_head_that_was_saved_are_left_alone(tmp_path: Path) -> None:
    save_model(make_model("llama_tied"), tmp_path)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = torch.zeros(199, 64)

    rewrite(tmp_path, add)
    assert on_the_cpu(load(tmp_path)).logits(torch.ones(1, 64)).abs().sum() > 0


@pytest.mark.parametrize(
    "names",
    [("self_attn.k_scale", "self_attn.v_scale"), ("self_attn.k_proj.k_scale",),
     ("self_attn.attn.v_scale",), ("self_attn.kv_scale",), ("self_attn.v_proj.output_scale",)],
)  # fmt: skip
def test_scales_for_another_kv_cache_are_left_alone(
    names: tuple[str, ...], model: PreTrainedModel, tmp_path: Path
) -> None:
    save_model(model, tmp_path)
    scales = {f"model.layers.1.{name}": torch.tensor(0.02) for name in names}
    rewrite(tmp_path, lambda tensors: tensors.update(scales))
    load(tmp_path)


def test_a_tensor_of_another_shape_is_named(model: PreTrainedModel, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[65\]"):
        load(tmp_path)


def test_quantized_tensors_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
    )
    with pytest.raises(ModelError, match="quantized"):
        load(tmp_path)


def test_a_pickled_checkpoint_is_never_opened(model: PreTrainedModel, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="Convert it"):
        load(tmp_path)


def test_an_empty_folder_and_a_broken_file_are_refused(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    save_model(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ModelError, match="download it again"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors file"):
        load(tmp_path)


def test_an_index_cannot_name_files_outside_the_folder(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    save_model(model, tmp_path)
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the folder"):
        load(tmp_path)


def test_a_shard_that_is_missing_is_named(model: PreTrainedModel, tmp_path: Path) -> None:
    save_model(model, tmp_path, shard_size="60KB")
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    first.unlink()
    with pytest.raises(ModelError, match=first.name):
        load(tmp_path)


def test_names_may_lack_the_prefix_as_in_folders_of_embedding_models(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    whole = load(save_model(model, tmp_path / "whole"))
    bare = tmp_path / "bare"
    model.base_model.save_pretrained(bare)
    assert architecture_of(json.loads((bare / "config.json").read_text())) == "LlamaModel"
    inside = load(bare, needs_head=False)
    assert whole.has_head and not inside.has_head
    assert torch.equal(on_the_cpu(whole).normed(HIDDEN), on_the_cpu(inside).normed(HIDDEN))
    assert torch.equal(whole.embedding.weight_VE, inside.embedding.weight_VE)
    for ours, theirs in zip(weights_of(whole.layers), weights_of(inside.layers), strict=True):
        assert torch.equal(ours, theirs)


def test_a_head_beside_bare_names_is_found(model: PreTrainedModel, tmp_path: Path) -> None:
    def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    whole = load(save_model(model, tmp_path))
    rewrite(tmp_path, without_prefix)
    assert_equal(load(tmp_path), whole)


def test_a_model_that_looks_ahead_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelError, match="is_causal is false"):
        read_config({**raw, "is_causal": False})


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_of_all_experts_is_read_part_by_part(transposed: bool, tmp_path: Path) -> None:
    parts = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    stored = parts.transpose(1, 2).contiguous() if transposed else parts
    save_file({"model.layers.0.mlp.experts.up": stored}, tmp_path / "model.safetensors")
    stack = Stack(".experts.up", ".experts.{}.up_proj.weight", transposed)
    files = SafetensorsFiles(tmp_path, CPU, stacks=[stack])
    weights = CheckpointWeights(files, torch.float32, CPU)
    for number, part in enumerate(parts):
        assert weights.has(f"model.layers.0.mlp.experts.{number}.up_proj")
        read = weights.linear([f"model.layers.0.mlp.experts.{number}.up_proj"], [4], 6)
        assert torch.equal(read, part)
    weights.finish()
